"""A file of named columns: written whole or not at all, mapped rather than read, checked before it is believed.

    8 bytes   mark
    8 bytes   size of the header, little-endian
    32 bytes  SHA-256 of the header
    header    JSON: size of the file, SHA-256 of the columns, {name: [dtype, offset, count]}, and what the writer adds
    columns   each from a multiple of 8 bytes on

Integers are kept in the narrowest type that holds them.  Texts are one column of UTF-8 bytes and one of their ends.
"""

import hashlib
import json
import mmap
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_MARK = b"columns1"
_FIXED = 48  # bytes before the header
_ALIGNMENT = 8
_WIDTHS = (np.uint8, np.uint16, np.uint32, np.uint64)


class ColumnFile:
    """Columns of an open file, by name, and `notes`, what their writer added."""

    def __init__(self, columns: dict[str, np.ndarray], notes: dict):
        self.columns, self.notes = columns, notes

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def text(self, name: str, row: int) -> str:
        """Return a row of a column of texts."""
        return str(self.columns[name][slice(*span(self.columns[f"{name}_end"], row))].data, "utf-8")


def span(ends: np.ndarray, row: int) -> tuple[int, int]:
    """Return where a row of a column of rows of any length starts and ends."""
    return (int(ends[row - 1]) if row else 0), int(ends[row])


def narrow(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return integers that are not negative in the narrowest type that holds them all."""
    values = np.asarray(values, np.uint64)
    most = int(values.max(initial=0))
    return values.astype(next(width for width in _WIDTHS if most <= np.iinfo(width).max))


def texts(name: str, values: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the two columns of a column of texts."""
    encoded = [value.encode() for value in values]
    ends = np.cumsum([len(value) for value in encoded], dtype=np.uint64)
    return {name: np.frombuffer(b"".join(encoded), np.uint8), f"{name}_end": narrow(ends)}


def hash_columns(columns: Mapping[str, np.ndarray]) -> str:
    """Return a SHA-256 of names, types and contents."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        digest.update(f"{name} {columns[name].dtype.str} {columns[name].size}\0".encode() + columns[name].tobytes())
    return digest.hexdigest()


def write_columns(path: Path, columns: Mapping[str, np.ndarray], notes: dict) -> None:
    """Write columns under a name, beside it first; several processes may write the same.

    Raises: OSError.
    """
    layout, pieces, offset = {}, [], 0
    for name, column in columns.items():
        padding = bytes(-column.nbytes % _ALIGNMENT)
        layout[name] = [column.dtype.str, offset, column.size]
        pieces += [column.tobytes(), padding]
        offset += column.nbytes + len(padding)
    data = b"".join(pieces)
    header = {"data_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "columns": layout, "notes": notes}
    encoded = json.dumps(header, ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    fixed = _MARK + len(encoded).to_bytes(8, "little") + hashlib.sha256(encoded).digest()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{uuid.uuid4().hex}.tmp")  # the folder may be shared by several machines
    try:
        aside.write_bytes(fixed + encoded + data)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def read_notes(path: Path) -> dict | None:
    """Return what the writer of a file added, or None if there is no whole file; its columns are not looked at."""
    try:
        with open(path, "rb") as file:
            header = _read_header(file)
    except OSError:
        return None
    return header and header["notes"]


def map_columns(path: Path, verify: bool = True) -> ColumnFile | None:
    """Map a file, or return None if there is none or it is damaged.

    verify: compare the columns' checksum, which reads them all; the size and the header are always checked.
    """
    try:
        with open(path, "rb") as file:
            header = _read_header(file)
            if header is None:
                return None
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError:
        return None
    data = mapped[len(mapped) - header["data_bytes"] :]
    if verify and hashlib.sha256(data).hexdigest() != header["sha256"]:
        return None
    columns = {
        name: np.frombuffer(data, dtype, count, offset) if count else np.empty(0, dtype)
        for name, (dtype, offset, count) in header["columns"].items()
    }
    return ColumnFile(columns, header["notes"])


def _read_header(file) -> dict | None:
    """Return the header of an open file, or None if it or the file's size is not what it should be."""
    fixed, size = file.read(_FIXED), os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(fixed[8:16], "little")
    if fixed[:8] != _MARK or _FIXED + header_bytes > size:
        return None
    encoded = file.read(header_bytes)
    if hashlib.sha256(encoded).digest() != fixed[16:]:
        return None
    header = json.loads(encoded)
    return header if size == _FIXED + header_bytes + header["data_bytes"] else None
