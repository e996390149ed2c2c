"""Each rank's box of a parameter is what torch really left there, also where sizes do not divide."""

import copy
import math

import pytest
import torch
from torch import nn

from parallel.fsdp import shard_model
from parallel.init_weights import materialize
from parallel.mesh import build_mesh
from parallel.slices import local_slice, num_shards
from parallel.tensor_parallel import apply_tensor_parallel
from tests.spawn import run_ranks

PLAN = {"up": "colwise", "down": "rowwise", "norm": "replicate"}


class Odd(nn.Module):
    """Along FSDP's dimension: 6 and 10 (3 and 5 under tp 2), 5 and 3, so that chunks are uneven and some empty."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 6), nn.Linear(6, 5), nn.RMSNorm(3, eps=1e-6)
        self.wide = nn.ModuleList([nn.Linear(2, 10)])


def full_values() -> Odd:
    model = Odd()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape))
    return model


def boxes(rank, world_size, meshes):
    results = []
    for sizes in meshes:
        mesh, model = build_mesh("cpu", *sizes), copy.deepcopy(full_values())
        apply_tensor_parallel(model, PLAN | {"wide.*": "colwise"}, mesh["tp"])
        shard_model(model, ("wide.*",), mesh, torch.float32, torch.float32, True)
        results.append({n: (local_slice(p), p.to_local(), num_shards(p)) for n, p in model.named_parameters()})
        gathered = {n: p.full_tensor() for n, p in model.named_parameters()}
        assert all(torch.equal(gathered[n], p) for n, p in full_values().named_parameters())
    return results


@pytest.mark.parametrize(
    "world_size, meshes",
    [
        (4, [(1, 4, 1, 1), (1, 2, 1, 2), (2, 2, 1, 1), (2, 1, 1, 2)]),
        (3, [(1, 3, 1, 1)]),
        (1, [(1, 1, 1, 1)]),
    ],
)
def test_boxes_are_where_torch_cut(world_size, meshes):
    results = run_ranks(boxes, world_size, meshes)
    for i, sizes in enumerate(meshes):
        for name, full in full_values().named_parameters():
            held = torch.zeros_like(full)
            for rank in range(world_size):
                box, local, shards = results[rank][i][name]
                assert torch.equal(full[box], local), (sizes, rank, name)
                held[box] += 1
            # Every element lies on the same number of ranks: once a replica.
            assert held.min() == held.max() == world_size / shards, (sizes, name)
            expected = sizes[1] * (sizes[3] if name in ("up.weight", "up.bias", "down.weight") or "wide" in name else 1)
            assert shards == expected, (sizes, name)


def test_a_plain_tensor_is_its_own_box():
    assert local_slice(torch.empty(2, 3)) == (slice(0, 2), slice(0, 3))
    assert local_slice(torch.empty(())) == ()
    assert num_shards(torch.empty(4)) == 1


def draw(name, parameter, generator):
    nn.init.normal_(parameter, generator=generator)


def materialized(rank, world_size, sizes):
    mesh = build_mesh("cpu", *sizes)
    with torch.device("meta"):
        model = Odd()
    apply_tensor_parallel(model, PLAN | {"wide.*": "colwise"}, mesh["tp"])
    shard_model(model, ("wide.*",), mesh, torch.float32, torch.float32, True)
    materialize(model, torch.device("cpu"), draw, seed=3)
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def test_first_values_do_not_depend_on_the_mesh():
    alone = run_ranks(materialized, 1, (1, 1, 1, 1))[0]
    for sizes in ((1, 2, 1, 2), (1, 3, 1, 1), (2, 2, 1, 1)):
        for values in run_ranks(materialized, math.prod(sizes), sizes):
            assert all(torch.equal(values[name], alone[name]) for name in alone)
    # Parameters of one shape get different values: each has a random stream of its own.
    assert not torch.equal(alone["up.bias"][:3], alone["norm.weight"])
