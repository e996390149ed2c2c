"""The periodic probe: which groups it measures, when, and that what it says follows what happens."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from parallel.probe import Probe
from tests.spawn import run_ranks

CPU = torch.device("cpu")


def probe_on_four_ranks(rank, world_size):
    """Return what each shape of a cluster measures, and the same with rank 3's messages late."""
    seen = {}
    for per_node in (4, 2, 1):
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
        probe = Probe(CPU, every=3)
        measured = [probe(step) for step in range(5)]
        assert [bool(found) for found in measured] == [True, False, False, True, False]
        seen[per_node] = sorted(measured[0])
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    probe = Probe(CPU, every=1)
    ours = {name: group and dist.get_process_group_ranks(group) for name, group in probe._groups.items()}
    all_reduce = dist.all_reduce

    def late(values, group=None):  # rank 3 is slow to send across nodes
        if rank == 3 and group is probe._groups["across"]:
            time.sleep(0.1)
        all_reduce(values, group=group)

    dist.all_reduce = late
    found = probe(0)
    dist.all_reduce = all_reduce
    return seen, ours, found


def test_groups_and_times():
    results = run_ranks(probe_on_four_ranks, 4)
    for rank, (seen, ours, found) in enumerate(results):
        assert seen == {4: ["all", "compute"], 2: ["across", "compute", "node"], 1: ["across", "compute"]}
        node = rank // 2
        assert ours == {"node": [2 * node, 2 * node + 1], "across": [rank % 2, rank % 2 + 2]}
        # Ranks 1 and 3 wait for rank 3; nobody else does.
        assert (found["across"] > 0.09) == (rank in (1, 3)), found


def test_alone_only_the_product_is_measured():
    [found] = [Probe(CPU, every=2)(0)]
    assert found.keys() == {"compute"} and 0 < found["compute"] < 1


def test_never():
    probe = Probe(CPU, every=0)
    assert [probe(step) for step in range(3)] == [{}, {}, {}]


@pytest.mark.gpu
def test_on_a_gpu_the_host_does_not_wait():
    device = torch.device("cuda")
    probe = Probe(device, every=1)
    probe(0)
    torch.cuda.synchronize()
    assert 0 < probe(1)["compute"] < 0.1
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
    started = time.perf_counter()
    probe(2)
    assert time.perf_counter() - started < 0.05
    assert probe(3) == {}  # not over yet
    torch.cuda.synchronize()
    assert probe(4)["compute"] < 0.1
