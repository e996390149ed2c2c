"""The helper that other tests stand on: it returns, fails and times out as it says."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.spawn import run_ranks


def _sum_of_ranks(rank, world_size, offset):
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return rank, world_size, value


def _fail_on_rank_1(rank, world_size):
    if rank == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def _sleep(rank, world_size):
    time.sleep(60)


def test_every_rank_returns_its_value():
    results = run_ranks(_sum_of_ranks, 3, 10)
    assert [r[:2] for r in results] == [(0, 3), (1, 3), (2, 3)]
    assert all(r[2].item() == 10 + 11 + 12 for r in results)


def test_a_failure_carries_the_childs_traceback():
    with pytest.raises(RuntimeError, match="rank one says no"):
        run_ranks(_fail_on_rank_1, 2)


def test_a_rank_that_hangs_is_stopped():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="took longer"):
        run_ranks(_sleep, 2, timeout_s=1.0)
    assert time.monotonic() - started < 10
