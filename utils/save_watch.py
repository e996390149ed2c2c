"""What becomes of a run's saves, which may go on in the background, for its monitor and its events."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from utils.monitor import Monitor
from utils.run_events import RunEvents


class Saver(Protocol):
    """What there is to see of `parallel.checkpoint_saver.CheckpointSaver`."""

    saved_step: int | None  # the newest published
    on_failure: Callable[[int], None] | None  # is called with the step of each save that fails
    last_save_s: float  # of saved_step, until it was published; 0 if it was there before
    last_copy_wait_s: float  # of saved_step: how long training waited for its copy after the call
    num_bytes: int  # of a checkpoint, over all ranks
    saving_since: float | None  # time.monotonic() of a save that goes on
    free_bytes: int | None  # room where the checkpoints lie; None where no limit is known


class SaveWatch:
    """Reports each save once: one that fails as it does, else when it is published, with what it took and kept waiting.

    events: None on ranks that write none.
    """

    def __init__(self, saver: Saver, monitor: Monitor, events: RunEvents | None):
        self._saver, self._monitor, self._events = saver, monitor, events
        self._step = saver.saved_step
        self._stalls: dict[int, float] = {}  # of saves that are not known to be published
        monitor.saving_since = lambda: saver.saving_since
        monitor.watch(self._room)
        saver.on_failure = self._failed  # at once: a last save that fails ends the run before another look

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """The block begins the save of `step`, or does it; training waits for the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._stalls[step] = time.perf_counter() - started
            self.look()

    def _room(self) -> dict[str, float]:
        free = self._saver.free_bytes
        return {} if free is None else {"trainer_checkpoint_disk_free_bytes": free}

    def _failed(self, step: int) -> None:
        """Report that the save of `step` failed; from the thread of the save."""
        self._monitor.checkpoint_failed()
        if self._events is not None:
            self._events.add("checkpoint_failed", step)

    def look(self) -> None:
        """Report what has happened since the last look; cheap."""
        saver = self._saver
        step = saver.saved_step
        if step == self._step or step is None:
            return
        self._step = step
        stall_s = self._stalls.pop(step, 0.0) + saver.last_copy_wait_s
        duration_s, num_bytes = saver.last_save_s, saver.num_bytes
        self._stalls = {other: stall for other, stall in self._stalls.items() if other > step}
        if not duration_s:  # it was there before, of an earlier start, and is whole: no save to tell of
            self._monitor.checkpoint_found()
            return
        self._monitor.checkpoint(stall_s, duration_s, num_bytes)
        if self._events is not None:
            times = {"stall_s": round(stall_s, 4), "duration_s": round(duration_s, 4)}
            self._events.add("checkpoint", step, **times, num_bytes=num_bytes)
