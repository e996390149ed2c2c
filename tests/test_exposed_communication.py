"""Exposed communication: its arithmetic in closed form, and a profile of real ranks against a stop watch."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.spawn import run_ranks
from utils.exposed_communication import ExposedCommunication, cpu_shares, exposed, without_communication
from utils.phase_timer import PhaseTimer
from utils.run_options import RunOptions

CPU = torch.device("cpu")
LATE_S = 0.3


def profiled(every):
    return RunOptions(metrics_port=1, profile_every=every)


def test_intervals_are_laid_over_each_other():
    generator = np.random.default_rng(0)
    for count in (0, 1, 7, 40):
        talking, working = (
            np.sort(generator.integers(0, 1000, (n, 2)), axis=1).astype(np.int64) for n in (count, count // 2)
        )
        ticks = np.arange(1000)[:, None] + 0.5
        covered = [((ticks > spans[:, 0]) & (ticks < spans[:, 1])).any(axis=1) for spans in (talking, working)]
        assert exposed(talking, working) == (covered[0] & ~covered[1]).sum()


def test_shares_by_phase():
    mark = "phase of the step: "
    events = [
        (f"{mark}forward", 1, 0, 100), (f"{mark}backward", 1, 100, 300), (f"{mark}forward", 1, 300, 400),
        ("gloo:all_gather", 2, 10, 60), ("aten::copy_", 2, 10, 60),  # gloo's own copies are no computing
        ("aten::mm", 1, 40, 80), ("c10d::allreduce_", 1, 290, 320), ("aten::mm", 1, 310, 390),
        ("autograd::engine", 1, 100, 300),
    ]  # fmt: skip
    assert cpu_shares(events) == {"forward": (30 + 10) / 200, "backward": 10 / 200}


def test_phases_keep_their_sum():
    found = without_communication({"forward": 2.0, "backward": 4.0, "communication": 1.0}, {"forward": 0.5, "x": 0.1})
    assert found == {"forward": 1.0, "backward": 4.0, "communication": 2.0}
    assert without_communication({"forward": 2.0}, {}) == {"forward": 2.0}


def step_with_a_late_rank(rank, world_size):
    """Return the shares of three steps, and what a stop watch around the collective says of the same."""
    timer, matrix, found = PhaseTimer(CPU, profiled(1)), torch.ones(400, 400), []
    for step in range(4):
        timer.begin_step(step)
        dist.barrier()
        with timer.phase("forward"):  # rank 1 is late, and rank 0 waits
            began = time.perf_counter()
            if rank == 1:
                time.sleep(LATE_S)
            called = time.perf_counter()
            dist.all_reduce(torch.ones(10))
            ended = time.perf_counter()
            by_hand = (ended - called) / (ended - began)
        dist.barrier()
        with timer.phase("backward"):  # rank 1 is late, and rank 0 has something to do until then
            work = dist.all_reduce(torch.ones(10), async_op=True) if rank == 0 else None
            deadline = time.perf_counter() + LATE_S
            while time.perf_counter() < deadline:
                torch.mm(matrix, matrix)
            (work or dist.all_reduce(torch.ones(10), async_op=True)).wait()
        assert timer.exposed.shares == (found[-1][0] if found else {})  # until the step leaves what is profiled
        with timer.phase("communication"):
            pass
        if step:
            found.append((timer.exposed.shares, by_hand))
    return found


def test_a_late_rank_is_seen_where_it_costs_time():
    waits, late = run_ranks(step_with_a_late_rank, 2)
    for shares, by_hand in waits:
        assert by_hand > 0.8 and shares["forward"] == pytest.approx(by_hand, abs=0.1)
        assert shares["backward"] < 0.3  # as long a wait, but hidden
    assert all(shares["forward"] < 0.5 for shares, _ in late)


def test_it_becomes_rarer_where_it_costs_much_and_never_ends_training(caplog, monkeypatch):
    timer = PhaseTimer(CPU, profiled(2))
    for step in range(9):  # steps of nothing: any profile is more than a quarter of a percent
        timer.begin_step(step)
        for phase in ("data_wait", "forward", "optimizer"):
            with timer.phase(phase):
                pass
    assert timer.exposed.every == 8 and timer.exposed.shares == {"forward": 0}

    def broken(**kinds):
        raise RuntimeError("no Kineto here")

    monkeypatch.setattr(torch.profiler, "profile", broken)
    timer = PhaseTimer(CPU, profiled(1))
    for step in range(3):
        timer.begin_step(step)
        with timer.phase("forward"):
            pass
    assert timer.exposed.shares == {} and len(caplog.records) == 1 and "no Kineto here" in caplog.text


def test_unless_asked_for_nothing_is_profiled(monkeypatch):
    monkeypatch.setattr(ExposedCommunication, "_begin", lambda self: pytest.fail("profiled"))
    timer = PhaseTimer(CPU)
    for step in range(3):
        timer.begin_step(step)
        with timer.phase("forward"):
            pass


@pytest.mark.gpu
def test_on_a_gpu_without_peers_nothing_is_exposed():
    device = torch.device("cuda")
    timer, matrix = PhaseTimer(device, profiled(1)), torch.ones(512, 512, device=device)
    for step in range(2):
        timer.begin_step(step)
        with timer.phase("forward"):
            torch.mm(matrix, matrix)
        with timer.phase("optimizer"):
            pass
    assert timer.exposed.shares == {"forward": 0.0}
