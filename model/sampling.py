"""From noise and text states to latents: guided Euler sampling of samples of different sizes in one pack.

Legend: B samples, I image tokens, C latent channels, h w latent rows and columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.flow import classifier_free_guidance, euler_sample, sampler_grid, shift_mu
from model.latents import PATCH, patchify, unpatchify
from model.layout import PackedLayout


@dataclass(frozen=True)
class SamplerSettings:
    """The released inference settings; the shift fields are those of `scheduler_config.json`.

    Raises: ValueError for fewer than 1 step, or a scale that is no finite number from 0 on: a negative one
    would draw what the prompt does not say.
    """

    num_steps: int = 50
    cfg_scale: float = 4.0
    base_tokens: int = 256
    max_tokens: int = 8192
    base_shift: float = 0.5
    max_shift: float = 0.9
    shift_terminal: float | None = 0.02

    def __post_init__(self):
        if self.num_steps < 1 or not 0 <= self.cfg_scale < math.inf:
            raise ValueError(
                "a sampler needs at least 1 step and a non-negative, finite cfg_scale, got "
                f"{self.num_steps} and {self.cfg_scale}"
            )

    def grid(self, num_tokens: int) -> Tensor:
        """Return the times of a sample of `num_tokens` target tokens, (num_steps + 1,) float32."""
        mu = shift_mu(num_tokens, self.base_tokens, self.max_tokens, self.base_shift, self.max_shift)
        return sampler_grid(self.num_steps, mu, self.shift_terminal)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Tensor],
    negative: Tensor | Sequence[Tensor],
    noise: Sequence[Tensor],
    settings: SamplerSettings,
    languages: Sequence[int] | None = None,
    references: Sequence[Sequence[Tensor]] | None = None,
    kept: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Sample one picture's latents for each prompt.

    prompts: (B) text states (T_b, joint_attention_dim); negative: those of the negative prompt, one for all or (B); in
    an edit it is about the same pictures as the prompt.
    noise: (B) standard normal latents (C, h, w), on the model's device; their shapes set the sizes.
    languages: (B) rows of the language embedding, if the model has one.
    references: (B) lists of clean latents (C, h, w) of any sizes; None = text-to-image.
    kept: (B) bool (h, w), where a sample stays what its first reference is, which then has the noise's shape; None =
    nowhere.
    Returns (B) normalised latents (C, h, w) float32.
    Every call runs the network num_steps times, so ranks that share a sharded model can call it side by side.
    Source of edits: `diffusers` QwenImageEditPlusPipeline.__call__; of what is kept: QwenImageEditInpaintPipeline.
    Raises: ValueError if something is to be kept of a sample without a reference of its noise's shape.
    """
    device = noise[0].device
    negatives = [negative] * len(noise) if isinstance(negative, Tensor) else list(negative)
    images = [[n, *r] for n, r in zip(noise, references or [()] * len(noise), strict=True)]  # of each sample
    grids = [[(1, x.shape[1] // PATCH, x.shape[2] // PATCH) for x in sample] for sample in images]
    layout = PackedLayout.build(grids, [len(p) for p in prompts], device)
    guided = settings.cfg_scale != 1.0
    # With guidance both halves go through the network in one pack: conditional samples, then unconditional ones.
    txt, doubled = torch.cat(list(prompts)), layout
    if guided:
        txt = torch.cat((txt, *negatives))
        doubled = PackedLayout.build(grids * 2, [len(p) for p in (*prompts, *negatives)], device)
    language = torch.tensor(list(languages) * (1 + guided), device=device) if languages is not None else None

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        if not guided:
            return model(x, txt, t, layout, language)
        conditional, unconditional = model(x.repeat(2, 1), txt, t.repeat(2), doubled, language).float().chunk(2)
        return classifier_free_guidance(conditional, unconditional, settings.cfg_scale)

    tokens = torch.cat([patchify(x.to(device).float()) for sample in images for x in sample])
    targets = [sample[0] for sample in grids]
    known = _known_tokens(images, kept) if kept is not None and any(k is not None for k in kept) else ()
    tokens = euler_sample(velocity, tokens, [settings.grid(h * w) for _, h, w in targets], layout, *known)
    pieces = tokens.split(layout.img_lens)
    return [unpatchify(piece[: h * w], (f, h, w)) for piece, (f, h, w) in zip(pieces, targets, strict=True)]


def _known_tokens(images: Sequence[Sequence[Tensor]], kept: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return clean tokens (I, C) float32, and bool (I, C) where they are to come out.

    images: (B) lists of latents, the target's noise first; kept: see `generate`.
    """
    clean, is_known = [], []
    for (noise, *references), keep in zip(images, kept, strict=True):
        first = references[0] if references else None
        if keep is not None and (first is None or first.shape != noise.shape or keep.shape != noise.shape[1:]):
            raise ValueError(
                f"what is kept, {tuple(keep.shape)}, needs a first reference of its picture's latents "
                f"{tuple(noise.shape)}, got {None if first is None else tuple(first.shape)}"
            )
        nowhere = torch.zeros_like(noise, dtype=torch.bool)
        clean += [noise if keep is None else first, *references]
        is_known += [nowhere if keep is None else keep.to(noise.device).expand_as(noise)]
        is_known += [torch.zeros_like(r, dtype=torch.bool) for r in references]
    device = images[0][0].device
    return tuple(
        torch.cat([patchify(x.to(device).to(dtype)) for x in parts])
        for parts, dtype in ((clean, torch.float32), (is_known, torch.bool))
    )
