"""How much of a phase a rank spends in communication alone, from a step that is profiled now and then.

Communication is exposed while a collective is under way and this rank computes nothing: what overlaps with computing
costs no time.  It can only be seen from inside: collectives lie within the forward and the backward, and on a GPU they
run on streams of their own.  So one step in `every` is recorded by PyTorch's profiler (Kineto), and its intervals are
laid over each other.

On a CPU a collective is a `gloo:` event of one of gloo's threads, or the `c10d::` operator that hands it over; what
computes is an `aten::` operator of another thread.  On a GPU both are kernels: NCCL's, and all others; the host's
operators are not recorded, which would cost more, so there is one share for all phases of the step together.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

OUTSIDE = ("data_wait", "communication", "optimizer", "checkpoint", "validation", "sampling")
_MARK = "phase of the step: "
_MOST_COST = 0.0025  # of the time between two profiles; beyond it they become rarer
log = logging.getLogger("train")


def exposed(communication: np.ndarray, computing: np.ndarray) -> float:
    """Return for how long there is communication and no computing.

    communication, computing: (n, 2), begin and end of intervals, which may overlap; the result has their unit.
    """
    return _covered(np.concatenate([communication, computing])) - _covered(computing)


class ExposedCommunication:
    """Profiles a step now and then, from its first phase that is not `OUTSIDE` to the next that is.

    every: steps between two profiles; 0 = none.  Twice as many each time that one has cost more than a quarter of a
    percent of the time since the one before.
    shares: {phase: share of its time, 0 to 1}, of the last profiled step; empty before the first.
    """

    def __init__(self, device: torch.device, every: int):
        self.shares: dict[str, float] = {}
        self.every = every
        self._cuda = device.type == "cuda"
        self._profile = None
        self._done_at: float | None = None
        self._cost_s = 0.0
        self._host_s: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Be told of a phase, around its block: the profile begins and ends with one."""
        inside = name not in OUTSIDE
        if self._profile is not None and not inside:
            self._guarded(self._end)
        elif self._profile is None and inside and self.every and step > 0 and step % self.every == 0:
            self._guarded(self._begin)
        if self._profile is None or not inside:
            yield
            return
        started = time.perf_counter()
        with torch.profiler.record_function(_MARK + name):
            yield
        self._host_s[name] += time.perf_counter() - started

    def _guarded(self, function: Callable[[], None]) -> None:
        """Never let training end for a measurement."""
        try:
            function()
        except Exception as error:
            self._profile, self.every = None, 0
            log.warning("the step cannot be profiled: %r; training goes on without", error)

    def _begin(self) -> None:
        started = time.perf_counter()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write a line to stderr at each begin
        kinds = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kinds.CUDA if self._cuda else kinds.CPU])
        self._profile.start()
        self._host_s.clear()
        self._cost_s = time.perf_counter() - started

    def _end(self) -> None:
        started = time.perf_counter()
        profile, self._profile = self._profile, None
        profile.stop()
        events = profile.profiler.kineto_results.events()
        self.shares = _gpu_shares(events, self._host_s) if self._cuda else cpu_shares(_intervals(events))
        now = time.perf_counter()
        self._cost_s += now - started
        if self._done_at is not None and self._cost_s > _MOST_COST * (now - self._done_at):  # the first loads Kineto
            self.every *= 2
        self._done_at = now


def cpu_shares(events: Iterable[tuple[str, int, int, int]]) -> dict[str, float]:
    """Return {phase: share of its time} of a CPU's events: (name, thread, begin, end)."""
    phases, talking, working, gloo = defaultdict(list), [], [], set()
    for name, thread, begin, end in events:
        if name.startswith(_MARK):
            phases[name.removeprefix(_MARK)].append((begin, end))
        elif name.startswith(("gloo:", "c10d::")):
            talking.append((begin, end))
            if name.startswith("gloo:"):
                gloo.add(thread)
        elif name.startswith("aten::"):
            working.append((thread, begin, end))
    talking = np.array(talking, dtype=np.int64).reshape(-1, 2)
    working = np.array([(b, e) for thread, b, e in working if thread not in gloo], dtype=np.int64).reshape(-1, 2)
    found = {}
    for phase, blocks in phases.items():
        alone = sum(exposed(_within(talking, *block), _within(working, *block)) for block in blocks)
        found[phase] = alone / max(1, sum(end - begin for begin, end in blocks))
    return found


def without_communication(phases: dict[str, float], shares: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase with the exposed share of each moved to the phase "communication"."""
    moved = {phase: phases[phase] * share for phase, share in shares.items() if phase in phases}
    found = {phase: seconds - moved.get(phase, 0.0) for phase, seconds in phases.items()}
    if moved:
        found["communication"] = found.get("communication", 0.0) + sum(moved.values())
    return found


def _gpu_shares(events: Sequence, host_s: dict[str, float]) -> dict[str, float]:
    """Return the same share for each phase, of the time from the first kernel to the end of the last."""
    kernels = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
    spans = np.array([(e.start_ns(), e.start_ns() + e.duration_ns()) for e in kernels], dtype=np.int64).reshape(-1, 2)
    if not len(spans):
        return {}
    talks = np.array(["nccl" in e.name().lower() for e in kernels])
    share = exposed(spans[talks], spans[~talks]) / max(1, spans[:, 1].max() - spans[:, 0].min())
    return dict.fromkeys(host_s, float(share))


def _intervals(events: Sequence) -> Iterator[tuple[str, int, int, int]]:
    for event in events:
        begin = event.start_ns()
        yield event.name(), event.start_thread_id(), begin, begin + event.duration_ns()


def _within(intervals: np.ndarray, begin: int, end: int) -> np.ndarray:
    cut = intervals.clip(begin, end)
    return cut[cut[:, 1] > cut[:, 0]]


def _covered(intervals: np.ndarray) -> float:
    """Return the length of the union of intervals."""
    if not len(intervals):
        return 0.0
    ordered = intervals[intervals[:, 0].argsort()]
    reached = np.maximum.accumulate(ordered[:, 1])
    before = np.concatenate([ordered[:1, 0], reached[:-1]])  # up to where the earlier ones have covered all
    return float((reached - np.maximum(ordered[:, 0], before)).clip(0).sum())
