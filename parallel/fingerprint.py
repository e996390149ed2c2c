"""A fingerprint of tensors that is the same however they are cut: it tells whether weights are still what they were."""

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from parallel.slices import local_slice

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes → integers of this size
_CHUNK = 2**24  # values that are widened to 64 bits at a time
# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood 2014), as signed integers.
_STEP, _MIX = -0x61C8864680B583EB, -0x40A7B892E31B1A47


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return 32 hexadecimal digits that depend on every bit, shape, dtype and name; every rank takes part.

    Tensors of one or two dimensions, plain (the same on every rank) or DTensors on meshes that span all ranks.
    A tensor's bits are summed with weights that belong to their row and column, modulo 2^64: parts can be added up in
    any order.  It is no protection against someone who wants to deceive it.
    """
    described, sums = [], []
    for name, tensor in named:
        described.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        sums.append(_weighted_sum(tensor))
    total = torch.stack(sums)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    lines = sorted(f"{text} {value}" for text, value in zip(described, total.tolist(), strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@torch.no_grad()
def _weighted_sum(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor's sum: of several ranks with the same part, one counts it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not _counts_here(tensor):
        return torch.zeros((), dtype=torch.int64, device=local.device)
    rows, columns = (*local_slice(tensor), slice(0, 1))[:2]
    bits = local.detach().reshape(rows.stop - rows.start, columns.stop - columns.start)
    bits = bits.contiguous().view(_BITS[local.element_size()])
    row_weights, column_weights = (
        _position_weights(dim, part, local.device) for dim, part in enumerate((rows, columns))
    )
    height = max(1, _CHUNK // max(1, bits.shape[1]))
    parts = zip(bits.split(height), row_weights.split(height), strict=True) if bits.numel() else ()
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for chunk, weights in parts:
        total += ((chunk.to(torch.int64) * column_weights).sum(1) * weights).sum()
    return total


def _counts_here(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinates = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    return all(index == 0 for placement, index in coordinates if isinstance(placement, Replicate))


def _position_weights(dim: int, part: slice, device: torch.device) -> Tensor:
    """Return an odd pseudo-random number for each position along a dimension; those of rows and columns differ."""
    x = (2 * torch.arange(part.start, part.stop, device=device) + 1 + dim) * _STEP
    x = (x ^ (x >> 30)) * _MIX
    return (x ^ (x >> 27)) | 1
