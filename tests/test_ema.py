"""The average against its closed form, and the exchange with the weights, also of a sharded model."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from parallel.fsdp import shard_model
from parallel.mesh import build_mesh
from tests.spawn import run_ranks
from utils.ema import EMA

DECAY = 0.75


def model_at(step: int) -> nn.Sequential:
    """Return a network of odd sizes whose weights depend on the step."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + i)))
    return model


def expected_average(num_steps: int) -> list[torch.Tensor]:
    """The sum of all past weights, each times its own factor and the decays after it."""
    decays = [min(DECAY, (1 + step) / (10 + step)) for step in range(num_steps)]
    factors = [1.0, *(1 - d for d in decays)]
    for i, decay in enumerate(decays):
        factors[: i + 1] = [f * decay for f in factors[: i + 1]]
    history = [list(model_at(step).double().parameters()) for step in range(num_steps + 1)]
    return [sum(f * p for f, p in zip(factors, values, strict=True)) for values in zip(*history, strict=True)]


def test_closed_form():
    assert (1 + 30) / (10 + 30) > DECAY  # the last steps are past the rise
    model = model_at(0)
    ema = EMA(model.named_parameters(), DECAY)
    for step in range(31):
        model.load_state_dict(model_at(step + 1).state_dict())
        ema.update(step)
    for average, expected in zip(ema.tensors().values(), expected_average(31), strict=True):
        assert average.dtype == torch.float32 and torch.allclose(average.double(), expected, rtol=1e-5, atol=1e-6)
    assert list(ema.tensors()) == [name for name, _ in model.named_parameters()]


def test_swapped_in_runs_on_the_average_and_restores_every_bit():
    model = model_at(0)
    ema = EMA(model.named_parameters(), DECAY)
    model.load_state_dict(model_at(1).state_dict())
    x, weights = torch.ones(2, 3), copy.deepcopy(model.state_dict())
    with ema.swapped_in(model):
        assert torch.equal(model(x), model_at(0)(x))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), weights.values(), strict=True))
    with pytest.raises(KeyError), ema.swapped_in(model):
        raise KeyError("an error inside must not leave the average in the model")
    assert torch.equal(model(x), model_at(1)(x))
    assert all(torch.equal(a, p) for a, p in zip(ema.tensors().values(), model_at(0).parameters(), strict=True))


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5])
def test_bad_decay_is_refused(decay):
    with pytest.raises(ValueError, match="--ema_decay"):
        EMA([], decay)


def sharded(rank, world_size, reshard_after_forward):
    model = model_at(0)
    shard_model(model, ("0",), build_mesh("cpu"), torch.float32, torch.float32, reshard_after_forward)
    ema = EMA(model.named_parameters(), DECAY)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), model_at(1).parameters(), strict=True):
            parameter.copy_(distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements))
    x = torch.ones(2, 3)
    with torch.no_grad():
        before = model(x)  # leaves the weights gathered unless they are freed
        with ema.swapped_in(model):
            inside = model(x)
        after = model(x)
    ema.update(5)
    return before, inside, after, [average.full_tensor() for average in ema.tensors().values()]


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_sharded_unevenly(reshard_after_forward):
    # Five rows over two ranks, and one row: the second rank holds less, then nothing.
    x, decay = torch.ones(2, 3), 6 / 15
    for before, inside, after, averages in run_ranks(sharded, 2, reshard_after_forward):
        assert torch.equal(before, model_at(1)(x)) and torch.equal(after, before)
        assert torch.equal(inside, model_at(0)(x))
        for average, old, new in zip(averages, model_at(0).parameters(), model_at(1).parameters(), strict=True):
            assert torch.allclose(average, decay * old + (1 - decay) * new, rtol=1e-5, atol=1e-6)
