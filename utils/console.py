"""Where messages go: stderr, above the progress bar, and train.log."""

import contextlib
import logging
import sys
from pathlib import Path

from tqdm import tqdm

_handlers: list[logging.Handler] = []  # ours, on the root logger
# log.warning(…, extra=ONCE): what all ranks find alike, so that rank 0 alone says it.
ONCE = {"once": True}


class _Console(logging.Handler):
    """Writes to stderr, above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "file_only", False):
            level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
            tqdm.write(level + self.format(record), file=sys.stderr)


class _File(logging.FileHandler):
    """Writes to train.log; what cannot be written there is said once, not with a traceback each time."""

    is_told = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # while it is opened, by its first message
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_told:
            self.is_told = True
            tqdm.write(f"warning: {self.baseFilename} cannot be written: {error}", file=sys.stderr)


def set_up_logging(folder: Path, is_main: bool, rank: int = 0) -> None:
    """Send our messages, and warnings of libraries, to stderr and train.log; of other ranks than 0 only warnings.

    May be called again, and before there is a `RunLog`.
    Raises: ValueError if the folder cannot be made.
    """
    remove_handlers()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--run_folder {folder} cannot be made: {error}") from error
    prefix = "" if is_main else f"[rank {rank}] "
    console, file = _Console(), _File(folder / "train.log", encoding="utf-8", delay=True)
    console.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s"))
    for handler in (console, file):
        if not is_main:
            handler.addFilter(lambda record: not getattr(record, "once", False))
        handler.setLevel(logging.INFO if is_main else logging.WARNING)
        logging.getLogger().addHandler(handler)
        _handlers.append(handler)
    logging.getLogger("train").setLevel(logging.INFO)


def remove_handlers() -> None:
    """Undo what `set_up_logging` did."""
    while _handlers:
        handler = _handlers.pop()
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # of a full disk, which it has said
            handler.close()
