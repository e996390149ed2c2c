"""Whose checkpoints a folder holds: two runs must not share one, and of one run only its newest start may save.

A run's id lies in its run folder (run_id) and, with a mark of the newest start, beside its checkpoints (owner.json).
No clock is asked who is alive: a start of the same run takes over, as a restart must, and an earlier one that is still
there finds another's mark at its next save, and ends.
"""

import contextlib
import json
import logging
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from parallel.checked_writer import read_file
from parallel.checkpoint_storage import Storage
from parallel.distributed import on_main
from utils.exit_codes import USER_ERROR, Stopped

OWNER = "owner.json"
RUN_ID = "run_id"
log = logging.getLogger("train")


@dataclass(frozen=True)
class Owner:
    """A run, by its id, and one start of it, by its mark."""

    run: str
    run_folder: str  # absolute, on `host`
    start: str
    host: str

    def superseded(self, storage: Storage) -> str | None:
        """Return why this start may not save any more, or None."""
        try:
            other = _read(storage)
        except OSError:  # the save will hardly succeed either, and counts its failures
            return None
        if other is None or other.start == self.start:
            return None
        return f"{storage.folder} has been taken over by a later start, on {other.host} ({other.run_folder})"


def claim(storage: Storage, run_folder: Path | str) -> Owner | None:
    """Make the checkpoints this start's; every rank takes part.

    They are the same run's if its folder holds their run's id or, where it holds none, as on a new host, if it has the
    same path.
    Returns None, with a warning, if the folder cannot be written now.
    Raises: ValueError, on every rank, if they are another run's, or it cannot be read whose they are.
    """
    try:
        owner, problem = on_main(lambda: _claim(storage, Path(run_folder).absolute()))
    except OSError as error:
        raise ValueError(f"{storage.folder} cannot be used for checkpoints: {error}") from error
    if problem:
        raise ValueError(problem)
    return owner


def stop_if_superseded(storage: Storage, owner: Owner) -> None:
    """Raise Stopped, on every rank, if another start has claimed the checkpoints since."""
    if problem := on_main(lambda: owner.superseded(storage)):
        raise Stopped(USER_ERROR, f"{problem}; this one saves no more.  Only one start of a run may go on at a time")


def _claim(storage: Storage, run_folder: Path) -> tuple[Owner | None, str | None]:
    file, before = run_folder / RUN_ID, _read(storage)
    own = file.read_text(encoding="utf-8").strip() or None if file.exists() else None  # a crash may leave it empty
    if before is not None and before.run != own and not (own is None and before.run_folder == str(run_folder)):
        return None, (
            f"{storage.folder} holds the checkpoints of another run, {before.run_folder} on {before.host}: give this "
            f"one, {run_folder}, a --checkpoint_folder of its own (--init_from {storage.folder} begins with those "
            f"weights).  If it is the same run, moved, and no start of it goes on, delete {storage.path(OWNER)}"
        )
    run = own or (before.run if before is not None else secrets.token_hex(8))
    if own is None:
        run_folder.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{RUN_ID}.tmp")
        beside.write_text(run + "\n", encoding="utf-8")
        beside.replace(file)
    owner = Owner(run, str(run_folder), secrets.token_hex(8), socket.gethostname())
    try:
        storage.replace(OWNER, json.dumps(vars(owner)).encode())
    except OSError as error:  # a full disk may get room at the next save
        log.warning("another run in %s will not be noticed: %s cannot be written: %s", storage.folder, OWNER, error)
        return None, None
    return owner, None


def _read(storage: Storage) -> Owner | None:
    """Return who has the folder; None if nobody has, or what is there says nothing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return Owner(**json.loads(read_file(storage, "", OWNER)))
    return None
