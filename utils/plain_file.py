"""Files that somebody else has written: read without waiting for a FIFO, and without a line that fills the memory."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BOM = b"\xef\xbb\xbf"  # which some editors put before UTF-8


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises: OSError if it cannot be read, or is a folder, or a FIFO or a device, whose reader could wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, most_bytes: int) -> str:
    """Return the beginning of a file, at most so many bytes of it.  Raises: OSError, as `open_plain`."""
    with open_plain(path) as file:
        return file.read(most_bytes).removeprefix(_BOM).decode("utf-8", errors="replace")


def read_lines(path: Path, most_bytes: int) -> Iterator[bytes | None]:
    """Yield each line without its end, None for one of more than so many bytes.  Raises: OSError, as `open_plain`."""
    with open_plain(path) as file:
        is_first, is_rest = True, False
        while part := file.readline(most_bytes):
            ends = part.endswith(b"\n")
            if not is_rest:
                whole = ends or len(part) < most_bytes
                yield part.removeprefix(_BOM if is_first else b"").rstrip(b"\r\n") if whole else None
            is_first, is_rest = False, not ends
