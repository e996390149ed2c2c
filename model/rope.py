"""Rotary position embedding on three axes (frame, row, column), straight from integer positions.

Nothing is stored in the module, so no cast of the module (`.to(bfloat16)`) can damage a table.
"""

import torch
from torch import Tensor

THETA = 10_000.0


def rotary_cos_sin(positions: Tensor, axes_dims: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, each (L, 1, Dh / 2) in `dtype`, of tokens at integer `positions (L, 3)`.

    axes_dims: how many of the Dh channels each axis rotates; dtype: float32 or float64.
    Source: `diffusers` QwenEmbedRope.rope_params, with the same order of operations in float32.
    """
    angles = []
    for axis, dim in enumerate(axes_dims):
        exponents = torch.arange(0, dim, 2, device=positions.device).to(dtype).div(dim)
        angles.append(torch.outer(positions[:, axis].to(dtype), 1.0 / torch.pow(THETA, exponents)))
    angle = torch.cat(angles, dim=-1).unsqueeze(1)
    return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of channels.

    x: (L, N, Dh) any float dtype; cos, sin: (L, 1, Dh / 2).  Returns x's dtype; computed in that of cos.
    """
    real, imaginary = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
