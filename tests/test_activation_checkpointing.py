"""Checkpointed units compute the same, twice."""

import pytest
import torch

from parallel.activation_checkpointing import apply_activation_checkpointing
from tests.toy_model import UNITS, Block, Toy, init_toy, toy_batch


def run(mode: str, monkeypatch) -> tuple[dict, int]:
    """Return every gradient and how often a block's forward ran."""
    calls = []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *args: calls.append(1) or forward(self, *args))
    model = Toy().double()
    names = list(model.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_toy(name, parameter, torch.Generator().manual_seed(len(name)))
    apply_activation_checkpointing(model, UNITS, mode)
    assert list(model.state_dict()) == names
    x, labels, targets = toy_batch(torch.float64, num=1)
    (model(x[0], labels[0]) - targets[0]).square().sum().backward()
    monkeypatch.setattr(Block, "forward", forward)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, len(calls)


def test_full_recomputes_each_unit_once(monkeypatch):
    plain, once = run("none", monkeypatch)
    checkpointed, twice = run("full", monkeypatch)
    assert (once, twice) == (2, 4)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="--activation_checkpointing must be one of none, full, got 'some'"):
        apply_activation_checkpointing(Toy(), UNITS, "some")
