"""What keeps a run from being lost, put together for the training scripts: each part is a noun of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from parallel.checkpoint_saver import CheckpointSaver
from parallel.distributed import is_main
from parallel.restarts import count_restart
from parallel.roll_back import roll_back
from parallel.watchdog import Watchdog
from utils.bad_steps import BadSteps
from utils.exit_codes import UNSAVED, Stopped
from utils.phase_timer import PhaseTimer
from utils.run_options import RunOptions
from utils.stop_signals import StopSignals


class RunGuard:
    """Counts this start, takes over the signals and watches for hangs, until `close`; every rank takes part.

    stop: who asks to stop, and what has been agreed.  bad_steps: the steps that were not taken.
    """

    def __init__(
        self, folder: Path, saver: CheckpointSaver, options: RunOptions, timer: PhaseTimer, start_step: int,
        state: Mapping | None,
    ):  # fmt: skip
        """folder: of the run.  saver: of its checkpoints.  state: of that of `start_step`, None without one.

        Raises: ValueError for options that make no sense; Stopped if this is one restart too many.
        """
        self._folder, self._saver, self._options, self._timer = folder, saver, options, timer
        count_restart(folder, start_step)
        self.stop = StopSignals(folder, options.max_hours, is_main())
        self.bad_steps = BadSteps(folder, options.spike_deviations, options.rollback_after, is_main())
        self.bad_steps.load_state((state or {}).get("bad_steps"))
        self._watchdog = Watchdog(folder, timer, options.hang_s, self.stop)

    def saves(self, step: int, last: int) -> bool:
        """Return whether a checkpoint is due before `step`; last: the step at which the run ends."""
        due = step == last or self.stop.reason or (step % self._options.save_every == 0 and self.bad_steps.is_calm)
        return bool(step and due)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict) -> None:
        """Save the checkpoint before `step` with all that a resumed run needs; see `CheckpointSaver.save`.

        Raises: Stopped, on every rank, after too many failed saves.
        """
        with self._saving():
            self._saver.save(step, tensors, {"step": step, "bad_steps": self.bad_steps.state()} | state)

    def takes(
        self, step: int, losses: Mapping[str, float], norms: Mapping[str, float],
        samples: Callable[[int], Sequence[str]], position: Callable[[int], int],
    ) -> bool:  # fmt: skip
        """Return whether the step may be taken, the same on every rank; see `BadSteps.judge`.

        samples: returns the keys of a step's samples.  position: returns which global batch of the order a step has.
        Raises: Stopped when the run goes back, or has done so too often.
        """
        takes = self.bad_steps.judge(step, losses, norms, lambda: samples(step))
        if self.bad_steps.rollback:
            with self._saving():
                self._saver.wait()
            checkpoints = self._saver.storage.folder
            margin, most = self._options.rollback_after, self._options.max_rollbacks
            roll_back(self._folder, checkpoints, step, *self.bad_steps.rollback, position, margin, most)
        return takes

    def close(self) -> None:
        """Wait for the last save, end the watch, and do what a stop leaves to do.

        Raises: Stopped, on every rank, if the last save failed.
        """
        with self._saving():
            self._saver.close()
        self._watchdog.close()
        self.stop.close()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            with self._timer.phase("checkpoint"):
                yield
        except ValueError as error:  # no user's error: a full disk or a lost store may be back at the next start
            raise Stopped(UNSAVED, str(error)) from error
        if self._saver.last_save_s:
            self.stop.note_save(self._saver.last_save_s)
