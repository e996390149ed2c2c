"""The learning rate against PyTorch's own schedulers."""

import pytest
import torch

from utils.schedule import learning_rate


def test_warmup_then_cosine_equals_torch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 10, total_iters=9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=0.01)
    reference = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[10])
    for step in range(50):
        assert learning_rate(step, 0.1, 50, 10, "cosine", 0.1) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()


def test_warmup_stable_decay_equals_torch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 10, total_iters=9)
    stable = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=15)
    reference = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, stable, decay], milestones=[10, 35])
    for step in range(50):
        assert learning_rate(step, 0.1, 50, 10, "wsd", 0.1) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert learning_rate(60, 0.1, 50, 10, "wsd", 0.1) == pytest.approx(0.01)  # a step past the end


def test_constant_and_unknown():
    assert [learning_rate(s, 1.0, 9, 2, "constant") for s in (0, 1, 2, 8, 100)] == [0.5, 1.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="lr_schedule"):
        learning_rate(0, 1.0, 9, 2, "linear")
