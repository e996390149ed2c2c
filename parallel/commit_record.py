"""The commit record of a checkpoint folder: which files belong to it, with their sizes and checksums."""

import json
import os
from pathlib import Path

from utils.checksum import crc32

RECORD = "commit.json"
FORMAT = 1


def write_record(path: Path, content: dict) -> None:
    """Complete a folder with its record and make both durable.

    content: JSON-able; "files" holds name → {"size": bytes, "crc32": checksum} of every file in the folder.
    """
    content = json.loads(json.dumps({"format": FORMAT} | content))  # as it will be read: keys become strings
    with (path / RECORD).open("w") as file:
        json.dump(content | {"crc32": _own_crc32(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path)


def read_record(path: Path) -> dict:
    """Return a checkpoint's commit record.

    Raises: OSError or ValueError if it is missing, damaged, or of another format.
    """
    try:
        record = json.loads((path / RECORD).read_text())
        own = record.pop("crc32")
    except FileNotFoundError:
        raise FileNotFoundError("it has no commit record") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its commit record cannot be read ({error!r})") from error
    if own != _own_crc32(record):
        raise ValueError("its commit record does not match its own checksum")
    if record["format"] != FORMAT:
        raise ValueError(f"it has format {record['format']}, this program reads {FORMAT}")
    return record


def damage(path: Path, files: dict[str, dict[str, int]], share: slice) -> str | None:
    """Return how a folder differs from a list of files, or None.

    share: which files, sorted by name, are read through; of the others only the size is compared.
    """
    names = sorted(files)
    found = {entry.name for entry in path.iterdir()} - {RECORD}
    if found != files.keys():
        return f"its files are not those of its record: {sorted(found ^ files.keys())[:3]}"
    for name in names:
        if (size := (path / name).stat().st_size) != files[name]["size"]:
            return f"{name} has {size} of {files[name]['size']} bytes"
    for name in names[share]:
        if _crc32(path / name) != files[name]["crc32"]:
            return f"{name} does not match its checksum"
    return None


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = crc32(block, value)
    return value


def _own_crc32(record: dict) -> int:
    return crc32(json.dumps(record, sort_keys=True).encode())
