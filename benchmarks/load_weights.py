"""How fast released weights reach a sharded model: `./launch.sh -m benchmarks.load_weights`.

--case mesh: a synthetic file set in the released layout (several files and an index) onto a dp_shard 2 × tp 2 mesh of
four gloo processes, by `parallel.weights.load_weights`, by torch's HuggingFaceStorageReader, and by loading every file
on every rank and copying the rank's part.  The three take turns in the same processes; medians.
--case 20b: the whole 20.43 B model's file set (41 GB), of which this process loads the part of one rank of a
dp_shard 8 × tp 4 mesh under a fake process group.

Peak memory is the highest resident size during a load (VmHWM, reset before each) less what was resident before the
model was built; pages of mapped files count.  Files lie in a temporary folder that is deleted at the end.
"""

import ctypes
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
    num_layers: int = 3  # case mesh; of the released width, 3 are 2 GB in bfloat16
    num_heads: int = 24  # case mesh; of 128, as released
    num_files: int = 4
    dtype: str = "bfloat16"  # of the parameters; the files are bfloat16
    repeats: int = 5
    cold: bool = False  # case mesh: drop the files from the page cache before each load
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
    """Return a model cut for the mesh, still without memory."""
    with torch.device("meta"):
        model = MMDiT(config).to(dtype)
    apply_tensor_parallel(model, TENSOR_PARALLEL_PLAN, mesh["tp"])
    shard_model(model, FSDP_UNITS, mesh, dtype, torch.float32, True)
    return model


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


def measure(load: Callable[[nn.Module, Path], None], model: nn.Module, folder: Path, resident: int) -> dict:
    """Return a load's seconds, its processor seconds, peak memory above `resident`, and bytes read."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at the present resident size
    read, started, cpu = _kernel("io", "rchar"), time.perf_counter(), time.process_time()
    load(model, folder)
    return {
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - cpu,
        "peak": 1024 * _kernel("status", "VmHWM") - resident,
        "read": _kernel("io", "rchar") - read,
    }


def resident_bytes(model: nn.Module) -> int:
    """Return this process's resident size, once it has given back the model's memory and what else it does not use."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.to_local().untyped_storage().resize_(0)  # FSDP holds the storage too, so it would not go
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return 1024 * _kernel("status", "VmRSS")


def _kernel(file: str, field: str) -> int:
    """Return a number that the kernel keeps of this process; memory is in KiB."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mesh_rank(rank: int, cfg: Config, folder: Path) -> None:
    """Load in turn in each way, on one of four ranks; the measurements go to a file."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    mesh, dtype = build_mesh("cpu", dp_shard=2, tp=2), getattr(torch, cfg.dtype)
    model, reference, measured = sharded_model(mesh_config(cfg), mesh, dtype), None, []
    for turn in range(cfg.repeats + 1):
        for i in range(len(WAYS)):
            way = list(WAYS)[(i + turn) % len(WAYS)]
            resident = resident_bytes(model)
            model.to_empty(device="cpu")  # takes addresses, not yet pages
            if cfg.cold and rank == 0:
                forget(folder)
            dist.barrier()
            figures = measure(WAYS[way], model, folder, resident)
            if turn == 0:  # warms up, and compares
                digest = [p.to_local().view(torch.uint8).sum(dtype=torch.int64).item() for p in model.parameters()]
                reference = reference or digest
                if digest != reference:
                    raise AssertionError(f"{way} loads other weights")
            else:
                measured.append(figures | {"turn": turn, "way": way, "shard": local_bytes(model, 1)})
    (folder / f"rank-{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


# ---- the cases ------------------------------------------------------------------------------------------------------
def mesh_config(cfg: Config) -> MMDiTConfig:
    return MMDiTConfig(num_layers=cfg.num_layers, num_attention_heads=cfg.num_heads)


def mesh_case(cfg: Config, folder: Path) -> None:
    total = write_files(folder, mesh_config(cfg), cfg.num_files)
    mp.start_processes(mesh_rank, (cfg, folder), nprocs=4, start_method="spawn")
    measured = [figures for rank in range(4) for figures in json.loads((folder / f"rank-{rank}.json").read_text())]
    itemsize = getattr(torch, cfg.dtype).itemsize
    cache = "dropped before each load" if cfg.cold else "warm"
    print(f"{total / 1e9:.2f} GB in {cfg.num_files} files onto dp_shard 2 × tp 2, {cfg.dtype}, page cache {cache}")
    print("the slowest rank's seconds, medians of the turns; the processor seconds of all ranks; the worst rank's rest")
    columns = ("seconds", "fastest", "vs ours", "CPU s", "MB + shard", "read/shard")
    print(f"{'':26}" + "".join(f"{column:>12}" for column in columns))
    ours_s = None
    for way in WAYS:
        of_way = [figures for figures in measured if figures["way"] == way]
        turns = [[f for f in of_way if f["turn"] == turn] for turn in range(1, cfg.repeats + 1)]
        seconds = [max(f["seconds"] for f in turn) for turn in turns]
        median_s = statistics.median(seconds)
        ours_s = ours_s or median_s
        cpu = statistics.median(sum(f["cpu"] for f in turn) for turn in turns)
        beside = max(f["peak"] - f["shard"] * itemsize for f in of_way) / 1e6
        read = max(f["read"] / (f["shard"] * 2) for f in of_way)
        print(f"{way:26}{median_s:12.2f}{min(seconds):12.2f}{median_s / ours_s:11.1f}×{cpu:12.2f}", end="")
        print(f"{beside:12.0f}{read:12.3f}")
    print("read/shard: bytes that read calls returned, as the kernel counts them; mapped pages are not among them")


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
    resident = resident_bytes(model)
    model.to_empty(device="cpu")
    forget(folder)
    figures, shard = measure(ours, model, folder, resident), local_bytes(model, dtype.itemsize)
    print(f"rank {cfg.rank} of dp_shard 8 × tp 4: a shard of {shard / 1e9:.3f} GB in {cfg.dtype}, from a cold disk")
    print(f"{figures['seconds']:.1f} s, {figures['cpu']:.1f} s of them on the processor")
    print(
        f"read {figures['read'] / 1e9:.3f} GB, {figures['read'] / local_bytes(model, 2):.3f} of its part of the files"
    )
    print(f"peak memory: shard + {(figures['peak'] - shard) / 1e6:.0f} MB")


def main(cfg: Config) -> None:
    cases = {"mesh": mesh_case, "20b": full_case}
    if cfg.case not in cases:
        raise ValueError(f"--case must be one of {', '.join(cases)}, got {cfg.case!r}")
    needed = {"mesh": 0.7 * cfg.num_layers, "20b": 41.0}[cfg.case]
    with tempfile.TemporaryDirectory(prefix="load-weights-", dir=cfg.folder or None) as folder:
        if (free := shutil.disk_usage(folder).free / 1e9) < needed + 5:
            raise ValueError(f"{folder} has {free:.0f} GB free, {needed + 5:.0f} are needed; give another --folder")
        cases[cfg.case](cfg, Path(folder))


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
