"""The shards of one output of tools.prepare on their way: made aside, freed of duplicates, published by a rename.

The hidden folder .work holds of each shard NAME-000000.tar, every sample that passed on its own, and
NAME-000000.jsonl, a record a row.  A record file exists only when its tar is complete.  When all are made, what repeats
an earlier row is found once, over all of them, and written to repeated.npy; then each shard is published without it.
"""

import errno
import json
import os
import tarfile
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from webdataset import TarWriter

from data.duplicates import find_copies, find_duplicates
from data.sources import Piece
from tools.prepare_sample import MemberWriter, Recipe, Reject, Sample, make_sample, row_of_key

Item, Result = TypeVar("Item"), TypeVar("Result")
DUPLICATES = ("perceptual", "exact", "keep")


@dataclass(frozen=True)
class Output:
    """Where everything lies."""

    folder: Path
    name: str

    @property
    def work(self) -> Path:
        return self.folder / ".work"

    def shard(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:06d}.tar"

    def made(self, number: int) -> Path:
        return self.work / f"{self.name}-{number:06d}.tar"

    def records(self, number: int) -> Path:
        return self.work / f"{self.name}-{number:06d}.jsonl"

    @property
    def repeated(self) -> Path:
        return self.work / "repeated.npy"


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is whole and on disk.

    Raises: ValueError if it cannot be written, as on a full disk; nothing of it is left.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        remedy = "make room and " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}; {remedy}give the same command again"
        ) from error


def make_shard(
    output: Output,
    number: int,
    piece: Piece,
    recipe: Recipe,
    write: MemberWriter,
    count_tokens: Callable[[str], int] | None,
    num_workers: int,
    on_row: Callable[[], object],
) -> None:
    """Make one shard and its records in the work folder; `on_row` is called after each row."""

    def make(numbered):
        outcome = make_sample(*numbered, recipe)
        return outcome, write(outcome, recipe) if isinstance(outcome, Sample) else []

    records = []
    with written_aside(output.made(number)) as file, TarWriter(file, user="", group="", mtime=0.0) as writer:
        for outcome, members in ordered_map(make, piece.rows(), num_workers):
            for key, content in members:
                writer.write({"__key__": key, **content})
            records.append(_record(outcome, members, count_tokens))
            on_row()
    with written_aside(output.records(number)) as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> Iterator[Result]:
    """Yield the results in the order of the items; few of either are in memory at a time."""
    if num_threads < 2:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        ahead: deque = deque()
        try:
            for item in items:
                ahead.append(pool.submit(function, item))
                if len(ahead) > 2 * num_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for task in ahead:
                task.cancel()


def _record(outcome: Sample | Reject, members: list, count_tokens: Callable[[str], int] | None) -> dict:
    if isinstance(outcome, Reject):
        return {"row": outcome.number, "origin": outcome.origin, "reason": outcome.reason, "detail": outcome.detail}
    measure = count_tokens or len
    samples = [
        {
            "key": key,
            "area": picture.placement.area,
            "ratio": picture.placement.ratio,
            "size": picture.placement.size,
            "cropped": round(picture.placement.cropped, 4),
            "original_file": picture.file is not None and picture.file[0] in content,
            "bytes": sum(map(len, content.values())),
        }
        for picture, (key, content) in zip(outcome.pictures, members, strict=True)
    ]
    return {
        "row": outcome.number,
        "origin": outcome.origin,
        "category": outcome.meta.get("category", ""),
        "size": outcome.size,
        "samples": samples,
        "caption_lengths": {name: [measure(text) for text in texts] for name, texts in outcome.captions.items()},
        "hash": outcome.hash.tobytes().hex(),
        "digest": outcome.digest.hex(),
        **({} if outcome.edit is None else {"references": len(outcome.edit.references)}),
    }


def read_records(output: Output, number: int) -> Iterator[dict]:
    """Yield the records of a shard in row order."""
    with output.records(number).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def find_repeated(output: Output, num_shards: int, duplicates: str, max_distance: int) -> None:
    """Write repeated.npy, (K, 3) int64: the rows that repeat another, that row, and whether the files are the same."""
    rows, hashes, digests = array("q"), bytearray(), bytearray()  # 48 bytes a row
    for number in range(num_shards):
        for record in read_records(output, number):
            if "samples" in record:
                rows.append(record["row"])
                hashes += bytes.fromhex(record["hash"])
                digests += bytes.fromhex(record["digest"])
    row = np.array(rows, np.int64)
    hash_ = np.frombuffer(hashes, np.uint64).reshape(-1, 3)
    digest = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    if duplicates == "perceptual":
        first = find_duplicates(hash_, max_distance)
    else:
        first = find_copies(digest) if duplicates == "exact" else np.full(len(row), -1)
    at = np.flatnonzero(first >= 0)
    same_file = (digest[at] == digest[first[at]]).all(axis=1)
    with written_aside(output.repeated) as file:
        np.save(file, np.stack([row[at], row[first[at]], same_file.astype(np.int64)], axis=1))


def load_repeated(output: Output, piece: Piece) -> dict[int, tuple[int, bool]]:
    """Return {row: (the earlier row, whether the files are the same)} of a piece's rows that repeat another."""
    repeated = np.load(output.repeated, mmap_mode="r", allow_pickle=False)
    start, stop = np.searchsorted(repeated[:, 0], [piece.first, piece.first + piece.stop - piece.start])
    return {row: (earlier, bool(same)) for row, earlier, same in repeated[start:stop].tolist()}


def publish_shard(output: Output, number: int, repeated: dict[int, tuple[int, bool]]) -> None:
    """Give a shard its name, without the rows in `repeated`; does nothing if it has it already."""
    if output.shard(number).exists():
        output.made(number).unlink(missing_ok=True)
        return
    if not repeated:
        os.replace(output.made(number), output.shard(number))
        return
    with (
        written_aside(output.shard(number)) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as kept,
        tarfile.open(output.made(number), "r:") as made,
    ):
        for member in made:
            if row_of_key(member.name) not in repeated:
                kept.addfile(member, made.extractfile(member))
    output.made(number).unlink()
