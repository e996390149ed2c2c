"""How long training waits for a checkpoint, and what checksums and memory cost.

`./launch.sh -m benchmarks.checkpoint_stall`, or `python -m benchmarks.checkpoint_stall` where nothing is to be set up.

Gloo ranks of this machine hold the state of benchmarks.checkpoints.  In turn it is

  saved           while all wait, with the time that is spent on checksums: in the thread that writes, and in the one of
                  those reading back that takes longest; every call is timed
  copied          to memory that is there already, by one call
  computed with   forward and backward through the weights, alone, and after a call of `CheckpointSaver.save`

for each background mode.  Training is blocked in the call, and where the next optimizer step would wait for the copy.
What it loses beside that is how much longer forward and backward take: those of the step with the copy, and all until
the checkpoint is published.  A checkpoint of each mode is compared with the state at its call.

Then the resident memory of each rank and its writer is watched over --memory_saves saves, of a smaller state.
"""

import contextlib
import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.checkpoints import join, local, make_state, run_on_ranks, slowest, timed
from parallel import checked_writer, checkpoint
from parallel.checkpoint_saver import CheckpointSaver
from utils.config import parse, run_main
from utils.state_changes import before_change


@dataclass(frozen=True)
class Config:
    num_parameters_m: int = 100  # millions; the state takes 16 bytes for each, and in the background modes twice that
    num_ranks: int = 2
    repeats: int = 3
    num_tokens: int = 64  # of a rank's forward and backward: sets how long these take
    modes: tuple[str, ...] = ("thread", "process")  # of the background saves
    memory_saves: int = 100  # for each mode; 0 = do not watch the memory
    memory_parameters_m: int = 50
    folder: str = ""  # where the temporary folder is made; the system's if empty


def forward_and_backward(weights: list[Tensor], x: Tensor) -> None:
    """Take x (tokens, 1024) through layers (rows, 1024), up and down; each gradient is dropped when it is complete."""
    for weight in weights:
        x = x + torch.nn.functional.gelu(x @ weight.T) @ weight * 1e-3
    x.square().mean().backward()


def trainable(tensors: dict[str, DTensor]) -> list[Tensor]:
    weights = [part.detach().requires_grad_() for name, part in local(tensors).items() if name.startswith("model.")]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    return weights


@contextlib.contextmanager
def timed_checksums() -> Iterator[dict[int, float]]:
    """Sum the seconds in checksum calls by thread."""
    seconds: dict[int, float] = defaultdict(float)

    def timed_call(function):
        def call(*args):
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                seconds[threading.get_ident()] += time.perf_counter() - started

        return call

    before = checked_writer.crc32, checked_writer.crc32_combine
    checked_writer.crc32, checked_writer.crc32_combine = map(timed_call, before)
    try:
        yield seconds
    finally:
        checked_writer.crc32, checked_writer.crc32_combine = before


def save_waiting(cfg: Config, folder: Path, tensors: dict[str, DTensor], times: dict[str, list[float]]) -> None:
    """Time saves that all wait for."""
    for step in range(cfg.repeats):
        with timed_checksums() as seconds:
            times["save"].append(timed(lambda step=step: checkpoint.save(folder / "waiting", step, tensors, {})))
        writing = seconds.pop(threading.get_ident())
        times["checksums"].append(slowest(writing + max(seconds.values())))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "waiting")


def plain_copy(saver: CheckpointSaver, tensors: dict[str, DTensor]) -> None:
    """Copy to the saver's own memory, so that the state is held twice and not three times."""
    parts = [part for parts in saver._layout.local_tensors(tensors).values() for part in parts]
    torch._foreach_copy_(saver._copy._targets, parts)


def save_beside(
    cfg: Config, folder: Path, mode: str, tensors: dict[str, DTensor], times: dict[str, list[float]]
) -> None:
    """Time what a background save costs training."""
    saver, weights = CheckpointSaver(folder / mode, mode, keep_last=1), trainable(tensors)
    saver.prepare(tensors)
    x = torch.randn(cfg.num_tokens, 1024)
    forward_and_backward(weights, x)
    for step in range(1, cfg.repeats + 1):
        times[f"copy {mode}"].append(timed(lambda: plain_copy(saver, tensors)))
        alone = timed(lambda: forward_and_backward(weights, x))
        times[f"alone {mode}"].append(alone)
        times[f"call {mode}"].append(timed(lambda step=step: saver.save(step, tensors, {})))
        beside = timed(lambda: forward_and_backward(weights, x))
        times[f"beside {mode}"].append(beside)
        times[f"wait {mode}"].append(timed(before_change))
        lost, more = beside - alone, 0
        while slowest(float(saver.is_saving)):
            lost += timed(lambda: forward_and_backward(weights, x)) - alone
            more += 1
        saver.wait()
        times[f"until published {mode}"].append(lost)
        times[f"more {mode}"].append(more)
        times[f"background save {mode}"].append(slowest(saver.last_save_s))
    sums = {name: part.double().sum().item() for name, part in local(tensors).items()}
    saver.close()
    for part in local(tensors).values():
        part.zero_()
    assert checkpoint.load_latest(folder / mode, tensors)[0] == cfg.repeats and saver.num_failures == 0
    assert sums == {name: part.double().sum().item() for name, part in local(tensors).items()}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / mode)


