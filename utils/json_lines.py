"""Files of one JSON object a line, as runs write them, read back after whatever has happened to them."""

import json
from collections.abc import Iterator
from pathlib import Path

from utils.plain_file import read_lines

_MOST_BYTES = 2**22  # of a line; ours have some thousand


class JsonLines:
    """The objects of a file, in order; a line that holds none is passed over.

    Once it has been read through: num_damaged, how many lines were passed over, to which a reader adds the objects that
    make no sense to it; problem, why the file could not be read, "" if it could or is not there.
    """

    def __init__(self, path: Path):
        self.path, self.num_damaged, self.problem = Path(path), 0, ""

    def __iter__(self) -> Iterator[dict]:
        self.num_damaged, self.problem = 0, ""
        try:
            for line in read_lines(self.path, _MOST_BYTES):
                found = _object(line)
                if found is not None:
                    yield found
                elif line is None or line.strip():
                    self.num_damaged += 1
        except FileNotFoundError:
            return
        except OSError as error:
            self.problem = error.strerror or str(error)


def is_step(value: object) -> bool:
    """Return whether a value out of such a file can be the number of a step."""
    return type(value) is int and 0 <= value < 2**53


def _object(line: bytes | None) -> dict | None:
    try:
        found = json.loads((line or b"").decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
