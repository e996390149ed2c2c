"""Rotary position embedding on three axes (frame, row, column), straight from integer positions.

Nothing is stored in the module: a cast of the module (`.to(bfloat16)`) would drop a complex buffer's imaginary part.
"""

import torch
from torch import Tensor

THETA = 10_000.0


def rotary_factors(positions: Tensor, axes_dims: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Return exp(i · position · frequency) of tokens at integer `positions (L, 3)`: (L, 1, Dh / 2) complex.

    axes_dims: how many of the Dh channels each axis rotates; dtype: float32 or float64, of real and imaginary part.
    Source: `diffusers` QwenEmbedRope.rope_params, with the same order of operations in float32.
    """
    angles = []
    for axis, dim in enumerate(axes_dims):
        exponents = torch.arange(0, dim, 2, device=positions.device).to(dtype).div(dim)
        angles.append(torch.outer(positions[:, axis].to(dtype), 1.0 / torch.pow(THETA, exponents)))
    angle = torch.cat(angles, dim=-1).unsqueeze(1)
    return torch.complex(angle.cos(), angle.sin())


def apply_rotary(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate neighbouring pairs of channels: x (L, N, Dh) any float dtype, factors (L, 1, Dh / 2) → as x.

    One complex product: on a CPU a fifth of the time of the same in real arithmetic.
    """
    pairs = torch.view_as_complex(x.to(factors.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2).to(x.dtype)
