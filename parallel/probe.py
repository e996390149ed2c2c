"""A small measurement every few steps: how fast ranks talk to each other, and how fast each works alone.

In a step all ranks wait for the slowest, so the times of steps do not tell which one that is, or whether it is the
network.  The probe's do: a fixed matrix product of each rank alone, and a small all-reduce among the ranks of a node
and among nodes.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_NUM_TURNS = 3
_NUM_VALUES = 1024  # of the all-reduce: latency, not bandwidth
_WIDTH = {"cuda": 4096, "cpu": 192}  # of the matrix product: about a millisecond


class Probe:
    """Measures at every `every`-th step; all ranks must call it at the same steps.

    every: 0 = never, and no process groups are made.
    On a GPU it records events and reads them when they are over, at a later call: the host never waits.
    """

    def __init__(self, device: torch.device, every: int = 50):
        self._device, self._every = device, every
        self._pending: list[tuple[str, list]] = []  # what was measured, its events
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        if every:
            self._groups = _groups() if dist.is_initialized() and dist.get_world_size() > 1 else {}
            self._values = torch.zeros(_NUM_VALUES, device=device)
            self._matrix = torch.ones(_WIDTH[device.type], _WIDTH[device.type], device=device)

    def __call__(self, step: int) -> dict[str, float]:
        """Return what is known since the last call, in seconds: {"compute": …, "all" or "node" and "across": …}."""
        found = self._read_events()
        if not self._every or step % self._every:
            return found
        measured = {"compute": self._measure(lambda: torch.mm(self._matrix, self._matrix))}
        for name, group in self._groups.items():
            measured[name] = self._measure(lambda group=group: dist.all_reduce(self._values, group=group))
        if self._device.type == "cuda":
            self._pending += measured.items()
            return found
        return found | {name: statistics.median(times) for name, times in measured.items()}

    def _measure(self, work: Callable[[], object]) -> list:
        """Return the seconds of each turn, or of a GPU the events between them.  The first turn is only to meet."""
        work()
        marks = [self._mark()]
        for _ in range(_NUM_TURNS):
            work()
            marks.append(self._mark())
        return marks if self._device.type == "cuda" else [b - a for a, b in zip(marks, marks[1:], strict=False)]

    def _mark(self):
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read_events(self) -> dict[str, float]:
        if not self._pending or not self._pending[-1][1][-1].query():
            return {}
        found = {
            name: statistics.median(a.elapsed_time(b) / 1000 for a, b in zip(marks, marks[1:], strict=False))
            for name, marks in self._pending
        }
        self._pending.clear()
        return found


def _groups() -> dict[str, dist.ProcessGroup | None]:
    """Return the groups to measure this rank in: all, on one node; else those of its node and those across nodes.

    Every rank makes every group, in one order.
    """
    num_ranks, per_node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0") or 0)
    if not 0 < per_node < num_ranks or num_ranks % per_node:
        return {"all": None}
    nodes = [list(range(first, first + per_node)) for first in range(0, num_ranks, per_node)]
    across = [list(range(place, num_ranks, per_node)) for place in range(per_node)]
    found = {}
    if per_node > 1:
        found["node"] = dist.new_subgroups_by_enumeration(nodes)[0]
    found["across"] = dist.new_subgroups_by_enumeration(across)[0]
    return found
