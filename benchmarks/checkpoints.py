"""How fast checkpoints are saved and loaded, and how long training waits: `./launch.sh -m benchmarks.checkpoints`.

Gloo ranks of this machine hold a state of weights, average and Adam's two moments, float32, each cut in rows.  In turn,
in the same processes, it is saved and loaded by

  ours            `parallel.checkpoint`: checksums, read back and compared, synced, published
  unsummed        the same without checksums, saving only
  dcp             `torch.distributed.checkpoint` with its file writer, synced; no checksums
  torch           `torch.save` of each rank's part to its own file, synced, and `torch.load`; for the same mesh only
  torchsnapshot   `Snapshot.take` and `restore`, if it is installed

then in the background by `CheckpointSaver`, of which the time that training waits counts, against a copy of the state
to memory that is there already.  The memory of a rank and its writer is watched over --memory_saves saves of a smaller
state.  Times are the slowest rank's; medians and the fastest.  Loading is from a warm page cache, if it fits.
"""

import contextlib
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from parallel import checked_writer, checkpoint
from parallel.checkpoint_saver import CheckpointSaver
from utils.config import parse, run_main

NUM_TENSORS = 48  # of each kind
KINDS = ("model", "ema", "optimizer.exp_avg", "optimizer.exp_avg_sq")


@dataclass(frozen=True)
class Config:
    num_parameters_m: int = 100  # millions; the state takes 16 bytes for each
    num_ranks: int = 2
    repeats: int = 3
    memory_saves: int = 100  # of a state of 2 M parameters, for each background mode
    modes: tuple[str, ...] = ("thread", "process")  # of the background saves
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


def run_rank(rank: int, cfg: Config, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(cfg.num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    tensors = make_state(cfg.num_parameters_m * 10**6, cfg.num_ranks)
    num_bytes = sum(tensor.numel() * 4 for tensor in tensors.values())
    times: dict[str, list[float]] = defaultdict(list)
    compare(cfg, folder, tensors, times)
    background(cfg, folder, tensors, times)
    if rank == 0:
        report(cfg, num_bytes, times)
    del tensors
    small = make_state(2 * 10**6, cfg.num_ranks)
    for mode in cfg.modes:
        used = memory_over_saves(folder / f"memory-{mode}", mode, small, cfg.memory_saves)
        if rank == 0 and used:
            flat = f"{used[0] / 2**20:.1f} MiB after the tenth, {max(used) / 2**20:.1f} MiB at most"
            print(f"resident memory of rank 0 and its writer, {cfg.memory_saves} saves, {mode}: {flat}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def compare(cfg: Config, folder: Path, tensors: dict[str, DTensor], times: dict[str, list[float]]) -> None:
    """Save and load by each method, in turn."""
    sums = {name: tensor.to_local().sum().item() for name, tensor in tensors.items()}
    rank = dist.get_rank()
    for _ in range(cfg.repeats):
        for name, (save, load) in METHODS.items():
            place = folder / name
            if rank == 0:
                place.mkdir()
                os.sync()  # what the last one left to the kernel is not this one's to write
            times[f"save {name}"].append(timed(lambda save=save, place=place: save(place, tensors)))
            if name == "ours":
                with without_checksums():
                    times["save unsummed"].append(timed(lambda: checkpoint.save(folder / "unsummed", 1, tensors, {})))
            for tensor in local(tensors).values():
                tensor.zero_()
            times[f"load {name}"].append(timed(lambda load=load, place=place: load(place, tensors)))
            assert all(tensor.to_local().sum().item() == sums[name] for name, tensor in tensors.items())
            dist.barrier()
            if rank == 0:
                shutil.rmtree(place)
                shutil.rmtree(folder / "unsummed", ignore_errors=True)


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Have `checkpoint.save` take every checksum for 0."""
    before = checked_writer.crc32, checked_writer.crc32_combine
    checked_writer.crc32 = checked_writer.crc32_combine = lambda *_: 0
    try:
        yield
    finally:
        checked_writer.crc32, checked_writer.crc32_combine = before


def background(cfg: Config, folder: Path, tensors: dict[str, DTensor], times: dict[str, list[float]]) -> None:
    """Time what training waits for, against a plain copy of the state, in turn."""
    for mode in cfg.modes:
        saver = CheckpointSaver(folder / mode, mode, keep_last=1)
        saver.prepare(tensors)
        room = list(saver._copies)  # the saver's own memory, so that the state is held twice and not three times
        for step in range(1, cfg.repeats + 1):
            saver.wait()
            parts = [local(tensors)[piece.item.index.fqn] for f in saver._layout.files.values() for piece in f]

            def copy(room=room, parts=parts) -> None:
                for target, source in zip(room, parts, strict=True):
                    target.copy_(source)

            times[f"copy {mode}"].append(timed(copy))
            times[f"wait {mode}"].append(timed(lambda step=step, saver=saver: saver.save(step, tensors, {})))
            saver.wait()
            times[f"background save {mode}"].append(slowest(saver.last_save_s))
        del room, parts, copy
        saver.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / mode)


def memory_over_saves(folder: Path, mode: str, tensors: dict[str, DTensor], num_saves: int) -> list[int]:
    """Return the resident bytes of this process and its children after each save from the tenth on."""
    saver, process, used = CheckpointSaver(folder, mode, keep_last=1), psutil.Process(), []
    for step in range(1, num_saves + 1):
        saver.save(step, tensors, {})
        saver.wait()
        used.append(sum(p.memory_info().rss for p in (process, *process.children(recursive=True))))
    saver.close()
    return used[9:]


def report(cfg: Config, num_bytes: int, times: dict[str, list[float]]) -> None:
    """Print the tables."""
    print(f"{num_bytes / 1e9:.2f} GB ({cfg.num_parameters_m} M parameters), {cfg.num_ranks} ranks, {cfg.repeats} turns")
    print(f"{'':<26}{'median s':>10}{'fastest s':>11}{'GB/s':>8}{'  against dcp':>14}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        kind, _, method = name.partition(" ")
        ratio = f"{statistics.median(times[f'{kind} dcp']) / median:>12.2f} x" if kind in ("save", "load") else ""
        print(f"{name:<26}{median:>10.3f}{min(seconds):>11.3f}{num_bytes / 1e9 / median:>8.2f}{ratio}")
    whole = statistics.median(times["save ours"])
    print(f"checksums take {1 - statistics.median(times['save unsummed']) / whole:.1%} of a save")
    for mode in cfg.modes:
        wait, copy = (statistics.median(times[f"{what} {mode}"]) for what in ("wait", "copy"))
        print(
            f"{mode}: training waits {wait / whole:.1%} of a save's time, {wait / copy:.2f} x a plain copy", flush=True
        )


def main(cfg: Config) -> None:
    with tempfile.TemporaryDirectory(dir=cfg.folder or None, prefix="checkpoints-") as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # finds a free port
        port = store.port
        del store
        mp.spawn(run_rank, (cfg, Path(folder), port), cfg.num_ranks)


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
