"""The grid of held-out edits that a run shows of itself, reference | result | target, drawn by all of its ranks."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.captions import language_row
from data.index import Index
from data.pack import deal
from data.plan import PlannedSample, every_language
from data.reader import Sample
from model.encoders import Encoders
from model.sampling import SamplerSettings
from parallel.distributed import is_main
from parallel.fsdp import gathered
from tools.draw_edits import Drawing, draw_edits
from utils.picture_grid import labelled_grid
from utils.random_streams import torch_generator

_GAP = 4  # pixels between the pictures of one edit
_COLUMNS = 4


def spread_examples(index: Index, count: int, max_pixels: int, reference_pixels: int) -> list[PlannedSample]:
    """Return `count` edits from all over an index, as far as it has some: categories in turn, languages in turn."""
    by_category: dict[str, list[int]] = {}
    for i in index.spread(len(index)):
        if index[i].references is None:
            continue
        by_category.setdefault(index[i].group, []).append(i)
    rounds = [
        members[turn]
        for turn in range(max(map(len, by_category.values()), default=0))
        for _, members in sorted(by_category.items())
        if turn < len(members)
    ]
    chosen = []
    for number, i in enumerate(rounds[:count]):
        languages = every_language(index, i, max_pixels, reference_pixels)
        chosen.append(languages[number % len(languages)])
    return chosen


def drawing_of(sample: Sample, encoders: Encoders, seed: int) -> Drawing:
    """Return a sample's edit, to be drawn from noise of its own at its target's size."""
    factor = encoders.vae.scale_factor
    shape = (encoders.vae.num_channels, sample.plan.height // factor, sample.plan.width // factor)
    references = sample.references or ()
    return Drawing(
        sample.caption,
        torch.randn(shape, generator=torch_generator(seed, 0, sample.key, "sample")),
        language=language_row(sample.plan.language),
        condition=[reference.condition for reference in references],
        vae=[reference.vae for reference in references],
    )


@torch.no_grad()
def edit_grid(
    model: nn.Module,
    encoders: Encoders,
    samples: Sequence[Sample],
    settings: SamplerSettings,
    seed: int,
    max_tokens: int,
    rank: int,
    num_ranks: int,
) -> np.ndarray | None:
    """Draw edits, shared out over the data ranks; every rank takes part, for each may hold a part of the model.

    max_tokens: in the network at once.  Returns the uint8 (H, W, 3) grid on rank 0, else None, and if there is no edit.
    """
    if not samples:
        return None
    tokens = [2 * sample.plan.num_tokens for sample in samples]  # both halves of the guidance see the references
    mine = {}
    with gathered(encoders.text.language_model):
        for micro in deal(tokens, num_ranks, max(max_tokens, *tokens))[rank]:
            chosen = micro or [0]  # a rank without work still takes part in every gather
            drawings = [drawing_of(samples[i], encoders, seed) for i in chosen]
            drawn = draw_edits(model, encoders, drawings, settings, max_tokens=math.inf)
            mine |= dict(zip(micro, drawn, strict=False))
    parts = [{}] * dist.get_world_size() if is_main() else None
    dist.gather_object(mine, parts)
    if parts is None:
        return None
    results = {i: picture for part in parts for i, picture in part.items()}
    rows = [side_by_side(sample, results[i]) for i, sample in enumerate(samples)]
    return labelled_grid(rows, [sample.caption for sample in samples], columns=_COLUMNS)


def side_by_side(sample: Sample, result: np.ndarray) -> np.ndarray:
    """Return references, result and target in a row, uint8 (H, W, 3)."""
    pictures = [_as_array(reference.vae) for reference in sample.references or ()]
    pictures += [result, _as_array(sample.read_pixels())]
    height = max(len(picture) for picture in pictures)
    padded = [
        np.pad(p, ((0, height - len(p)), (0, _GAP * (p is not pictures[-1])), (0, 0)), constant_values=255)
        for p in pictures
    ]
    return np.concatenate(padded, axis=1)


def _as_array(picture: Tensor) -> np.ndarray:
    return picture.permute(1, 2, 0).cpu().numpy()
