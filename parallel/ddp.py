"""Data parallelism with a copy of the module on every rank (DDP): gradients are summed bucket by bucket."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# No buffer of ours changes in training, so none is sent around before every forward.  torch 2.13 renamed the switch.
_SWITCHES = inspect.signature(DistributedDataParallel).parameters
_KEEPS_BUFFERS = {"forward_sync_buffers" if "forward_sync_buffers" in _SWITCHES else "broadcast_buffers": False}


def replicate(module: nn.Module, bucket_mb: float, reduce_dtype: torch.dtype, static_graph: bool = False) -> nn.Module:
    """Return the module wrapped so that its copies on all ranks get the same gradients, summed while backward runs.

    The copies start as rank 0's.  Every parameter that requires a gradient must get one in every forward, on every
    rank: what cannot is to be frozen before, so that no search for unused parameters is needed.
    bucket_mb: MiB of gradients that travel together.  reduce_dtype: in which they are summed.
    static_graph: the same operations run in every step, so that their order is learned from the first one.
    Gradients are summed over the ranks, not averaged: the loss is to be divided by the global batch size.
    Raises: ValueError for a bucket size that is not positive.
    """
    if bucket_mb <= 0:
        raise ValueError(f"--bucket_mb must be above 0, got {bucket_mb}")
    options = {"bucket_cap_mb": bucket_mb, "static_graph": static_graph, "gradient_as_bucket_view": True}
    wrapped = DistributedDataParallel(module, **options, **_KEEPS_BUFFERS)
    wrapped.register_comm_hook(reduce_dtype, _sum_bucket)
    return wrapped


@contextmanager
def accumulating(modules: Iterable[DistributedDataParallel], waits: bool) -> Iterator[None]:
    """While a backward runs, keep gradients to this rank if it `waits` for a later micro-batch's to travel with.

    Raises: ValueError if it does and the graph is to be static, for then every backward must be the same.
    """
    with ExitStack() as stack:
        for module in modules if waits else ():
            if module.static_graph:
                raise ValueError("--static_graph needs one micro-batch a step; raise --max_tokens_per_micro_batch")
            stack.enter_context(module.no_sync())
        yield


def _sum_bucket(reduce_dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum one bucket over the ranks, in `reduce_dtype`.  DDP itself would divide by their number before it sums."""
    gradients = bucket.buffer()
    travelling = gradients.to(reduce_dtype)
    summed = dist.all_reduce(travelling, async_op=True).get_future()

    def into_bucket(future: torch.futures.Future) -> Tensor:
        [result] = future.value()
        return result if result.dtype == gradients.dtype else gradients.copy_(result)

    return summed.then(into_bucket)
