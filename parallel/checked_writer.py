"""Writing a checkpoint's files with their checksums, and reading them back; imports no torch, which a writer of its own
process would wait for."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from parallel.checkpoint_storage import Storage
from parallel.commit_record import RECORD
from utils.checksum import crc32, crc32_combine

_BLOCK = 2**18  # bytes that are checksummed, and written or read, while the core's cache has them
_READ_THREADS = 4


def write_file(storage: Storage, name: str, file: str, pieces: Iterable[memoryview]) -> dict:
    """Write a file from pieces, durably.

    Returns {"size": bytes, "crc32": of the whole file, "pieces": [crc32 of each]}, of what was to be written.
    Raises: OSError if it cannot be written.
    """
    entry = {"size": 0, "crc32": 0, "pieces": []}

    def blocks():
        for piece in pieces:
            own = 0
            for start in range(0, len(piece), _BLOCK):
                yield (block := piece[start : start + _BLOCK])
                own = crc32(block, own)  # after it was written: writing has brought it into the core's cache
            entry["pieces"].append(own)
            entry["crc32"] = crc32_combine(entry["crc32"], own, len(piece))
            entry["size"] += len(piece)

    storage.write(name, file, blocks())
    return entry


def damage(
    storage: Storage, name: str, files: dict[str, dict], share: slice, only: Iterable[str] | None = None
) -> str | None:
    """Return how a folder differs from a list of files, or None.

    files: file name → {"size": …, "crc32": …}.  share: which files, sorted by name, are read through; of the others
    only the size is compared.  only: look at these files alone, whatever else lies there.
    """
    found = storage.sizes(name)
    found.pop(RECORD, None)
    names = sorted(files)
    if only is None and found.keys() != files.keys():
        return f"its files are not those of its record: {sorted(found.keys() ^ files.keys())[:3]}"
    if only is not None:
        names = [file for file in names if file in set(only)]
    for file in names:
        if (size := found.get(file)) != files[file]["size"]:
            return f"{file} has {size} of {files[file]['size']} bytes"

    def is_wrong(file: str) -> bool:
        return file_crc32(storage, name, file) != files[file]["crc32"]

    with ThreadPoolExecutor(_READ_THREADS) as pool:
        for file, wrong in zip(names[share], pool.map(is_wrong, names[share]), strict=True):
            if wrong:
                return f"{file} does not match its checksum"
    return None


def file_crc32(storage: Storage, name: str, file: str) -> int:
    """Return a stored file's CRC-32.

    Raises: OSError if it cannot be read.
    """
    source = storage.open(name, file)
    try:
        value, block = 0, memoryview(bytearray(min(_BLOCK if storage.is_local else source.request_bytes, source.size)))
        for start in range(0, source.size, len(block) or 1):
            part = block[: source.size - start]
            source.read_into(start, part)
            value = crc32(part, value)
    finally:
        source.close()
    return value


def read_file(storage: Storage, name: str, file: str) -> bytes:
    """Return a stored file's bytes.

    Raises: FileNotFoundError, or OSError if it cannot be read.
    """
    source = storage.open(name, file)
    try:
        content = bytearray(source.size)
        source.read_into(0, memoryview(content))
    finally:
        source.close()
    return bytes(content)


def write_and_verify(storage: Storage, name: str, files: dict[str, Iterable[memoryview]]) -> dict[str, dict]:
    """Write files from pieces, read them back and compare.  Returns their entries, as `write_file` gives them.

    Raises: OSError if one cannot be written, or is not what was written.
    """
    written = {file: write_file(storage, name, file, pieces) for file, pieces in files.items()}
    if problem := damage(storage, name, written, slice(None), only=written):
        raise OSError(f"{problem}; is the disk full or broken?")
    return written
