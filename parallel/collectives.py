"""Collectives with gradients.  `group`: the ranks that take part; with a single rank nothing happens.

What the gradient is depends on what the ranks do with the result.  If all go on with the same computation, each has
the whole gradient; if each does a part of the work, each has a part of it, and the parts are to be summed.
Source: Megatron-LM, arXiv 1909.08053 and 2205.05198 (rows); DeepSpeed Ulysses, arXiv 2309.14509 (`exchange`).
"""

import torch
import torch.distributed as dist
from torch import Tensor

# One collective under two names: torch 2.13 warns of the older ones, earlier versions know no other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_in(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Hand equal values to every rank's part of the work: their gradient is the sum of the ranks' parts."""
    return _CopyIn.apply(x, group) if group.size() > 1 else x


def sum_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add up the ranks' parts of a result, with which all go on: each part's gradient is the whole gradient."""
    return _SumOut.apply(x, group) if group.size() > 1 else x


def gather(x: Tensor, group: dist.ProcessGroup, dim: int, sum_gradients: bool) -> Tensor:
    """Join the ranks' equally long slices of dimension `dim`, in the order of the ranks.

    sum_gradients: each rank goes on with a part of the work, so the gradients are summed; otherwise all ranks have the
    same gradient.  Either way each takes its own slice of it.
    """
    return _Gather.apply(x, group, dim, sum_gradients) if group.size() > 1 else x


def sum_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add up the ranks' parts of a result and keep this rank's slice of the rows: (n, …) → (n / ranks, …)."""
    return _SumScatterRows.apply(x, group) if group.size() > 1 else x


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send slice r of dimension 0 to rank r and return what the ranks sent here, in their order: an all-to-all."""
    return _Exchange.apply(x, group) if group.size() > 1 else x


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _joined(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    slices = x.new_empty(group.size(), *x.shape)
    _all_gather(slices.flatten(0, 1), x.contiguous(), group=group)
    dim %= x.ndim
    return slices.movedim(0, dim).flatten(dim, dim + 1)


def _own_slice(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()]


def _own_slice_of_sum(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    slices = x.unflatten(dim, (group.size(), -1)).movedim(dim % x.ndim, 0).contiguous()
    own = torch.empty_like(slices[0])
    _reduce_scatter(own, slices.flatten(0, 1), group=group)
    return own


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, dim: int, sum_gradients: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.own = group, dim, _own_slice_of_sum if sum_gradients else _own_slice
        return _joined(x, group, dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.own(grad, ctx.group, ctx.dim), None, None, None


class _SumScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_slice_of_sum(x, group, 0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _joined(grad, ctx.group, 0), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None
