"""Mean losses in all and by label: language, group, time."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class LossTally:
    """Weighted sums of losses over micro-batches, in all and by the labels of each axis.

    axes: the names of each axis's labels.
    """

    def __init__(self, *axes: Sequence[str]):
        self._axes = axes
        self._sums = torch.zeros(2, 1 + sum(map(len, axes)), dtype=torch.float64)  # losses, weights; the first: all

    def add(self, losses: Tensor, weights: Tensor, *labels: Tensor) -> None:
        """Count the losses (B,) of samples with weights (B,); labels: of each axis (B,) int64, -1 for none."""
        rows = torch.stack((losses.detach() * weights, weights)).double().cpu()
        self._sums[:, 0] += rows.sum(dim=1)
        start = 1
        for names, label in zip(self._axes, labels, strict=True):
            if names:
                label = label.cpu()
                known = label >= 0
                self._sums[:, start : start + len(names)].index_add_(1, label[known], rows[:, known])
            start += len(names)

    def sums(self) -> list[float]:
        """Return what is to be added up over ranks for `means`."""
        return self._sums.flatten().tolist()

    def means(self, sums: Iterable[float], prefix: str) -> dict[str, float]:
        """Return {prefix: mean loss, prefix_<label>: of its samples} from sums over ranks, where there are any."""
        losses, weights = torch.tensor(list(sums), dtype=torch.float64).view_as(self._sums)
        names = [prefix, *(f"{prefix}_{name}" for axis in self._axes for name in axis)]
        means = (losses / weights).tolist()
        return {name: mean for name, mean, weight in zip(names, means, weights.tolist(), strict=True) if weight}
