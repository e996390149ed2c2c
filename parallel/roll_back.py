"""Going back: to the last checkpoint before training went wrong, and on without the data after which it did.

A roll-back is a decision, written to <run>/rollbacks.json, and a restart: the same command goes on from an older
checkpoint, and leaves the stretch of data out, on any number of ranks and in every later start.  Checkpoints of what is
taken back are deleted, once an older one has been verified to its last byte, and before the decision is written: who
dies between the two goes back again, where a later checkpoint would be gone on from, without data it has not seen.
Source: as the PaLM report, arXiv 2204.02311, section 5.1, did by hand: data before the first bad step goes as well.
"""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from parallel.checkpoint_retention import problem, step_name, steps
from parallel.checkpoint_storage import open_storage
from parallel.distributed import on_main
from parallel.restarts import forget_restarts
from utils.exit_codes import DIVERGED, ROLLED_BACK, Stopped
from utils.restart_notes import PROGRESS, leave_note
from utils.run_events import RunEvents

FILE = "rollbacks.json"
log = logging.getLogger("train")


def skipped_stretches(folder: Path) -> list[tuple[int, int]]:
    """Return (first, count) of the order's global batches that this run's roll-backs leave out; every rank takes part.

    Rank 0 reads: where others had another folder, or an older view of it, they would train on other data.
    Raises: ValueError, on every rank, if that is not to be read.
    """
    path = Path(folder) / FILE
    try:
        return on_main(lambda: [(entry["first_batch"], entry["num_batches"]) for entry in _entries(path)])
    except OSError as error:
        raise ValueError(
            f"{path} says which data this run leaves out, and cannot be read ({error}): mend it, or delete it to train "
            "on all data"
        ) from error


def roll_back(
    folder: Path,
    checkpoints: Path | str,
    step: int,
    bad_since: int,
    reason: str,
    position: Callable[[int], int],
    margin: int,
    max_rollbacks: int,
) -> NoReturn:
    """Decide to go back, record it and end this process; every rank takes part.

    step: the step that has just been judged, the last of the stretch.  bad_since: the first that was bad.
    position: returns which global batch of the order a step has.  margin: steps before `bad_since` whose data goes too,
    but none that the checkpoint has seen.
    Raises: Stopped with ROLLED_BACK, or with DIVERGED and nothing recorded after `max_rollbacks` of them; OSError, on
    every rank and with nothing recorded, if there are checkpoints and none can be read, or one cannot be deleted.
    """
    path = Path(folder) / FILE

    def decide() -> tuple[int, str]:
        entries = _entries(path)
        if len(entries) >= max_rollbacks:
            return DIVERGED, (
                f"step {step}: {reason}; after {len(entries)} roll-backs (--max_rollbacks) this run gives up.  See "
                f"{folder}/bad_steps.jsonl and {path}; lower --lr, or clean the data, for a new run"
            )
        target = _target(checkpoints, bad_since)
        _withdraw(checkpoints, target)
        first = max(target, bad_since - margin)
        stretch = {"first_batch": position(first), "num_batches": position(step) + 1 - position(first)}
        entry = {"step": step, "bad_since": bad_since, "reason": reason, "resume_from": target} | stretch
        beside = path.with_name(f".{FILE}.tmp")
        with beside.open("w", encoding="utf-8") as file:
            file.write(json.dumps([*entries, entry], indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        forget_restarts(folder)
        RunEvents(folder).add("stop", step, reason="rollback")
        return ROLLED_BACK, (
            f"step {step}: {reason}; back to step {target}, then on without the data of steps {first} to {step} "
            f"(roll-back {len(entries) + 1} of {max_rollbacks}, {path}).  If nothing restarts, give the same command"
        )

    code, message = on_main(decide)
    if code == ROLLED_BACK:
        leave_note(PROGRESS)
    raise Stopped(code, message)


def _target(checkpoints: Path | str, bad_since: int) -> int:
    """Return the newest step up to `bad_since` with a valid checkpoint, else the oldest after it; 0 if there is none.

    Raises: OSError if there are some and none is valid: a store that does not answer is no reason to delete them.
    """
    storage = open_storage(checkpoints)
    there = steps(storage)  # newest first
    for step in [*(s for s in there if s <= bad_since), *(s for s in reversed(there) if s > bad_since)]:
        if (found := problem(storage, step)) is None:
            return step
    if there:
        raise OSError(f"no checkpoint in {storage.folder} can be gone back to; that of step {step}: {found}")
    return 0


def _withdraw(checkpoints: Path | str, target: int) -> None:
    """Delete the checkpoints after `target`: they belong to what is taken back, and would be taken for the newest."""
    storage = open_storage(checkpoints)
    for step in steps(storage):
        if step > target:
            log.warning("deleting the checkpoint of step %d: it is taken back", step)
            storage.delete(step_name(step))


def _entries(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
