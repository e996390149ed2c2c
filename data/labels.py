"""What losses are weighted and told apart by."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from data.captions import language_row
from data.edit import category_row
from data.order import OF_ITS_CATEGORY
from data.reader import Sample


def group_row(sample: Sample) -> int:
    """Return a sample's group in a mixture, -1 for none; where categories take their place, its category's row."""
    group = sample.plan.group
    return category_row(sample.category) if group == OF_ITS_CATEGORY else group


def sample_labels(
    samples: Sequence[Sample], group: Callable[[Sample], int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight (0 = a filler), row of LANGUAGE_ROWS and group of samples as read: (B,) float32, int64, int64.

    group: gives a sample's, such as its category's row; -1 for none.
    """
    weights = torch.tensor([sample.plan.weight for sample in samples], dtype=torch.float32, device=device)
    languages = torch.tensor([language_row(sample.plan.language) for sample in samples], device=device)
    return weights, languages, torch.tensor([group(sample) for sample in samples], device=device)
