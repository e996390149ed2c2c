"""One process that plays one rank of a job of any size: collectives return at once, tensors hold no data."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401  (teaches fake tensors the collectives)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be `rank` of a process group of `world_size` that communicates nothing; it ends with the block.

    Raises: ValueError if this process already belongs to a process group.
    """
    if dist.is_initialized():
        raise ValueError("this process already has a process group; a fake one needs a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which tensors have a shape, a dtype and a storage of the right size, but no memory.

    A model built on the meta device gets such tensors by `to_empty` inside it.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def cuda_branches() -> Iterator[None]:
    """Take the branches that CUDA tensors take, with fake tensors on the CPU: no build without CUDA can fake more.

    `is_cuda` is true, so that attention is one variable-length flash call, which keeps q, k, v, its output and one
    float32 number a query and head.  RMS norm is one kernel that keeps its input and one float32 number a row; on a CPU
    it is a dozen operators that keep several copies of the input.
    """
    # A function mode would do for the forward pass, but is off where the backward pass computes a block again.
    rms_norm, capability = torch.rms_norm, torch.cuda.get_device_capability
    torch.rms_norm = lambda x, normalized_shape, weight, eps: _FusedRMSNorm.apply(x, weight)
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # collectives ask for it
    try:
        yield
    finally:
        torch.rms_norm, torch.cuda.get_device_capability = rms_norm, capability
        del torch.Tensor.is_cuda  # the inherited one shows again


class _FusedRMSNorm(torch.autograd.Function):
    """What CUDA's fused kernel reads, writes and keeps; the arithmetic is a stand-in."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.mul(grad, x), torch.empty_like(weight)
