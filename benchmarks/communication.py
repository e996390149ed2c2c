"""What sharding costs a step of the default run: `torchrun --nproc_per_node=2 -m benchmarks.communication`.

The default training step (its data, batch and model) on the mesh that the flags make, in turn with the same step on
plain modules, which talk to no one.  What the first takes longer is communication: collectives, the copies around them,
and waiting for the slower rank.  Medians of rank 0.
"""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import train_mmdit
from data.index import build_index
from data.order import GlobalOrder
from data.plan import BatchPlan
from data.reader import Reader
from data.shards import expand_shards
from model.encoders import Encoders
from model.mmdit import MMDiT, MMDiTConfig, init_parameter
from model.mmdit_plan import FSDP_UNITS
from parallel.distributed import init_distributed, is_main, shutdown
from parallel.fsdp import shard_model
from parallel.grad_norm import clip_grad_norm
from parallel.init_weights import materialize
from parallel.mesh import build_mesh, data_parallel
from utils.config import parse, run_main
from utils.optimizer import build_optimizer

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Config:
    dp_replicate: int = -1  # copies of the model, as ./launch.sh has them for the default run
    dp_shard: int = 1
    num_steps: int = 40  # of each kind; the first quarter warms up
    cache_folder: str = ".cache"  # as the training script's


def timed_step(model: nn.Module, optimizer, micro_batches: list, cfg: train_mmdit.Config) -> dict[str, float]:
    """Take one step on encoded micro-batches and return the seconds of each phase."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for batch in micro_batches:
        started = time.perf_counter()
        losses = train_mmdit.sample_losses(model, batch, cfg) * batch.weight
        between = time.perf_counter()
        (losses.sum() / cfg.global_batch_size).backward()
        seconds["forward"] += between - started
        seconds["backward"] += time.perf_counter() - between
    started = time.perf_counter()
    clip_grad_norm(model.parameters(), cfg.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    seconds["optimizer"] = time.perf_counter() - started
    return seconds


def main(cfg: Config) -> None:
    trained = train_mmdit.Config()
    device = init_distributed(trained.timeout_s)
    mesh = build_mesh(device.type, cfg.dp_replicate, cfg.dp_shard)
    rank, num_ranks = data_parallel(mesh)
    encoders, cache = Encoders(trained.model, device, torch.float32), Path(cfg.cache_folder)
    shards = expand_shards(trained.data, "train", cache)
    index = build_index(shards, encoders.text.count_tokens, encoders.text.tokenizer_id, cache)
    plan = BatchPlan(
        index, GlobalOrder(len(index), trained.global_batch_size, 0), num_ranks=num_ranks, rank=rank,
        max_tokens=trained.max_tokens_per_micro_batch, num_empty_tokens=encoders.text.count_tokens(""), seed=0,
    )  # fmt: skip
    reader = Reader(index)
    kinds = {}
    for name in ("sharded", "plain"):
        with torch.device("meta"):
            model = MMDiT(MMDiTConfig.from_folder(f"{trained.model}/transformer"))
        if name == "sharded":
            shard_model(model, FSDP_UNITS, mesh, torch.float32, torch.float32, trained.reshard_after_forward)
        materialize(model, device, init_parameter, seed=0)
        optimizer = build_optimizer("adamw", model.named_parameters(), 1e-4, (0.9, 0.99), 1e-8, 0.01)
        kinds[name] = (model, optimizer)

    times = {name: defaultdict(list) for name in kinds}
    for step in range(cfg.num_steps):
        batches = [
            train_mmdit.make_batch([reader.read(p, encoders.needs_picture) for p in planned], encoders, trained)
            for planned in plan.micro_batches(step)
        ]
        for name, (model, optimizer) in kinds.items():
            dist.barrier()
            for phase, seconds in timed_step(model, optimizer, batches, trained).items():
                times[name][phase].append(seconds)
    if is_main():
        first = cfg.num_steps // 4
        medians = {
            name: {phase: statistics.median(values[first:]) for phase, values in phases.items()}
            for name, phases in times.items()
        }
        print(f"{num_ranks} data ranks, mesh {tuple(mesh.shape)}, {cfg.num_steps - first} steps of each kind, in turn")
        print(f"{'':12}{'sharded':>10}{'plain':>10}{'communication':>15}")
        for phase in PHASES:
            sharded, plain = (medians[name][phase] * 1e3 for name in kinds)
            print(f"{phase:12}{sharded:7.1f} ms{plain:7.1f} ms{sharded - plain:12.1f} ms")
        sharded, plain = (sum(medians[name].values()) * 1e3 for name in kinds)
        print(f"{'together':12}{sharded:7.1f} ms{plain:7.1f} ms{sharded - plain:12.1f} ms {1 - plain / sharded:6.1%}")
    shutdown()


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
