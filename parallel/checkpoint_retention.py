"""Which checkpoints a run keeps, and room for the next one; for one process, that of rank 0."""

import contextlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.checked_writer import damage, read_file
from parallel.checkpoint_storage import Storage
from parallel.commit_record import RECORD, parse_record

log = logging.getLogger("train")
_verified: set[tuple[str, int]] = set()  # (folder, step) of which this process knows that every byte was right


@dataclass(frozen=True)
class Retention:
    """What stays: the newest `keep_last`, every step that `keep_every` divides (0 = none), and the `keep_best` with the
    lowest validation loss."""

    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0


def step_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def steps(storage: Storage) -> list[int]:
    """Return the steps that have a folder, newest first; folders that only look alike (step-5) are not ours."""
    numbers = [(n, int(n[5:])) for n in storage.names() if n.startswith("step-") and n[5:].isdecimal()]
    return sorted((step for name, step in numbers if name == step_name(step)), reverse=True)


def record_of(storage: Storage, step: int) -> dict:
    """Return the commit record of a step.

    Raises: OSError or ValueError if it is missing, damaged, or another step's.
    """
    try:
        record = parse_record(read_file(storage, step_name(step), RECORD))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError("it has no commit record") from None
    if record["step"] != step:
        raise ValueError(f"its commit record is that of step {record['step']}")
    return record


def problem(storage: Storage, step: int, share: slice = slice(None)) -> str | None:
    """Return what is wrong with a checkpoint, or None; only the files of `share`, sorted by name, are read through."""
    try:
        return damage(storage, step_name(step), record_of(storage, step)["files"], share)
    except (OSError, ValueError) as error:
        return str(error)


def stored_losses(storage: Storage) -> dict[int, float]:
    """Return step → validation loss as the newest readable record has them; empty if none has any."""
    for step in steps(storage):
        with contextlib.suppress(OSError, ValueError):
            return {int(of_step): loss for of_step, loss in record_of(storage, step).get("losses", {}).items()}
    return {}


def note_verified(storage: Storage, step: int) -> None:
    """Remember that every byte of a checkpoint was right."""
    _verified.add((str(storage.folder), step))


def is_verified(storage: Storage, step: int) -> bool:
    """Return whether a checkpoint is whole; every byte is read once by each process, later only the sizes count."""
    known = (str(storage.folder), step) in _verified
    found = problem(storage, step, slice(0) if known else slice(None))
    if found is None:
        note_verified(storage, step)
    elif known:
        _verified.discard((str(storage.folder), step))
    return found is None


def prune(storage: Storage, retention: Retention, losses: Mapping[int, float]) -> None:
    """Delete what newer, verified checkpoints make unnecessary, and what interrupted saves left behind.

    losses: step → validation loss.  Whatever is newer than the newest `keep_last` sound checkpoints is left alone, also
    if it is damaged: a person may want to look at it.  What cannot be deleted is named in a warning.
    """
    for name in [*storage.leftovers(), *(step_name(s) for s in unneeded(storage, retention, losses))]:
        _delete(storage, name)


def unneeded(storage: Storage, retention: Retention, losses: Mapping[int, float], num_coming: int = 0) -> list[int]:
    """Return the steps that can be deleted, oldest first.

    num_coming: so many newer ones are about to be there.  The newest verified one is never among the steps.
    """
    found, last = steps(storage), []
    for step in found:
        if len(last) < max(1, retention.keep_last - num_coming) and is_verified(storage, step):
            last.append(step)
    oldest = min(last, default=0)
    ranked = sorted((loss, step) for step, loss in losses.items() if step in found and math.isfinite(loss))
    best = []
    for _, step in ranked:
        if len(best) < retention.keep_best and is_verified(storage, step):
            best.append(step)
    for_ever = {step for step in found if retention.keep_every > 0 and step % retention.keep_every == 0}
    return sorted(step for step in found if step < oldest and step not in {*best, *for_ever})


def make_room(
    storage: Storage, retention: Retention, losses: Mapping[int, float], num_bytes: int, num_files: int
) -> None:
    """Before a save of so many bytes: where they would not fit, delete what the new checkpoint would replace anyway.

    Leftovers go first, then the oldest, never the newest valid one.  Says so in a warning, also if it is not enough.
    """
    if _fits(storage, num_bytes, num_files):
        return
    room = _room(storage)
    names = [*storage.leftovers(), *(step_name(s) for s in unneeded(storage, retention, losses, num_coming=1))]
    deleted = []
    for name in names:
        deleted.append(name)
        _delete(storage, name)
        if _fits(storage, num_bytes, num_files):
            break
    log.warning(
        "%s has room for %s; the next checkpoint needs %.3f GiB in %d files.  Deleted for it: %s.%s",
        storage.folder, room, num_bytes / 2**30, num_files, ", ".join(deleted) or "nothing, all are needed",
        "" if _fits(storage, num_bytes, num_files) else f"  That leaves {_room(storage)}: the save will probably fail",
    )  # fmt: skip


def _fits(storage: Storage, num_bytes: int, num_files: int) -> bool:
    free_bytes, free_files = storage.room()
    return free_bytes > num_bytes + 2**20 and free_files > num_files + 2


def _room(storage: Storage) -> str:
    free_bytes, free_files = storage.room()
    return f"{free_bytes / 2**30:.3f} GiB in {free_files} files"


def _delete(storage: Storage, name: str) -> None:
    try:
        storage.delete(name)
    except OSError as error:
        log.warning("could not delete %s: %s", storage.path(name), error)
