"""Run a function on several gloo ranks of this machine and collect what each returns."""

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank_main(rank: int, world_size: int, folder: str, timeout_s: float, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
        result = function(rank, world_size, *args)
        torch.save(result, os.path.join(folder, f"result-{rank}"))
        dist.barrier()
    except BaseException:
        with open(os.path.join(folder, f"error-{rank}"), "w") as file:
            file.write(traceback.format_exc())
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(function: Callable, world_size: int, *args, timeout_s: float = 120.0) -> list:
    """Return [function(rank, world_size, *args) for each rank], each in a process of its own.

    function: a top-level function of a test module; its result must be a tensor, number, or container of such.
    Raises: RuntimeError with the first failing rank's traceback, or when the time is up.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, timeout_s, function, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout_s)
        late = [process.pid for process in ranks if process.is_alive()]
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        errors = [os.path.join(folder, f"error-{rank}") for rank in range(world_size)]
        for path in errors:
            if os.path.exists(path):
                raise RuntimeError(f"{os.path.basename(path)}:\n{open(path).read()}")
        if late:
            raise RuntimeError(f"{len(late)} of {world_size} ranks still ran after {timeout_s} s")
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"exit codes {[process.exitcode for process in ranks]}")
        return [torch.load(os.path.join(folder, f"result-{rank}"), weights_only=False) for rank in range(world_size)]
