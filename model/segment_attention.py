"""Attention over packed segments as one operator, for compiled blocks on a CPU.

A compiled graph must not depend on the segments' lengths, which differ with every micro-batch.  So they come as a
tensor that is read when the operator runs, as CUDA's variable-length kernel does it.

Legend: L tokens, N heads, Dh head dimension.
"""

from itertools import groupby

import torch
from torch import Tensor

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def segment_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Attend within each segment.

    q, k, v: (L, N, Dh) on a CPU; bounds: (segments + 1,) int32, where they start and end, shorter ones first.
    Returns (L, N, Dh).
    """
    return _segment_attention(q, k, v, bounds)[0]


@torch.library.custom_op("packed::segment_attention", mutates_args=())
def _segment_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (L, N, Dh) output and the (L, N) logarithms of the softmax's sums."""
    outs, sums = [], []
    for pieces in zip(*_split(bounds, q, k, v), strict=True):
        out, logsumexp = _attend(*pieces)
        outs.append(_join(out))
        sums.append(_join(logsumexp))
    return torch.cat(outs), torch.cat(sums)


@torch.library.custom_op("packed::segment_attention_backward", mutates_args=())
def _segment_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    parts = [
        [_join(x) for x in _attend_backward(*pieces, 0.0, False)]  # neither dropout nor causal
        for pieces in zip(*_split(bounds, grad, q, k, v, out, logsumexp), strict=True)
    ]
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


@_segment_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    sums_dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=sums_dtype)


@_segment_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx, inputs: tuple, output: tuple) -> None:
    q, k, v, bounds = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)


def _backward(ctx, grad: Tensor, _) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_segment_attention_backward(grad, *ctx.saved_tensors), None


_segment_attention.register_autograd(_backward, setup_context=_save)


def _split(bounds: Tensor, *tensors: Tensor) -> list[list[Tensor]]:
    """Cut each (L, N, …) tensor into one (segments, N, length, …) for each length."""
    lengths = [length for length in bounds.diff().tolist() if length]
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    sizes = [length * num for length, num in runs]
    return [
        [x.unflatten(0, (-1, length)).transpose(1, 2) for x, (length, _) in zip(tensor.split(sizes), runs, strict=True)]
        for tensor in tensors
    ]


def _join(x: Tensor) -> Tensor:
    """(segments, N, length, …) → (segments · length, N, …)."""
    return x.transpose(1, 2).flatten(0, 1)
