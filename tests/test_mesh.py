"""The mesh puts ranks where the flags say, and refuses sizes that do not fit."""

import itertools

import pytest

from parallel.mesh import AXES, build_mesh, data_parallel
from tests.spawn import run_ranks

BAD = {
    (1, 3, 1, 1): "does not make the 4 ranks",
    (2, 2, 1, 2): "does not make the 4 ranks",
    (3, -1, 1, 1): "does not make the 4 ranks",
    (1, -1, 1, 8): "does not make the 4 ranks",
    (-1, -1, 1, 1): "at most one of them -1",
    (1, 0, 1, 4): "must be positive",
    (1, -2, 1, 1): "must be positive",
    (1, 2, 4, 1): "does not make the 4 ranks",
}


def place(rank, world_size, sizes):
    meshes = [build_mesh("cpu", *s) for s in sizes]
    messages = {}
    for bad in BAD:
        with pytest.raises(ValueError) as caught:
            build_mesh("cpu", *bad)
        messages[bad] = str(caught.value)
    return [(tuple(m.shape), m.mesh_dim_names, tuple(m.get_coordinate()), data_parallel(m)) for m in meshes], messages


def test_ranks_are_laid_out_with_tp_fastest_then_shards():
    sizes = [(1, -1, 1, 1), (2, 2, 1, 1), (1, 2, 1, -1), (2, 1, 1, 2), (-1, 1, 1, 1)]
    shapes = [(1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 1, 2), (2, 1, 1, 2), (4, 1, 1, 1)]
    results = run_ranks(place, 4, sizes)
    for i, shape in enumerate(shapes):
        coordinates = list(itertools.product(*map(range, shape)))  # row-major: the last axis varies fastest
        for rank in range(4):
            placed_shape, names, coordinate, data = results[rank][0][i]
            assert placed_shape == shape and names == AXES == ("dp_replicate", "dp_shard", "cp", "tp")
            assert coordinate == coordinates[rank]
            assert data == (coordinate[0] * shape[1] + coordinate[1], shape[0] * shape[1])
    for bad, message in BAD.items():
        assert all(message in results[rank][1][bad] for rank in range(4)), bad
