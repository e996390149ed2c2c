"""Restarts without end: counted in the run folder, and ended when they bring nothing."""

import json
import logging
import os
from pathlib import Path

from parallel.distributed import is_main, on_main
from utils.exit_codes import NO_PROGRESS, Stopped
from utils.restart_notes import PROGRESS, leave_note

MAX_RESTARTS = 3  # in a row, without a newer checkpoint
FILE = "restarts.json"
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
log = logging.getLogger("train")


def count_restart(folder: Path, start_step: int) -> None:
    """Count this start if nobody asked for it; every rank takes part.

    start_step: of the checkpoint it goes on from.  A start is a restart if torchrun or Slurm says so; one by hand
    begins a new count, whatever failed before.
    Raises: Stopped, on every rank, if this is restart number MAX_RESTARTS + 1 in a row without a newer checkpoint.
    """
    path = Path(folder) / FILE
    is_restart = any(int(os.environ.get(name) or 0) for name in _RESTART_COUNTS)

    def count() -> int:
        before = _read(path) if is_restart else {}
        number = before["count"] + 1 if start_step <= before.get("step", -1) else 0
        if number <= MAX_RESTARTS:
            try:
                _write(path, {"step": start_step, "count": number})
            except OSError as error:  # a full disk is no reason not to go on
                log.warning("this start is not counted, %s cannot be written: %s", path, error)
        return number

    number = on_main(count)
    if number > MAX_RESTARTS:
        raise Stopped(
            NO_PROGRESS,
            f"restarted {MAX_RESTARTS} times from step {start_step} without reaching a newer checkpoint; look for the "
            f"cause in {folder}/train.log and {folder}/hangs.  The same command, started by hand, tries again",
        )
    if is_restart and number and is_main():
        log.warning("restart %d of %d from step %d", number, MAX_RESTARTS, start_step)
    if is_restart and not number:
        leave_note(PROGRESS)


def forget_restarts(folder: Path) -> None:
    """Begin a new count, for a start that will not do the same as the last one; on rank 0."""
    _write(Path(folder) / FILE, {"step": -1, "count": 0})


def _read(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"step": int(found["step"]), "count": int(found["count"])}
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return {}


def _write(path: Path, content: dict) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(content) + "\n", encoding="utf-8")
    beside.replace(path)
