"""Steps that are not taken: losses or gradient norms that are not finite, or far above what they have been.

All ranks see the same sums over ranks and so decide alike, without a collective or a wait of their own.  A step that is
not taken leaves weights, optimizer state and average as they are; the data and the schedule move on.
Source of the rule: SkipStepOptimizer of OLMo-core (mean + 6 standard deviations of the last 128 steps).  Here stand the
median and the median absolute deviation of logarithms, which do not follow the spikes they are to find.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from utils.counts import count

WINDOW = 128  # steps whose losses and norms are remembered
MIN_STEPS = 32  # before which only what is not finite is bad
RECENT = 16  # steps of the running loss
_FLOOR = 0.1  # a deviation is at least 10 %, however calm the window
_HIGH = 3.0  # deviations by which the running loss must rise
_TO_SIGMA = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
FILE = "bad_steps.jsonl"
log = logging.getLogger("train")


class BadSteps:
    """Judges each step by the run so far.

    spike_deviations: how far above the window's median a loss or norm is a spike; 0 = only what is not finite is bad.
    rollback_after: bad steps in a row, or steps for which the running loss stays high, until the run is to be rolled
    back; 0 = never.

    is_calm: whether a checkpoint saved now is one to go back to.  rollback: None, or (first bad step, reason) once the
    run is to be rolled back.  num_skipped: steps not taken, over all starts.
    """

    def __init__(self, folder: Path, spike_deviations: float, rollback_after: int, is_main: bool):
        """Raises: ValueError for a negative number, or a spike so near that every second step would be one."""
        if not (spike_deviations == 0 or spike_deviations >= 3) or rollback_after < 0:
            raise ValueError(
                f"--spike_deviations must be 0 or at least 3, got {spike_deviations}, and --rollback_after at least 0, "
                f"got {rollback_after}"
            )
        self.folder, self.is_main = folder, is_main
        self.spike_deviations, self.rollback_after = spike_deviations, rollback_after
        self.num_skipped = 0
        self.rollback: tuple[int, str] | None = None
        self._windows: dict[str, deque[float]] = {}  # of each value the logarithms, oldest first
        self._in_row, self._num_high = 0, 0

    @property
    def is_calm(self) -> bool:
        """Whether the last step was good and the running loss is not high."""
        return not self._in_row and not self._num_high

    def judge(
        self,
        step: int,
        losses: Mapping[str, float],
        norms: Mapping[str, float],
        samples: Callable[[], Sequence[str]] = tuple,
    ) -> bool:
        """Return whether the step may be taken; the same on every rank.

        losses, norms: by name, the same on every rank.  samples: returns the keys of the step's samples, for the log.
        """
        values = {**losses, **norms}
        faults = [fault for name, value in values.items() if (fault := self._fault(name, value))]
        if faults:
            self.num_skipped, self._in_row = self.num_skipped + 1, self._in_row + 1
            is_finite = all(map(math.isfinite, values.values()))
            count("skipped_steps", "spike" if is_finite else "non_finite")
            if not is_finite:
                count("non_finite_steps")
            self._write(step, faults, values, samples)
            if self.rollback_after and self._in_row >= self.rollback_after:
                first = step + 1 - self._in_row
                self.rollback = first, f"{self._in_row} bad steps in a row, the last: {'; '.join(faults)}"
            return False
        self._in_row = 0
        for name, value in values.items():
            self._windows.setdefault(name, deque(maxlen=WINDOW)).append(_log(value))
        self._watch_running_losses(step, losses)
        return True

    def state(self) -> dict:
        """Return what a resumed run needs to judge alike: some KiB of JSON."""
        windows = {name: list(window) for name, window in self._windows.items()}
        return {"windows": windows, "num_skipped": self.num_skipped, "in_row": self._in_row, "num_high": self._num_high}

    def load_state(self, state: Mapping | None) -> None:
        """Continue where `state` was taken; None: in a run that kept none."""
        if state is not None:
            self._windows = {name: deque(window, maxlen=WINDOW) for name, window in state["windows"].items()}
            self.num_skipped, self._in_row, self._num_high = (state[k] for k in ("num_skipped", "in_row", "num_high"))

    def _fault(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"{name} {value}"
        window = self._windows.get(name, ())
        if self.spike_deviations and len(window) >= MIN_STEPS:
            middle, sigma = _centre(window)
            deviations = (_log(value) - middle) / sigma
            if deviations > self.spike_deviations:
                return f"{name} {value:.4g}, {deviations:.1f} deviations above {math.exp(middle):.4g}"
        return None

    def _watch_running_losses(self, step: int, losses: Mapping[str, float]) -> None:
        """Count the steps for which the median of the last RECENT losses has stood far above that of those before."""
        if not self.spike_deviations or not self.rollback_after:
            return
        high = []
        for name in losses:
            window = list(self._windows[name])
            if len(window) < MIN_STEPS + RECENT:
                continue
            middle, sigma = _centre(window[:-RECENT])
            now = median(window[-RECENT:])
            if now > middle + _HIGH * sigma:
                high.append(f"running {name} {math.exp(now):.4g} over {math.exp(middle):.4g}")
        self._num_high = self._num_high + 1 if high else 0
        if high and self._num_high == 1 and self.is_main:
            log.warning("step %d  %s; no checkpoint is saved while it stays so high", step, ", ".join(high))
        if self._num_high >= max(RECENT, self.rollback_after):
            # The median passed the line when half of the recent losses had.
            first = max(0, step + 1 - self._num_high - RECENT)
            self.rollback = first, f"{', '.join(high)} for {self._num_high} steps"

    def _write(self, step: int, faults: list[str], values: Mapping[str, float], samples) -> None:
        if not self.is_main:
            return
        log.warning("step %d is not taken: %s; its samples are in %s", step, "; ".join(faults), self.folder / FILE)
        line = {"step": step, "reasons": faults, "samples": list(samples())}
        line |= {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        try:
            with (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("cannot write it there: %s", error)


def _log(value: float) -> float:
    return math.log(max(value, 1e-30))


def _centre(window: Sequence[float]) -> tuple[float, float]:
    """Return the median and the robust standard deviation of logarithms."""
    middle = median(window)
    return middle, max(_FLOOR, _TO_SIGMA * median(abs(value - middle) for value in window))
