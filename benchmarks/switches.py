"""What each memory and speed switch costs and saves: `torchrun --nproc_per_node=2 -m benchmarks.switches`.

One model of about 20 M parameters for each switch, sharded over all ranks; their steps (forward, backward, clip,
optimizer) run in turn, so that all see the same machine.  Prints for rank 0:

  step     median seconds of a step, and its ratio to that of the first row
  kept     MiB alive between forward and backward that were not before it: what the backward pass needs, and gathered
           weights that are not freed; of storages as eager operators make them, so none is shown for compiled blocks
  state    MiB of optimizer state on this rank
"""

import importlib.util
import statistics
import time
import weakref
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.layout import PackedLayout
from model.mmdit import MMDiT, MMDiTConfig, init_parameter
from model.mmdit_plan import FSDP_UNITS
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.compile import compile_units
from parallel.distributed import init_distributed, is_main, shutdown
from parallel.fsdp import shard_model
from parallel.grad_norm import clip_grad_norm
from parallel.init_weights import materialize
from parallel.mesh import build_mesh
from utils.config import parse, run_main
from utils.optimizer import build_optimizer, optimizer_tensors

MIB = 2**20


@dataclass(frozen=True)
class Config:
    width: int = 256
    num_layers: int = 8
    num_samples: int = 2  # a rank
    side: int = 16  # tokens a side of each picture: 16 = 256 pixels
    txt_len: int = 64
    repeats: int = 5
    compile: bool = False  # compiled blocks too: the C++ compiler needs minutes at first
    threads: int = 1  # a rank


@dataclass(frozen=True)
class Switches:
    activation_checkpointing: str = "none"
    reshard_after_forward: bool = True
    num_prefetch: int = 0
    cpu_offload: bool = False
    reduce_dtype: torch.dtype = torch.float32
    optimizer: str = "adamw"
    compile: bool = False

    def __str__(self) -> str:
        plain = Switches()
        changed = [f"{n} {v}" for n, v in vars(self).items() if v != getattr(plain, n)]
        return ", ".join(changed) or "(none)"


class AliveBytes(TorchDispatchMode):
    """Count the bytes of all storages that operators made in here and that are still alive."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        return out

    def total(self) -> int:
        """Return the bytes that are alive now."""
        return sum(storage.nbytes() for ref in self.storages.values() if (storage := ref()) is not None)


def rows(cfg: Config) -> list[Switches]:
    plain = Switches()
    chosen = [
        plain,
        replace(plain, activation_checkpointing="every_2"),
        replace(plain, activation_checkpointing="selective"),
        replace(plain, activation_checkpointing="full"),
        replace(plain, reshard_after_forward=False),
        replace(plain, num_prefetch=2),
        replace(plain, cpu_offload=True),
        replace(plain, reduce_dtype=torch.bfloat16),
        replace(plain, optimizer="muon"),
    ]
    if importlib.util.find_spec("torchao"):
        chosen.append(replace(plain, optimizer="adamw8bit"))
    if cfg.compile:
        chosen += [replace(plain, compile=True), replace(plain, compile=True, activation_checkpointing="selective")]
    return chosen


def build(model_config: MMDiTConfig, switches: Switches):
    """Return a sharded model and its optimizer."""
    with torch.device("meta"):
        model = MMDiT(model_config)
    apply_activation_checkpointing(model, FSDP_UNITS, switches.activation_checkpointing)
    if switches.compile:
        compile_units(model, FSDP_UNITS)
    shard_model(
        model, FSDP_UNITS, build_mesh("cpu"), torch.float32, switches.reduce_dtype, switches.reshard_after_forward,
        switches.num_prefetch, switches.cpu_offload,
    )  # fmt: skip
    materialize(model, torch.device("cpu"), init_parameter, seed=0)
    named = model.named_parameters()
    return model, build_optimizer(switches.optimizer, named, 1e-4, (0.9, 0.99), 1e-8, 0.01, FSDP_UNITS)


def step(model: nn.Module, optimizer, batch: tuple, alive: AliveBytes | None = None) -> int:
    """Take one training step; with `alive`, return the bytes kept for the backward pass."""
    kept = -alive.total() if alive else 0
    loss = model(*batch).square().mean()
    kept += alive.total() if alive else 0
    loss.backward()
    clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return kept


def main(cfg: Config) -> None:
    device = init_distributed(timeout_s=1800)
    if device.type != "cpu":
        raise ValueError("benchmarks.switches measures CPU processes; hide the GPUs: CUDA_VISIBLE_DEVICES=''")
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(dist.get_rank())
    model_config = MMDiTConfig(
        num_layers=cfg.num_layers, num_attention_heads=max(1, cfg.width // 128), joint_attention_dim=cfg.width
    )
    layout = PackedLayout.build([[(1, cfg.side, cfg.side)]] * cfg.num_samples, [cfg.txt_len] * cfg.num_samples)
    num_img, num_txt = len(layout.img_sample), len(layout.txt_sample)
    batch = torch.randn(num_img, 64), torch.randn(num_txt, cfg.width), torch.rand(cfg.num_samples), layout
    cases = {switches: build(model_config, switches) for switches in rows(cfg)}
    kept = {}
    for switches, (model, optimizer) in cases.items():  # also the warm-up
        if switches.compile:
            step(model, optimizer, batch)
        else:
            with AliveBytes() as alive:
                step(model, optimizer, batch)
                kept[switches] = step(model, optimizer, batch, alive)
    seconds = {switches: [] for switches in cases}
    for _ in range(cfg.repeats):
        for switches, (model, optimizer) in cases.items():
            dist.barrier()
            started = time.perf_counter()
            step(model, optimizer, batch)
            seconds[switches].append(time.perf_counter() - started)
    if is_main():
        parameters = sum(p.numel() for p in next(iter(cases.values()))[0].parameters()) / 1e6
        print(f"{parameters:.1f} M parameters, {dist.get_world_size()} ranks, {num_img} + {num_txt} tokens a rank")
        print(f"{'switch':<58}{'step':>9}{'ratio':>8}{'kept':>10}{'state':>10}")
        medians = {switches: statistics.median(times) for switches, times in seconds.items()}
        first = next(iter(medians.values()))
        for switches, (model, optimizer) in cases.items():
            state = [
                x.to_local() if isinstance(x, DTensor) else x for x in optimizer_tensors(optimizer, model).values()
            ]
            state_mib = sum(x.numel() * x.element_size() for x in state) / MIB
            kept_mib = f"{kept[switches] / MIB:.1f}" if switches in kept else "-"
            step_s = medians[switches]
            print(f"{switches!s:<58}{step_s:>9.3f}{step_s / first:>8.2f}{kept_mib:>10}{state_mib:>10.1f}")
    shutdown()


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
