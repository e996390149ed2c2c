"""Adaptive layer norm over packed tokens: each sample's conditioning shifts, scales and gates its own tokens.

Legend: D width, R rows of conditioning (one a sample; with zero_cond_t, two).

Both operations have a backward of their own, so that what a sample's row becomes when it is spread over its tokens is
never kept: beside its input, `_ModulatedNorm` keeps nothing of the size of the tokens, `_GatedSum` only what it gates.
Left to autograd the two would keep three and two such tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

EPS = 1e-6


@dataclass(frozen=True, eq=False)
class Modulation:
    """What the blocks need to modulate one stream: the activated conditioning and which row each token takes."""

    conditioning: Tensor  # (R, D): silu(time embedding)
    index: Tensor  # (tokens,) int64 in [0, R)
    membership: Tensor  # (R, tokens) float32, the one-hot of `index`; a token of no sample may have none

    def rows(self, linear: nn.Module, num: int) -> tuple[Tensor, ...]:
        """Return `num` modulation tensors, each (R, D)."""
        return linear(self.conditioning).chunk(num, dim=-1)

    def norm(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Normalise each token without affine, then scale and shift it: x (tokens, D); shift, scale (R, D)."""
        return _ModulatedNorm.apply(x, shift, 1 + scale, self.index, self.membership)

    def add_gated(self, x: Tensor, gate: Tensor, y: Tensor) -> Tensor:
        """Return x + gate · y: x, y (tokens, D); gate (R, D)."""
        return _GatedSum.apply(x, gate, y, self.index, self.membership)


class _ModulatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, shift: Tensor, factor: Tensor, index: Tensor, membership: Tensor) -> Tensor:
        normed, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, EPS)
        ctx.save_for_backward(x, mean, rstd, factor, index, membership)
        return torch.addcmul(shift.index_select(0, index), normed, factor.index_select(0, index))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, factor, index, membership = ctx.saved_tensors
        normed, _, _ = torch.native_layer_norm(x, x.shape[-1:], None, None, EPS)
        grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad * factor.index_select(0, index), x, x.shape[-1:], mean, rstd, None, None, [True, False, False]
        )
        return grad_x, _sum_rows(grad, membership), _sum_rows(grad * normed, membership), None, None


class _GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, y: Tensor, index: Tensor, membership: Tensor) -> Tensor:
        ctx.save_for_backward(gate, y, index, membership)
        return torch.addcmul(x, gate.index_select(0, index), y)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, y, index, membership = ctx.saved_tensors
        return grad, _sum_rows(grad * y, membership), grad * gate.index_select(0, index), None, None


def _sum_rows(grad: Tensor, membership: Tensor) -> Tensor:
    """Sum over each row's tokens in one matrix product: deterministic on every device, float32 inside."""
    return membership.to(grad.dtype) @ grad
