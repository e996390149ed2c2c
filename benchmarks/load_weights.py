"""How fast released weights reach a sharded model: `./launch.sh -m benchmarks.load_weights`.

--case mesh: a synthetic file set in the released layout (several files and an index) onto a dp_shard 2 × tp 2 mesh of
four gloo processes, by `parallel.weights.load_weights`, by torch's HuggingFaceStorageReader, and by loading every file
on every rank and copying the rank's part.  The three take turns in the same processes; medians.
--case 20b: the whole 20.43 B model's file set (41 GB), of which this process loads the part of one rank of a
dp_shard 8 × tp 4 mesh under a fake process group.

Peak memory is the highest resident size during a load (VmHWM, reset before each) less what was resident before;
pages of mapped files count.  Files lie in a temporary folder that is deleted at the end.
"""

import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.testing._internal.distributed.fake_pg import FakeStore

from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import FSDP_UNITS, TENSOR_PARALLEL_PLAN
from parallel.fsdp import shard_model
from parallel.mesh import build_mesh
from parallel.tensor_parallel import apply_tensor_parallel
from parallel.weights import load_weights
from utils.config import parse, run_main

STEM = "diffusion_pytorch_model"


@dataclass(frozen=True)
class Config:
    case: str = "mesh"  # mesh or 20b
    num_layers: int = 3  # of the released width: 3 are 2 GB in bfloat16
    num_files: int = 4
    dtype: str = "bfloat16"  # of the parameters; the files are bfloat16
    repeats: int = 5
    cold: bool = False  # drop the page cache before each load (needs root)
    rank: int = 5  # case 20b: which of the 32 ranks
    folder: str = ""  # where the temporary folder is made; the system's if empty


# ---- the file set ---------------------------------------------------------------------------------------------------
def write_files(folder: Path, config: MMDiTConfig, num_files: int) -> int:
    """Write random bfloat16 weights of a model, with an index.  Returns the bytes of all tensors."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in MMDiT(config).named_parameters()}
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
    total, groups, done = sum(sizes.values()), [[] for _ in range(num_files)], 0
    for name in sorted(shapes):
        groups[min(num_files - 1, done * num_files // total)].append(name)
        done += sizes[name]
    noise = os.urandom(2**20 - 7)  # tiled; an odd length, so that no two tensors are alike
    weight_map = {}
    for i, names in enumerate(groups):
        file = f"{STEM}-{i + 1:05d}-of-{num_files:05d}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + sizes[name]]}
            at, weight_map[name] = at + sizes[name], file
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            for start in range(0, at, len(noise)):
                out.write(noise[: at - start])
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index))
    return total


def sharded_model(config: MMDiTConfig, mesh, dtype: torch.dtype) -> nn.Module:
    """Return a model whose shards have memory, but not yet values or pages."""
    with torch.device("meta"):
        model = MMDiT(config).to(dtype)
    apply_tensor_parallel(model, TENSOR_PARALLEL_PLAN, mesh["tp"])
    shard_model(model, FSDP_UNITS, mesh, dtype, torch.float32, True)
    return model.to_empty(device="cpu")


def local_bytes(model: nn.Module, itemsize: int) -> int:
    return sum(p.to_local().numel() for p in model.parameters()) * itemsize


# ---- the three ways -------------------------------------------------------------------------------------------------
def ours(model: nn.Module, folder: Path) -> None:
    load_weights(model, folder)


def storage_reader(model: nn.Module, folder: Path) -> None:
    dcp.load(dict(model.named_parameters()), storage_reader=HuggingFaceStorageReader(str(folder)))


def whole_files(model: nn.Module, folder: Path) -> None:
    state = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=True))


WAYS: dict[str, Callable[[nn.Module, Path], None]] = {
    "load_weights": ours,
    "HuggingFaceStorageReader": storage_reader,
    "every file on every rank": whole_files,
}


def measure(load: Callable[[nn.Module, Path], None], model: nn.Module, folder: Path) -> tuple[float, int, int]:
    """Return a load's seconds, by how many bytes the resident size rose at most, and the bytes that it read."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at the present resident size
    resident, read, started = _kernel("status", "VmRSS") * 1024, _kernel("io", "rchar"), time.perf_counter()
    load(model, folder)
    seconds = time.perf_counter() - started
    return seconds, _kernel("status", "VmHWM") * 1024 - resident, _kernel("io", "rchar") - read


