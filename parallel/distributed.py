"""The process group: one process a device, under torchrun or alone."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def init_distributed(timeout_s: float) -> torch.device:
    """Join the job's process group and return this process's device.

    Under torchrun the rank comes from the environment, and LOCAL_RANK picks the GPU; in a plain `python` run this is a
    world of one.  Collectives on GPU tensors go over NCCL, those on CPU tensors over gloo.
    timeout_s: a collective that takes longer raises instead of hanging.
    Raises: ValueError if this machine has fewer GPUs than processes.
    """
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; "
                "start at most that many with --nproc_per_node"
            )
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")  # collectives that the flight recorder remembers
        options = {"timeout": timedelta(seconds=timeout_s)}
        if device.type == "cuda":
            options["device_id"] = device
        if "WORLD_SIZE" not in os.environ:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **options)
    return device


def rank() -> int:
    """Return this process's number, 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the number of processes, 1 outside a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this process prints, logs and writes for all."""
    return rank() == 0


def all_reduce_sum(values: list[float], device: torch.device) -> list[float]:
    """Return the sums of `values` over all ranks, in float64."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums.tolist()


def agree_any(flag: bool, device: torch.device) -> bool:
    """Return, on every rank alike, whether `flag` holds on at least one."""
    return all_reduce_sum([float(flag)], device)[0] > 0


def gather_results(function: Callable, group: dist.ProcessGroup | None = None) -> list:
    """Return what `function()` gives on each rank, on every rank.

    group: of all ranks, the default one if none is given; a thread beside the main one needs a group of its own.
    Raises: OSError on every rank, with the first failing rank's message, if it raised on any.
    """
    try:
        result = True, function()
    except Exception as error:  # whatever it is, the others must hear of it
        result = False, f"rank {rank()}: {error!r}"
    results = [result]
    if num_ranks() > 1:
        results = [None] * num_ranks()
        dist.all_gather_object(results, result, group)
    for succeeded, value in results:
        if not succeeded:
            raise OSError(value)
    return [value for _, value in results]


def on_main(function: Callable, group: dist.ProcessGroup | None = None):
    """Return, on every rank, what `function()` gives on rank 0, where alone it runs; what it raises, all raise."""
    return gather_results(lambda: function() if is_main() else None, group)[0]


def shutdown() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
