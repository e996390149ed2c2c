"""Where a step's time goes, without making the host wait for the device."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Sums the time of named phases of a step, in seconds.

    On a GPU it records events and reads them at `collect`, when the step's last result has been read anyway.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase `name`."""
        if self._cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._events.append((name, first, last))
            return
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def collect(self) -> dict[str, float]:
        """Return {"<phase>_s": seconds} since the last call, and start again."""
        for name, first, last in self._events:
            last.synchronize()
            self._seconds[name] += first.elapsed_time(last) / 1000
        collected = {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        self._events.clear()
        return collected
