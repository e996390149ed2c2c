"""Latents ↔ tokens: 2 × 2 latent pixels make one token.

Legend: C latent channels, h w latent rows and columns (both even), I = h/2 · w/2 tokens.
"""

from torch import Tensor

PATCH = 2


def patchify(latents: Tensor) -> Tensor:
    """(C, h, w) → (h/2 · w/2, 4 C): tokens by rows; channel-major, then patch row, then patch column.

    Source: `diffusers` QwenImagePipeline._pack_latents.
    """
    channels, rows, columns = latents.shape
    patches = latents.reshape(channels, rows // PATCH, PATCH, columns // PATCH, PATCH)
    return patches.permute(1, 3, 0, 2, 4).reshape((rows // PATCH) * (columns // PATCH), channels * PATCH**2)


def token_grid(latents: Tensor) -> tuple[int, int, int]:
    """(C, h, w) → (frames, rows, columns) of its tokens."""
    return 1, latents.shape[1] // PATCH, latents.shape[2] // PATCH


def unpatchify(tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """(I, 4 C) → (C, 2 · rows, 2 · columns), for one frame of (frames, rows, columns) tokens."""
    _, rows, columns = grid
    patches = tokens.reshape(rows, columns, -1, PATCH, PATCH)
    return patches.permute(2, 0, 3, 1, 4).reshape(-1, rows * PATCH, columns * PATCH)
