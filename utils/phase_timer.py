"""Where a step's time goes, without making the host wait for the device, and where in the step this process is now."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from utils.exposed_communication import ExposedCommunication
from utils.fault_injection import injected_faults
from utils.run_options import RunOptions

BETWEEN_STEPS = ("checkpoint", "validation", "sampling")


class Position(NamedTuple):
    """Where a process is.  All ranks go through the same phases in the same order, so (step, number) compares them."""

    step: int  # -1 before the first
    number: int  # of phases entered and left in this step
    phase: str  # "after <phase>" between two
    since: float  # time.monotonic()


class PhaseTimer:
    """Sums the time of named phases of a step, in seconds, and says which one the process is in.

    On a GPU it records events, and `collect` reads those that are over.
    Entering a phase is also where faults are injected (`utils.fault_injection`), if the environment asks for any.

    current: the phase under way, or None.  position: the same in more detail.  Other threads may read both.
    between_ended_at: time.time() when a phase between steps (`BETWEEN_STEPS`) was last left, 0 before.
    exposed: how much of each phase is communication alone, from a step now and then, if the options ask for metrics.
    """

    def __init__(self, device: torch.device, options: RunOptions | None = None):
        self.current: str | None = None
        self.position = Position(-1, 0, "start", time.monotonic())
        self.between_ended_at = 0.0
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._faults = injected_faults()
        self.exposed = ExposedCommunication(device, options.profile_every if options and options.metrics_port else 0)

    def begin_step(self, step: int) -> None:
        """Say that what follows belongs to `step`."""
        self.position = Position(step, 0, "begin", time.monotonic())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase `name`."""
        outer = self.current
        self._move(name, name)
        with self.exposed.phase(self.position.step, name), self._timed(name, outer):
            yield

    @contextmanager
    def _timed(self, name: str, outer: str | None) -> Iterator[None]:
        try:
            if self._faults is not None:
                self._faults.strike(self.position.step, name)
            if self._cuda:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                yield
                last.record()
                self._events.append((name, first, last))
            else:
                started = time.perf_counter()
                yield
                self._seconds[name] += time.perf_counter() - started
        finally:
            if name in BETWEEN_STEPS:
                self.between_ended_at = time.time()
            if self._faults is not None:
                self._faults.end_phase()
            self._move(outer, outer or f"after {name}")

    def _move(self, current: str | None, phase: str) -> None:
        before, self.current = self.position, current
        self.position = Position(before.step, before.number + 1, phase, time.monotonic())

    def collect(self) -> dict[str, float]:
        """Return {"<phase>_s": seconds} since the last call, and start again.

        What a GPU has not finished yet is left to the next call, so that nobody waits for it.
        """
        while self._events and self._events[0][2].query():
            name, first, last = self._events.popleft()
            self._seconds[name] += first.elapsed_time(last) / 1000
        collected = {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return collected
