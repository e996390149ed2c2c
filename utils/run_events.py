"""What became of a run over all of its starts: `events.jsonl`, and `last_step.json`, which says how far it came.

Unlike metrics.jsonl, from which a resume takes the steps that are done again, nothing is ever taken out of
events.jsonl.  Each line is an object with `time` (seconds since 1970), `event`, `step`, and what belongs to the event:

start        reason (REASONS, or "first"), lost_steps (done before, to be done again), down_s (since the last step)
stop         reason
goodput      seconds of this start by state, so far: the last line of a start counts
checkpoint   stall_s, duration_s, num_bytes
checkpoint_failed, verify_failed, skipped_step (reason), rollback …: as whoever saw them reports them

Neither file is worth a run: what cannot be written is named in one warning.
"""

import json
import logging
import os
import time
from pathlib import Path

from utils.json_lines import JsonLines, is_step

# Why a run starts again.  What the last start did not say is a crash.
REASONS = ("crash", "signal", "time_limit", "stop_file", "hang", "non_finite", "rollback", "finished", "other")
_HEARTBEAT_S = 1.0
_LAST_TIME = 2**33  # in the year 2242: what claims to be later is damaged, and may be no date at all
_WIDTH = 64  # bytes of last_step.json: rewritten in place, which needs no new block of a full disk
log = logging.getLogger("train")


class RunEvents:
    """The two files of one run folder.  Any rank may add events; rank 0 alone says how far the run came."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._file: int | None = None
        self._written = 0.0
        self._warned = False

    def add(self, event: str, step: int, **fields: float | str) -> None:
        """Append one event; ranks may do so at once."""
        line = {"time": round(time.time(), 3), "event": event, "step": step} | fields
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self.folder / "events.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(file).st_size
                torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # by a crash or a full disk
                text = "\n" * torn + json.dumps(line, ensure_ascii=False) + "\n"
                os.write(file, text.encode())  # in one write: lines stay whole
            finally:
                os.close(file)
        except OSError as error:
            self._warn(error)

    def read(self) -> list[dict]:
        """Return all events so far; a line that a crash or a full disk cut off is left out."""
        return read_events(self.folder)

    def mark(self, step: int) -> None:
        """Note that `step` steps are done, at most once a second."""
        now = time.monotonic()
        if now - self._written < _HEARTBEAT_S and self._file is not None:
            return
        self._written = now
        self.mark_now(step)

    def mark_now(self, step: int) -> None:
        """Note that `step` steps are done."""
        try:
            if self._file is None:
                self._file = os.open(self.folder / "last_step.json", os.O_WRONLY | os.O_CREAT, 0o644)
            text = json.dumps({"step": step, "time": round(time.time(), 3)})
            os.pwrite(self._file, text.ljust(_WIDTH - 1).encode() + b"\n", 0)
        except OSError as error:
            self._warn(error)

    def last_step(self) -> tuple[int, float] | None:
        """Return how many steps were done and when the last of them was, or None before the first."""
        try:
            found = json.loads((self.folder / "last_step.json").read_text(encoding="utf-8"))
            return int(found["step"]), float(found["time"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("what becomes of the run cannot be noted in %s: %s; training goes on", self.folder, error)


def read_events(folder: Path) -> list[dict]:
    """Return the events of a run folder in their order, without lines that are damaged."""
    return valid_events(JsonLines(Path(folder) / "events.jsonl"))


def valid_events(lines: JsonLines) -> list[dict]:
    """Return those objects that are events, the others are counted with the damaged lines."""
    events = []
    for event in lines:
        name, when, step = (event.get(key) for key in ("event", "time", "step"))
        if isinstance(name, str) and type(when) in (int, float) and 0 <= when < _LAST_TIME and is_step(step):
            events.append(event)
        else:
            lines.num_damaged += 1
    return events


def restart_reason(events: list[dict]) -> str | None:
    """Return why a run with these events starts again, one of REASONS, or None if this is its first start."""
    ends = [event for event in events if event["event"] in ("start", "stop")]
    if not ends:
        return None
    reason = ends[-1].get("reason", "other") if ends[-1]["event"] == "stop" else "crash"
    return reason if reason in REASONS else "other"
