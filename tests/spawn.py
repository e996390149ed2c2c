"""Run a function on several gloo ranks of this machine, for tests."""

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

_PRELOADED = [
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "train_mmdit", "train_edit_ddp",
]  # fmt: skip
_GRACE_S = 2.0  # after a failure, how long the other ranks may take to report theirs


def run_ranks(fn: Callable, world_size: int, *args, timeout_s: float = 120.0) -> list:
    """Run `fn(rank, world_size, *args)` in `world_size` processes that share a gloo process group.

    fn: a top-level function; args and what it returns must pickle.
    Returns the ranks' return values, in order.
    Raises: RuntimeError with the tracebacks of the ranks that failed, or if a rank dies or takes too long.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes, pipes = [], {}
        deaths = [Path(folder) / f"death-{rank}.txt" for rank in range(world_size)]
        packed_args = pickle.dumps(args)  # plain pickle both ways: tensors travel as bytes and outlive their process
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                job = (sender, fn, rank, world_size, Path(folder) / "store", deaths[rank], timeout_s, packed_args)
                process = context.Process(target=_rank_main, args=job, daemon=True)
                process.start()
                processes.append(process)
                sender.close()
                pipes[receiver] = rank
            return _collect(pipes, timeout_s, lambda rank: _cause_of_death(processes[rank], deaths[rank]))
        finally:
            for process in processes:
                process.kill()
                process.join()


def fork_server():
    """Return a multiprocessing context whose server has imported what is slow to import: it forks in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _cause_of_death(process: multiprocessing.Process, traceback_file: Path) -> str:
    process.join(_GRACE_S)
    text = traceback_file.read_text() if traceback_file.exists() else ""
    return f"died without a report, exit code {process.exitcode}\n{text}"


def _collect(pipes: dict[Connection, int], timeout_s: float, cause_of_death: Callable[[int], str]) -> list:
    """Wait for a report from every rank; after the first failure only for _GRACE_S more."""
    results, failures = {}, {}
    waiting, deadline = dict(pipes), time.monotonic() + timeout_s
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, cause_of_death(rank)
            (results if succeeded else failures)[rank] = value
            if not succeeded:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failures:
        raise RuntimeError("\n".join(f"rank {rank} failed:\n{text}" for rank, text in failures.items()))
    if waiting:
        raise RuntimeError(f"ranks {sorted(waiting.values())} took longer than {timeout_s} s")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    sender: Connection,
    fn: Callable,
    rank: int,
    world_size: int,
    store: Path,
    death: Path,
    timeout_s: float,
    packed_args: bytes,
) -> None:
    # Where each thread was, if a signal ends this process; the handler keeps the file open.
    faulthandler.enable(death.open("w"))
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        report = True, fn(rank, world_size, *pickle.loads(packed_args))
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
    except BaseException:
        report = False, traceback.format_exc()
    sender.send_bytes(pickle.dumps(report))