def _kernel(file: str, field: str) -> int:
    """Return a number that the kernel keeps of this process; memory is in KiB."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def mesh_rank(rank: int, cfg: Config, folder: Path, results) -> None:
    """Load in turn in each way, on one of four ranks."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    mesh, dtype = build_mesh("cpu", dp_shard=2, tp=2), getattr(torch, cfg.dtype)
    config = MMDiTConfig(num_layers=cfg.num_layers)
    reference = None
    for turn in range(cfg.repeats + 1):
        for i in range(len(WAYS)):
            way = list(WAYS)[(i + turn) % len(WAYS)]
            model = sharded_model(config, mesh, dtype)
            if cfg.cold and rank == 0:
                drop_page_cache()
            dist.barrier()
            seconds, peak, read = measure(WAYS[way], model, folder)
            shards = [p.to_local() for p in model.parameters()]
            reference = reference or [shard.clone() for shard in shards]
            if not all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(shards, reference, strict=True)):
                raise AssertionError(f"{way} gives other weights")
            if turn:  # the first turn warms up
                results.put(
                    (way, turn, seconds, peak - local_bytes(model, dtype.itemsize), read / local_bytes(model, 2))
                )
            del model, shards
    dist.barrier()
    dist.destroy_process_group()


# ---- the cases ------------------------------------------------------------------------------------------------------
def mesh_case(cfg: Config, folder: Path) -> None:
    total = write_files(folder, MMDiTConfig(num_layers=cfg.num_layers), cfg.num_files)
    results = mp.get_context("spawn").SimpleQueue()
    ranks = mp.start_processes(mesh_rank, (cfg, folder, results), nprocs=4, join=False, start_method="spawn")
    rows = [results.get() for _ in range(4 * cfg.repeats * len(WAYS))]
    ranks.join()
    cache = "dropped before each load" if cfg.cold else "warm"
    print(f"{total / 1e9:.2f} GB in {cfg.num_files} files onto dp_shard 2 × tp 2, {cfg.dtype}, page cache {cache}")
    print(f"{'':26}{'median s':>9}{'fastest':>9}{'times ours':>11}{'MB beside shard':>17}{'read / shard':>14}")
    medians = {}
    for way in WAYS:
        turns = [max(r[2] for r in rows if r[:2] == (way, turn)) for turn in range(1, cfg.repeats + 1)]
        beside, read = (max(r[column] for r in rows if r[0] == way) for column in (3, 4))
        medians[way] = statistics.median(turns)
        times = medians[way] / medians["load_weights"]
        print(f"{way:26}{medians[way]:9.2f}{min(turns):9.2f}{times:10.1f}×{beside / 1e6:17.0f}{read:14.3f}")
    print("read / shard: bytes by read calls, as the kernel counts them (mapped pages are not among them), worst rank")


def full_case(cfg: Config, folder: Path) -> None:
    config = MMDiTConfig()
    started = time.perf_counter()
    total = write_files(folder, config, 9)
    print(f"{total / 1e9:.2f} GB in 9 files written in {time.perf_counter() - started:.0f} s")
    dist.init_process_group("fake", store=FakeStore(), rank=cfg.rank, world_size=32)
    started, dtype = time.perf_counter(), getattr(torch, cfg.dtype)
    model = sharded_model(config, build_mesh("cpu", dp_shard=8, tp=4), dtype)
    print(f"model built and cut in {time.perf_counter() - started:.1f} s")
    dist.destroy_process_group()  # the other 31 ranks are not there to agree with
    if cfg.cold:
        drop_page_cache()
    seconds, peak, read = measure(ours, model, folder)
    shard = local_bytes(model, dtype.itemsize)
    print(f"rank {cfg.rank} of dp_shard 8 × tp 4: {seconds:.1f} s for a shard of {shard / 1e9:.3f} GB in {cfg.dtype}")
    print(f"read {read / 1e9:.3f} GB, {read / local_bytes(model, 2):.3f} of its part of the files")
    print(f"peak memory: shard + {(peak - shard) / 1e6:.0f} MB")


def main(cfg: Config) -> None:
    cases = {"mesh": mesh_case, "20b": full_case}
    if cfg.case not in cases:
        raise ValueError(f"--case must be one of {', '.join(cases)}, got {cfg.case!r}")
    needed = {"mesh": 0.7 * cfg.num_layers + 0.5, "20b": 41.0}[cfg.case]
    with tempfile.TemporaryDirectory(prefix="load-weights-", dir=cfg.folder or None) as folder:
        if (free := shutil.disk_usage(folder).free / 1e9) < needed + 5:
            raise ValueError(f"{folder} has {free:.0f} GB free, {needed + 5:.0f} are needed; give another --folder")
        cases[cfg.case](cfg, Path(folder))


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
