"""DDP against one process: gradients, accumulation, ZeRO-1, and resuming on other numbers of ranks."""

import pytest
import torch
from torch import nn

from parallel import checkpoint
from parallel.ddp import replicate
from tests.spawn import run_ranks
from utils.optimizer import build_adamw, build_zero_adamw, optimizer_tensors, set_learning_rate

NUM_SAMPLES, NUM_STEPS = 8, 3


def new_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7, bias=False), nn.Tanh(), nn.Linear(7, 3)).double()
    net[2].weight.requires_grad_(False)  # frozen: no gradient, no state
    return net


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return tuple(torch.randn(NUM_SAMPLES, n, generator=random, dtype=torch.float64) for n in (6, 3))


def train(net, optimizer, steps, rank=0, num_ranks=1, num_micro_batches=1, forward=None):
    """Take steps on this rank's samples; return the last step's gradients."""
    forward = forward or net
    for step in steps:
        x, y = batch(step)
        mine = torch.arange(rank, NUM_SAMPLES, num_ranks).chunk(num_micro_batches)
        optimizer.zero_grad()
        for i, part in enumerate(mine):
            waits = i < len(mine) - 1 and hasattr(forward, "no_sync")
            with forward.no_sync() if waits else torch.enable_grad():
                ((forward(x[part]) - y[part]).square().sum() / NUM_SAMPLES).backward()
        set_learning_rate(optimizer, 0.01 * (step + 1))
        optimizer.step()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def state(net, optimizer) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": p for name, p in net.named_parameters()}
    return tensors | {f"optimizer.{name}": t for name, t in optimizer_tensors(optimizer, net).items()}


def copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def adamw(build, net):
    return build(net.named_parameters(), 0.01, (0.8, 0.95), 1e-6, 0.1)


def train_rank(rank, world_size, zero, num_micro_batches, static_graph, reduce_dtype=torch.float64):
    net = new_net()
    if rank:  # the copies start as rank 0's
        nn.init.zeros_(net[0].weight)
    wrapped = replicate(net, 1.0, reduce_dtype, static_graph)
    optimizer = adamw(build_zero_adamw if zero else build_adamw, net)
    gradients = train(net, optimizer, range(NUM_STEPS), rank, world_size, num_micro_batches, wrapped)
    return gradients, copies(state(net, optimizer))


@pytest.fixture(scope="module")
def alone():
    net = new_net()
    optimizer = adamw(build_adamw, net)
    gradients = train(net, optimizer, range(NUM_STEPS))
    return gradients, copies(state(net, optimizer))


@pytest.mark.parametrize(
    ("world_size", "zero", "num_micro_batches", "static_graph"),
    [(1, False, 1, False), (2, False, 1, False), (2, False, 2, False), (4, False, 2, False), (2, False, 1, True),
     (1, True, 1, False), (2, True, 1, False), (2, True, 2, False), (4, True, 1, True)],
)  # fmt: skip
def test_equals_one_process(alone, world_size, zero, num_micro_batches, static_graph):
    gradients, tensors = alone
    results = run_ranks(train_rank, world_size, zero, num_micro_batches, static_graph)
    for rank_gradients, rank_tensors in results:
        for name, expected in gradients.items():
            torch.testing.assert_close(rank_gradients[name], expected, rtol=1e-12, atol=1e-14)
        for name, value in rank_tensors.items():
            torch.testing.assert_close(value, tensors[name], rtol=1e-10, atol=1e-12)
    owners = [name for _, rank_tensors in results for name in rank_tensors if name.endswith("0.weight.exp_avg")]
    assert len(owners) == (1 if zero else world_size)
    assert {name for _, rank_tensors in results for name in rank_tensors} == tensors.keys()


def test_bfloat16_sums_are_near_and_copies_stay_equal(alone):
    results = run_ranks(train_rank, 2, False, 1, False, torch.bfloat16)
    for name, expected in alone[0].items():
        error = (results[0][0][name] - expected).norm() / expected.norm()
        assert 0 < error < 0.02, name
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


def test_refuses_a_bucket_of_nothing():
    with pytest.raises(ValueError, match="--bucket_mb must be above 0, got 0"):
        replicate(new_net(), 0, torch.float32)


# ---- Resume ---------------------------------------------------------------------------------------------------------


def run_and_save(rank, world_size, folder, zero, build_steps, more_steps):
    """Train, save, and go on; return everything at the end."""
    net = new_net()
    wrapped = replicate(net, 1.0, torch.float64)
    optimizer = adamw(build_zero_adamw if zero else build_adamw, net)
    train(net, optimizer, build_steps, rank, world_size, forward=wrapped)
    checkpoint.save(folder, len(build_steps), state(net, optimizer), {"step": len(build_steps)})
    train(net, optimizer, more_steps, rank, world_size, forward=wrapped)
    return copies(state(net, optimizer))


def load_and_run(rank, world_size, folder, zero, step, more_steps):
    net = new_net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    wrapped = replicate(net, 1.0, torch.float64)
    optimizer = adamw(build_zero_adamw if zero else build_adamw, net)
    checkpoint.load(folder, step, state(net, optimizer))
    train(net, optimizer, more_steps, rank, world_size, forward=wrapped)
    return copies(state(net, optimizer))


@pytest.mark.parametrize("zero", [False, True])
def test_resume_is_bitwise(tmp_path, zero):
    undisturbed = run_ranks(run_and_save, 2, tmp_path, zero, range(2), range(2, 5))
    resumed = run_ranks(load_and_run, 2, tmp_path, zero, 2, range(2, 5))
    for expected, got in zip(undisturbed, resumed, strict=True):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("from_ranks", "to_ranks"), [(2, 1), (1, 4), (4, 2)])
def test_shared_out_state_moves_to_another_number_of_ranks(tmp_path, from_ranks, to_ranks):
    before = run_ranks(run_and_save, from_ranks, tmp_path, True, range(2), ())
    after = run_ranks(load_and_run, to_ranks, tmp_path, True, 2, ())
    expected = {name: value for of_rank in before for name, value in of_rank.items()}
    got = {name: value for of_rank in after for name, value in of_rank.items()}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    # From ZeRO to whole state and back is a load like any other.
    whole = run_ranks(load_and_run, to_ranks, tmp_path, False, 2, ())
    assert all(torch.equal(of_rank[name], value) for of_rank in whole for name, value in expected.items())


def load_less(rank, world_size, folder):
    net = new_net()
    optimizer = adamw(build_adamw, net)
    tensors = state(net, optimizer)
    before = copies(tensors)
    wanted = {name: t for name, t in tensors.items() if name != "optimizer.0.weight.exp_avg"}
    with pytest.raises(ValueError, match=r"1 only in it \(first \['optimizer.0.weight.exp_avg'\]\)"):
        checkpoint.load(folder, 2, wanted)
    assert all(torch.equal(t, before[name]) for name, t in tensors.items())
    return True


def test_what_no_rank_asks_for_is_an_error(tmp_path):
    run_ranks(run_and_save, 2, tmp_path, True, range(2), ())
    assert all(run_ranks(load_less, 2, tmp_path))
