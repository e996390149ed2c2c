"""One micro-batch as the renderer trains on it.

Legend: B samples, I image tokens (each sample's target first, then its references), T text tokens, C channels a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.latents import patchify, token_grid
from model.layout import PackedLayout, fill_batch


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B samples packed end to end, on the device."""

    layout: PackedLayout
    x0: Tensor  # (I, C) float32 clean latents
    noise: Tensor  # (I, C) float32; 0 on references
    txt: Tensor  # (T, joint_attention_dim)
    t: Tensor  # (B,) float32
    weight: Tensor  # (B,) float32 of the sample's loss; 0 for a filler
    language: Tensor  # (B,) int64, index into data.captions.LANGUAGE_ROWS
    group: Tensor  # (B,) int64, of a mixture, or an edit's category; -1 for none
    token_weight: Tensor | None = None  # (I,) float32, of each token in the loss of its sample; None = all alike

    @classmethod
    def build(
        cls,
        images: Sequence[Sequence[Tensor]],
        noise: Sequence[Tensor],
        txt: Sequence[Tensor],
        times: Sequence[Tensor],
        labels: tuple[Tensor, Tensor, Tensor],
        token_weights: Sequence[Tensor] | None = None,
    ) -> "MicroBatch":
        """Pack samples; everything goes to the device of the latents.

        images: for each sample its normalised latents (channels, h, w) float32, target first, then references.
        noise: for each sample its target's, of the same shape.
        txt: for each sample its text states (tokens, joint_attention_dim).
        times: for each sample its t, () float32.
        labels: weight, language and group, (B,) each.
        token_weights: for each sample those of its target, (tokens,) float32.
        """
        device = images[0][0].device
        tokens = [[patchify(image) for image in sample] for sample in images]
        of_noise = [
            piece
            for (target, *references), eps in zip(tokens, noise, strict=True)
            for piece in (patchify(eps.to(target)), *map(torch.zeros_like, references))
        ]
        weight, language, group = (label.to(device) for label in labels)
        grids = [[token_grid(image) for image in sample] for sample in images]
        return cls(
            layout=PackedLayout.build(grids, [len(states) for states in txt], device),
            x0=torch.cat([piece for sample in tokens for piece in sample]),
            noise=torch.cat(of_noise),
            txt=torch.cat(list(txt)),
            t=torch.stack(list(times)).to(device),
            weight=weight,
            language=language,
            group=group,
            token_weight=None if token_weights is None else _spread(token_weights, tokens).to(device),
        )

    @property
    def num_tokens(self) -> int:
        """Image and text tokens that belong to samples."""
        return len(self.x0) + len(self.txt) - self.layout.num_filler_tokens

    def filled(self, fill_to: Sequence[tuple[int, int, int]] | None) -> "MicroBatch":
        """Return it with tokens and samples of weight 0 up to the first size (I, T, B) of `fill_to` that holds it.

        None leaves it as it is.
        Raises: ValueError if it is larger than all.
        """
        img = ("x0", "noise") if self.token_weight is None else ("x0", "noise", "token_weight")
        return fill_batch(self, fill_to, img, ("txt",), ("t", "weight", "language", "group"))

    def tensors(self) -> list[Tensor]:
        """Return every tensor, those of the layout included."""
        return [t for value in (self, self.layout) for t in vars(value).values() if isinstance(t, Tensor)]


def _spread(token_weights: Sequence[Tensor], tokens: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the weight of every image token, (I,) float32; of references, which no loss sees, 1."""
    pieces = zip(token_weights, tokens, strict=True)
    return torch.cat([w for mine, (_, *refs) in pieces for w in (mine, torch.ones(sum(map(len, refs))))])
