"""The gradient's norm over any mixture of meshes, and clipping by it."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from parallel.slices import num_shards


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor], waiting: AbstractContextManager | None = None) -> Tensor:
    """Return the Euclidean norm of all gradients as if they were one vector on one device.

    Parameters may be plain (the same on every rank) or DTensors on any mesh that spans all ranks, sharded or
    replicated; those without a gradient are skipped.  One collective in all, around which `waiting` is entered.
    Returns a 0-dim tensor, equal on every rank, float32 (float64 for float64 gradients).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    for gradient in gradients:
        if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
            raise AssertionError(f"a gradient still waits for its reduction: {gradient._spec}")
    norms = torch.stack(torch._foreach_norm(_local(gradients)))
    squares = norms.to(torch.promote_types(norms.dtype, torch.float32)).square()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    # A box stands on world_size / num_shards ranks: each counts its part of it.
    shares = torch.tensor([num_shards(g) / world_size for g in gradients], dtype=squares.dtype, device=squares.device)
    total = squares @ shares
    if world_size > 1:
        with waiting or nullcontext():
            dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, norm: Tensor | None = None,
    waiting: AbstractContextManager | None = None,
) -> Tensor:  # fmt: skip
    """Scale all gradients in place so that their common norm is at most `max_norm`.

    norm: what `grad_norm` returned for these gradients, if it has been called.  waiting: as there.
    Returns the norm before clipping.  Never waits for the device.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters, waiting) if norm is None else norm
    gradients = _local([p.grad for p in parameters if p.grad is not None])
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    return norm


def _local(tensors: list[Tensor]) -> list[Tensor]:
    """Return the parts of the tensors that lie on this rank."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
