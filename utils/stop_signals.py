"""Orderly stops: a signal, a STOP file or the end of the time, agreed by all ranks at a step boundary."""

import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from utils import restart_notes
from utils.stop_note import leave_note

STOP_FILE = "STOP"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is Slurm's warning (--signal=USR1@120)
REASONS = (*(s.name for s in _SIGNALS), f"the file {STOP_FILE}", "--max_hours is over")
LAUNCHED_AT = "LAUNCHED_AT_MONOTONIC_S"  # set by utils.torchrun: a restart does not give the time anew
_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun's variable, in seconds
_LOOK_EVERY_S = 1.0  # for the STOP file, whose folder may be on a busy NFS
log = logging.getLogger("train")


class StopSignals:
    """What asks this rank to stop, and what all ranks have agreed on.

    SIGTERM, SIGINT and SIGUSR1 only take a note, however often they come: torchrun sends SIGTERM to all ranks again.
    Ranks agree without a collective of their own: each puts `flags()` behind the numbers that are summed over all ranks
    every step, and gives the sums to `agree`.
    reason: what has been agreed on, "" while the run goes on.  signalled_at: time.monotonic() of the first signal, 0
    before.
    """

    def __init__(self, folder: Path, max_hours: float = 0.0, is_main: bool = True):
        """Take over the signals; only in the main thread.

        folder: the run folder.  max_hours: wall-clock limit of this launch, time for a save included; 0 = none.
        Raises: ValueError for a negative limit.
        """
        if max_hours < 0:
            raise ValueError(f"--max_hours must not be negative, got {max_hours}")
        self.folder, self.is_main = Path(folder), is_main
        self.reason, self.signalled_at = "", 0.0
        self._received: set[str] = set()
        self._looked_at, self._has_stepped = 0.0, False
        launched_at = float(os.environ.get(LAUNCHED_AT) or time.monotonic())
        self._ends_at = launched_at + max_hours * 3600 if max_hours else float("inf")
        self._save_s = _last_save_s(self.folder)
        grace_s = float(os.environ.get(_GRACE) or 30)
        if is_main and self._save_s > grace_s:
            log.warning(
                "the last save took %.0f s, but torchrun kills the ranks %.0f s after SIGTERM: it would lose what came "
                "after the last save.  Set %s to more, or stop with %s or --max_hours",
                self._save_s, grace_s, _GRACE, self.folder / STOP_FILE,
            )  # fmt: skip
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._received.add(signal.Signals(number).name)
        self.signalled_at = self.signalled_at or time.monotonic()

    @property
    def kind(self) -> str:
        """`reason` as one of `utils.run_events.REASONS`."""
        first = self.reason.partition(", ")[0]
        return {f"the file {STOP_FILE}": "stop_file", "--max_hours is over": "time_limit"}.get(first, "signal")

    def flags(self) -> list[float]:
        """Return this rank's requests, one number a reason; to be summed over ranks and given to `agree`."""
        now = time.monotonic()
        if self.is_main and now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            if os.path.exists(self.folder / STOP_FILE):  # which takes a stale NFS for a file that is not there
                self._received.add(f"the file {STOP_FILE}")
        if now + 2 * self._save_s >= self._ends_at:
            self._received.add("--max_hours is over")
        return [float(reason in self._received) for reason in REASONS]

    def agree(self, sums: Sequence[float]) -> list[float]:
        """Take the sums of all ranks' flags off the end of `sums` and return the rest.

        If any rank asks to stop, `reason` says why from now on, on every rank alike.
        """
        rest, flags = sums[: -len(REASONS)], sums[-len(REASONS) :]
        if not self._has_stepped:
            self._has_stepped = True
            restart_notes.leave_note(restart_notes.FIRST_STEP)
        asked = [reason for reason, total in zip(REASONS, flags, strict=True) if total]
        if asked and not self.reason:
            self.reason = ", ".join(asked)
            if self.is_main:
                log.info("stopping after this step: %s", self.reason)
        return list(rest)

    def close(self) -> None:
        """Do what a stop leaves to do, once everything is saved."""
        # utils.torchrun repeats it, and Python would give it back its default, which kills, while the process ends.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if not self.reason:
            return
        if STOP_FILE not in self.reason:  # a person's wish, which a scheduler must not undo by starting again
            leave_note(self.reason)
        if self.is_main:
            try:  # the next start is not to be stopped by it
                (self.folder / STOP_FILE).unlink(missing_ok=True)
            except OSError as error:  # a folder of that name, or one that cannot be written
                log.warning("delete %s, or the next start stops at once: %s", self.folder / STOP_FILE, error)
            print(f"stopped: {self.reason}; the same command goes on", flush=True)

    def note_save(self, seconds: float) -> None:
        """Remember how long a save took, also for the next start."""
        self._save_s = seconds
        if self.is_main:
            beside = self.folder / ".last_save.json.tmp"
            try:
                beside.write_text(json.dumps({"seconds": round(seconds, 3)}) + "\n")
                beside.replace(self.folder / "last_save.json")
            except OSError as error:
                log.warning("cannot note how long a save takes: %s", error)


def _last_save_s(folder: Path) -> float:
    """Return the seconds that are noted; 0 without a note, or of one that a crash or a power cut has damaged."""
    try:
        seconds = float(json.loads((folder / "last_save.json").read_text())["seconds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0.0
    return seconds if 0 <= seconds < float("inf") else 0.0  # with an endless save no time would ever be left