def memory_over_saves(folder: Path, mode: str, tensors: dict[str, DTensor], num_saves: int) -> list[int]:
    """Return the resident bytes of this process and its children after each save."""
    saver, process, used = CheckpointSaver(folder, mode, keep_last=1), psutil.Process(), []
    for step in range(1, num_saves + 1):
        saver.save(step, tensors, {})
        saver.wait()
        used.append(sum(p.memory_info().rss for p in (process, *process.children(recursive=True))))
    saver.close()
    return used


def report(cfg: Config, num_bytes: int, times: dict[str, list[float]]) -> None:
    """Print the table; every figure is the median of the turns, of the slowest rank."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"{num_bytes / 1e9:.2f} GB ({cfg.num_parameters_m} M parameters), {cfg.num_ranks} ranks, {cfg.repeats} turns")
    print(f"save, all wait {median['save']:.3f} s ({', '.join(f'{s:.3f}' for s in times['save'])})")
    share = median["checksums"] / median["save"]
    print(f"checksums      {median['checksums']:.3f} s, {share:.2%} of it, on the threads that take longest")
    for mode in cfg.modes:
        of = {name.removesuffix(f" {mode}"): value for name, value in median.items() if name.endswith(f" {mode}")}
        blocked = statistics.median(map(sum, zip(times[f"call {mode}"], times[f"wait {mode}"], strict=True)))
        print(f"{mode}: copy alone {of['copy']:.3f} s; forward and backward alone {of['alone']:.3f} s")
        print(f"  call {of['call']:.4f} s, wait before the next step {of['wait']:.4f} s")
        print(
            f"  blocked {blocked:.4f} s: {blocked / median['save']:.2%} of a save, {blocked / of['copy']:.3f} x a copy"
        )
        slower = of["beside"] - of["alone"]
        print(
            f"  forward and backward with the copy {of['beside']:.3f} s: {slower:+.3f} s, {slower / of['alone']:+.1%};"
            f" blocked and slowed {(blocked + slower) / median['save']:.1%} of a save"
        )
        print(
            f"  until published, {of['background save']:.2f} s and {of['more']:.0f} more: "
            f"{of['until published']:+.3f} s, {of['until published'] / median['save']:.1%} of a save", flush=True,
        )  # fmt: skip


def run_rank(rank: int, cfg: Config, folder: Path, port: int) -> None:
    join(rank, cfg.num_ranks, port)
    times: dict[str, list[float]] = defaultdict(list)
    if cfg.repeats:
        tensors = make_state(cfg.num_parameters_m * 10**6, cfg.num_ranks)
        save_waiting(cfg, folder, tensors, times)
        for mode in cfg.modes:
            save_beside(cfg, folder, mode, tensors, times)
        if rank == 0:
            report(cfg, sum(tensor.numel() * 4 for tensor in tensors.values()), times)
        del tensors
    if cfg.memory_saves:
        tensors = make_state(cfg.memory_parameters_m * 10**6, cfg.num_ranks)
        for mode in cfg.modes:
            used = memory_over_saves(folder / f"memory-{mode}", mode, tensors, cfg.memory_saves)
            of_ranks: list = [None] * cfg.num_ranks
            dist.all_gather_object(of_ranks, used[min(9, len(used) - 1) :])
            for i, of_rank in enumerate(of_ranks if rank == 0 else ()):
                low, high, first = (n / 2**20 for n in (min(of_rank), max(of_rank), of_rank[0]))
                print(
                    f"resident memory, {mode}, rank {i} and its writer, {cfg.memory_parameters_m} M parameters, "
                    f"{cfg.memory_saves} saves: {first:.1f} MiB after the tenth, then {low / first - 1:+.2%} to "
                    f"{high / first - 1:+.2%}", flush=True,
                )  # fmt: skip
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def main(cfg: Config) -> None:
    run_on_ranks(run_rank, cfg, "checkpoint-stall-")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
