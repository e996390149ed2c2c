"""Means by label against plain sums."""

import pytest
import torch

from utils.loss_tally import LossTally


def test_means_by_every_axis():
    tally = LossTally(("zh", "en", "other"), (), ("a", "b"))
    losses, weights = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    none = torch.full((4,), 5)
    tally.add(losses, weights, torch.tensor([0, 1, 1, 0]), none, torch.tensor([1, -1, 1, 0]))
    tally.add(losses[:1], weights[:1], torch.tensor([1]), none[:1], torch.tensor([-1]))
    means = tally.means([2 * value for value in tally.sums()], "loss")  # two ranks that count the same
    assert means == pytest.approx({"loss": 2.0, "loss_zh": 1.0, "loss_en": 7 / 3, "loss_b": 2.5})
