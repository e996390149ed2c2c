"""The commit record of a checkpoint: which files belong to it, with their sizes and checksums, and the run's state.

It is JSON that holds its own checksum, and is read only if it is, byte for byte, what would be written for its content:
no flipped bit goes unseen, not even one in white space.
"""

import json
import os
from pathlib import Path

from utils.checksum import crc32

RECORD = "commit.json"
FORMAT = 2
READABLE = (1, 2)  # 1: files and table of contents as torch.distributed.checkpoint writes them


def render_record(content: dict) -> bytes:
    """Return the bytes of a record.

    content: JSON-able; "files" holds name → {"size": bytes, "crc32": checksum} of every file of the checkpoint.
    """
    return _render(json.loads(json.dumps({"format": FORMAT} | content)))  # as it will be read: keys become strings


def parse_record(data: bytes) -> dict:
    """Return a record's content.

    Raises: ValueError if it is damaged, or of another format.
    """
    try:
        record = json.loads(data)
        own = record.pop("crc32")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its commit record cannot be read ({error!r})") from error
    if own != _own_crc32(record) or _render(record) != data:
        raise ValueError("its commit record does not match its own checksum")
    if record["format"] not in READABLE:
        raise ValueError(f"it has format {record['format']}, this program reads {READABLE}")
    return record


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _render(content: dict) -> bytes:
    return json.dumps(content | {"crc32": _own_crc32(content)}, indent=1).encode()


def _own_crc32(content: dict) -> int:
    return crc32(json.dumps(content, sort_keys=True).encode())
