"""Where a run's wall-clock time goes, and which part of it moves the run forward."""

import time
from collections.abc import Mapping

STATES = ("training", "data_wait", "checkpoint", "validation", "restart", "lost")
# Phases of `PhaseTimer` that are not training; all others are.
PHASE_STATES = {
    "data_wait": "data_wait", "checkpoint": "checkpoint", "validation": "validation", "sampling": "validation",
}  # fmt: skip


class Goodput:
    """Seconds by state; their sum is the time since the last start's last step, down time included.

    training     steps done for the first time
    data_wait    waiting for samples
    checkpoint   what a save keeps training from
    validation   validation and sample pictures
    restart      from the last step of the start before to the first of this one; of a first start, its start-up
    lost         steps done again, since the checkpoint they resumed from was older

    repeated_until: how many steps earlier starts had done.  down_s: seconds from the last of those to now.
    """

    def __init__(self, repeated_until: int = 0, down_s: float = 0.0):
        self.seconds = dict.fromkeys(STATES, 0.0)
        self.seconds["restart"] = max(0.0, down_s)
        self._repeated_until = repeated_until
        self._since = time.monotonic()
        self._starting = True

    def step(self, step: int, step_s: float, phase_seconds: Mapping[str, float]) -> float:
        """Count the time since the last call; `step` steps are done now, the last of them in step_s seconds.

        phase_seconds: of the time since the last call, by phase.  Before the first step, what is neither the step nor
        a phase is the start.
        Returns the seconds since the last call that were neither checkpoint nor validation nor start.
        """
        own = dict.fromkeys(STATES, 0.0)
        for phase, seconds in phase_seconds.items():
            if state := PHASE_STATES.get(phase):
                own[state] += seconds
        now = time.monotonic()
        elapsed, self._since = now - self._since, now
        rest = max(0.0, elapsed - sum(own.values()))
        own["training"] = rest
        if self._starting:
            own["training"] = min(rest, max(0.0, step_s - own["data_wait"]))
            own["restart"] = rest - own["training"]
            self._starting = False
        interval = own["training"] + own["data_wait"]
        if step <= self._repeated_until:
            own["lost"] = own.pop("training") + own.pop("data_wait")
        for state, seconds in own.items():
            self.seconds[state] += seconds
        return interval

    def end(self, phase_seconds: Mapping[str, float]) -> None:
        """Count the phases after the last step; what else passed since then counts for nothing."""
        for phase, seconds in phase_seconds.items():
            if state := PHASE_STATES.get(phase):
                self.seconds[state] += seconds

    def ratio(self) -> float:
        """Return the share of all time in which the run moved forward."""
        total = sum(self.seconds.values())
        return self.seconds["training"] / total if total else 0.0
