"""How fast checkpoints are saved and loaded, against others: `./launch.sh -m benchmarks.checkpoints`.

Gloo ranks of this machine hold a state of weights, average and Adam's two moments, float32, each cut in rows.  In turn,
in the same processes, it is saved and loaded by

  ours            `parallel.checkpoint`: checksums, read back and compared, synced, published
  dcp             `torch.distributed.checkpoint` with its file writer, synced; no checksums
  torch           `torch.save` of each rank's part to its own file, synced, and `torch.load`; for the same mesh only
  torchsnapshot   `Snapshot.take` and `restore`, if it is installed

Times are the slowest rank's; medians and the fastest.  Loading is from a warm page cache, if it fits.  How long
training waits for a save is what benchmarks.checkpoint_stall shows.
"""

import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from parallel import checkpoint
from utils.config import parse, run_main

NUM_TENSORS = 48  # of each kind
KINDS = ("model", "ema", "optimizer.exp_avg", "optimizer.exp_avg_sq")


@dataclass(frozen=True)
class Config:
    num_parameters_m: int = 100  # millions; the state takes 16 bytes for each
    num_ranks: int = 2
    repeats: int = 3
    methods: tuple[str, ...] = ("ours", "dcp", "torch", "torchsnapshot")  # the last where it is installed
    folder: str = ""  # where the temporary folder is made; the system's if empty


def make_state(num_parameters: int, num_ranks: int) -> dict[str, DTensor]:
    """Return the named tensors of a run, cut in rows over the ranks."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp_shard",))
    rows = num_parameters // NUM_TENSORS // 1024 // num_ranks
    torch.manual_seed(dist.get_rank())
    return {
        f"{kind}.{i}": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)], run_check=False)
        for kind in KINDS
        for i in range(NUM_TENSORS)
    }


def local(tensors: dict[str, DTensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to_local() for name, tensor in tensors.items()}


# ---- the peers ------------------------------------------------------------------------------------------------------
def save_torch(folder: Path, tensors: dict[str, DTensor]) -> None:
    with (folder / f"{dist.get_rank()}.pt").open("wb") as file:
        torch.save(local(tensors), file)
        file.flush()
        os.fsync(file.fileno())


def load_torch(folder: Path, tensors: dict[str, DTensor]) -> None:
    stored = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
    for name, tensor in local(tensors).items():
        tensor.copy_(stored[name])


def save_torchsnapshot(folder: Path, tensors: dict[str, DTensor]) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot.take(str(folder / "snapshot"), {"state": StateDict(**local(tensors))})


def load_torchsnapshot(folder: Path, tensors: dict[str, DTensor]) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot(str(folder / "snapshot")).restore({"state": StateDict(**local(tensors))})


METHODS = {
    "ours": (
        lambda folder, tensors: checkpoint.save(folder, 1, tensors, {}),
        lambda folder, tensors: checkpoint.load_latest(folder, tensors),
    ),
    "dcp": (
        lambda folder, tensors: dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder)),
        lambda folder, tensors: dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder)),
    ),
    "torch": (save_torch, load_torch),
}
if importlib.util.find_spec("torchsnapshot"):
    METHODS["torchsnapshot"] = (save_torchsnapshot, load_torchsnapshot)


# ---- the ranks ------------------------------------------------------------------------------------------------------
def timed(action) -> float:
    """Return the seconds that the slowest rank takes."""
    dist.barrier()
    started = time.perf_counter()
    action()
    return slowest(time.perf_counter() - started)


def slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def join(rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")


def run_rank(rank: int, cfg: Config, folder: Path, port: int) -> None:
    join(rank, cfg.num_ranks, port)
    tensors = make_state(cfg.num_parameters_m * 10**6, cfg.num_ranks)
    num_bytes = sum(tensor.numel() * 4 for tensor in tensors.values())
    times: dict[str, list[float]] = defaultdict(list)
    compare(cfg, folder, tensors, times)
    if rank == 0:
        report(cfg, num_bytes, times)
    dist.barrier()
    dist.destroy_process_group()


def compare(cfg: Config, folder: Path, tensors: dict[str, DTensor], times: dict[str, list[float]]) -> None:
    """Save and load by each method, in turn."""
    sums = {name: tensor.to_local().sum().item() for name, tensor in tensors.items()}
    rank, chosen = dist.get_rank(), {name: METHODS[name] for name in cfg.methods if name in METHODS}
    for _ in range(cfg.repeats):
        for name, (save, load) in chosen.items():
            place = folder / name
            if rank == 0:
                place.mkdir()
                os.sync()  # what the last one left to the kernel is not this one's to write
            times[f"save {name}"].append(timed(lambda save=save, place=place: save(place, tensors)))
            for tensor in local(tensors).values():
                tensor.zero_()
            times[f"load {name}"].append(timed(lambda load=load, place=place: load(place, tensors)))
            assert all(tensor.to_local().sum().item() == sums[name] for name, tensor in tensors.items())
            dist.barrier()
            if rank == 0:
                shutil.rmtree(place)


def report(cfg: Config, num_bytes: int, times: dict[str, list[float]]) -> None:
    """Print the tables."""
    print(f"{num_bytes / 1e9:.2f} GB ({cfg.num_parameters_m} M parameters), {cfg.num_ranks} ranks, {cfg.repeats} turns")
    print(f"{'':<26}{'median s':>10}{'fastest s':>11}{'GB/s':>8}{'  against dcp':>14}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        kind, _, method = name.partition(" ")
        against = statistics.median(times.get(f"{kind} dcp", [0.0])) / median
        print(f"{name:<26}{median:>10.3f}{min(seconds):>11.3f}{num_bytes / 1e9 / median:>8.2f}{against:>12.2f} x")


def run_on_ranks(run_rank: Callable, cfg, prefix: str) -> None:
    """Run `run_rank(rank, cfg, temporary folder, port)` in cfg.num_ranks processes."""
    with tempfile.TemporaryDirectory(dir=cfg.folder or None, prefix=prefix) as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # finds a free port
        port = store.port
        del store
        mp.spawn(run_rank, (cfg, Path(folder), port), cfg.num_ranks)


def main(cfg: Config) -> None:
    run_on_ranks(run_rank, cfg, "checkpoints-")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
