"""Tensor parallelism on a toy network with every style; the MMDiT's own plan is tested in test_parallel_parity."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallel import collectives
from parallel.mesh import build_mesh
from parallel.module_patterns import matching_modules
from parallel.tensor_parallel import apply_tensor_parallel
from tests.spawn import run_ranks
from tests.toy_model import PLAN, Toy, init_toy, toy_batch

NUM_BLOCKS = 2


def plain_toy() -> Toy:
    model = Toy().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_toy(name, parameter, torch.Generator().manual_seed(len(name)))
    return model


def step(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, gradient of the input) of one forward and backward pass."""
    x, labels, targets = toy_batch(torch.float64)
    x.requires_grad_()
    out = torch.stack([model(x[i], labels[i]) for i in range(len(x))])
    (out - targets).square().mean().backward()
    return out.detach(), x.grad


def parallel_step(rank, world_size):
    mesh, model = build_mesh("cpu", 1, 1, 1, world_size)["tp"], plain_toy()
    names = list(dict(model.named_parameters()))
    apply_tensor_parallel(model, PLAN, mesh)
    assert list(dict(model.named_parameters())) == names
    assert all(isinstance(p, DTensor) for p in model.parameters())
    out, input_grad = step(model)
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    # Replicated parameters have no collective that would keep them alike: their gradients must be equal to the bit.
    replicas = {
        n: p.grad.to_local() for n, p in model.named_parameters() if "norm" in n or n.startswith(("out", "emb"))
    }
    sizes = {n: p.to_local().numel() for n, p in model.named_parameters()}
    return out, input_grad, gradients, replicas, sizes


@pytest.mark.parametrize("tp", [2, 4])
def test_equals_one_process(tp):
    model = plain_toy()
    out, input_grad = step(model)
    results = run_ranks(parallel_step, tp)
    for parallel_out, parallel_input_grad, gradients, replicas, sizes in results:
        assert torch.allclose(parallel_out, out, rtol=1e-12, atol=1e-12)
        assert torch.allclose(parallel_input_grad, input_grad, rtol=1e-11, atol=1e-13)
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                assert "unused" in name and name not in gradients
            else:
                assert torch.allclose(gradients[name], parameter.grad, rtol=1e-10, atol=1e-13), name
        assert all(torch.equal(replicas[n], results[0][3][n]) for n in replicas)
        whole = {n: p.numel() for n, p in model.named_parameters()}
        assert sizes["blocks.0.mod.weight"] * tp == whole["blocks.0.mod.weight"]
        assert sizes["blocks.0.down.weight"] * tp == whole["blocks.0.down.weight"]
        assert sizes["blocks.0.down.bias"] == whole["blocks.0.down.bias"]


def count_collectives(rank, world_size):
    counts = {"all_reduce": 0, "all_gather": 0}
    all_reduce, all_gather = dist.all_reduce, collectives._all_gather

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    model = plain_toy()
    apply_tensor_parallel(model, PLAN, build_mesh("cpu", 1, 1, 1, world_size)["tp"])
    dist.all_reduce = counted("all_reduce", all_reduce)
    collectives._all_gather = counted("all_gather", all_gather)
    x, labels, _ = toy_batch(torch.float64)
    out = model(x[0], labels[0])
    forward = dict(counts)
    out.sum().backward()
    dist.all_reduce = all_reduce
    return forward, {name: counts[name] - forward[name] for name in counts}


def test_collectives_are_as_few_as_the_styles_promise():
    for forward, backward in run_ranks(count_collectives, 2):
        # A block sums the attention's and the MLP's outputs, and gathers the modulation.
        assert forward == {"all_reduce": 2 * NUM_BLOCKS, "all_gather": NUM_BLOCKS}
        # And back: the attention's input once for q, k and v together; the MLP's; the modulation's; the head norm.
        assert backward == {"all_reduce": 4 * NUM_BLOCKS, "all_gather": 0}


def bad_plans(rank, world_size):
    mesh = build_mesh("cpu", 1, 1, 1, 2)["tp"]

    def message(plan, model):
        with pytest.raises(ValueError) as caught:
            apply_tensor_parallel(model, plan, mesh)
        return str(caught.value)

    return [
        message({name: style for name, style in PLAN.items() if name != "blocks.*.up"}, plain_toy()),
        message(PLAN | {"embed": "rowwise"}, plain_toy()),
        message(PLAN | {"out": "colwise_gather"}, plain_toy()),  # five outputs over two ranks
        message({"0": "sideways"}, nn.Sequential(nn.Linear(2, 2))),
    ]


def test_bad_plans_are_refused():
    for messages in run_ranks(bad_plans, 2):
        assert "leaves out 4 parameters" in messages[0] and "blocks.0.up.weight" in messages[0]
        assert "'rowwise' does not apply to embed, a Embedding" in messages[1]
        assert "--tp 2 does not divide dimension 0 of out.weight" in messages[2]
        assert "'sideways'" in messages[3]


def unchanged(rank, world_size):
    model = plain_toy()
    before = copy.deepcopy(model)
    apply_tensor_parallel(model, PLAN, build_mesh("cpu")["tp"])
    return str(model) == str(before) and not any(isinstance(p, DTensor) for p in model.parameters())


def test_a_single_rank_changes_nothing():
    assert run_ranks(unchanged, 1) == [True]


def test_patterns_match_one_part_of_a_name():
    model = plain_toy()
    assert [name for name, _ in matching_modules(model, "blocks.*")] == ["blocks.0", "blocks.1"]
    assert [name for name, _ in matching_modules(model, "blocks.*.attn.to_q")] == [
        "blocks.0.attn.to_q",
        "blocks.1.attn.to_q",
    ]
    assert matching_modules(model, "nothing") == []
