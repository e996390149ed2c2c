"""What tools.prepare reads: from what a user names to sources of rows, in a fixed order."""

import glob
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data.row import Columns, Row
from data.shards import matching_remote
from data.source_folder import Folder
from data.source_parquet import Parquet
from data.source_table import Table
from data.source_tar import Tar
from utils.byte_source import is_remote

TABLES = ("csv", "tsv", "jsonl", "ndjson")


class Source(Protocol):
    """One folder or file of rows.  `digest` changes when its rows do; `ignored`, where there is one, names the rest."""

    location: str
    num_rows: int
    digest: str

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from `start` to before `stop`."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of one source, which make one shard; `first` numbers them over all sources."""

    source: Source
    start: int
    stop: int
    first: int

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yield (number over all sources, row)."""
        return enumerate(self.source.rows(self.start, self.stop), self.first)


def open_sources(inputs: Sequence[str], columns: Columns, quotes: bool = True) -> list[Source]:
    """Open folders, files, globs and URLs, in the order given, a glob's matches sorted.

    Raises: ValueError if one matches nothing, is of no known kind or cannot be read.
    """
    locations = [location for name in inputs for location in _matches(name)]
    if twice := sorted({location for location in locations if locations.count(location) > 1}):
        raise ValueError(f"--input names {twice[0]} twice")
    return [_open(location, columns, quotes) for location in locations]


def pieces(sources: Sequence[Source], rows_per_piece: int) -> list[Piece]:
    """Divide the sources into pieces: a function of their rows alone.  No piece spans two sources."""
    if rows_per_piece < 1:
        raise ValueError(f"--samples_per_shard must be at least 1, got {rows_per_piece}")
    found, first = [], 0
    for source in sources:
        for start in range(0, source.num_rows, rows_per_piece):
            found.append(Piece(source, start, min(start + rows_per_piece, source.num_rows), first + start))
        first += source.num_rows
    return found


def fingerprint(sources: Sequence[Source]) -> str:
    """Return a hash of every row's place and content, as far as listing sees it."""
    described = repr([(source.location, source.num_rows, source.digest) for source in sources])
    return hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()


def _matches(name: str) -> list[str]:
    remote = is_remote(name)
    if (remote and not glob.has_magic(name)) or (not remote and Path(name).exists()):
        return [name.rstrip("/") or "/"]
    found = matching_remote(name) if remote else sorted(glob.glob(name, recursive=True))
    if not found:
        raise ValueError(f"--input {name!r} is no folder or file and, as a glob, matches none")
    return found


def _open(location: str, columns: Columns, quotes: bool) -> Source:
    kind = location.lower().rpartition(".")[2]
    is_named = "." in location.rpartition("/")[2]
    if Path(location).is_dir() if not is_remote(location) else location.startswith("s3://") and not is_named:
        return Folder(location, columns)
    if kind in TABLES:
        return Table(location, columns, quotes)
    if kind == "parquet":
        return Parquet(location, columns)
    if kind == "tar":
        return Tar(location, columns)
    raise ValueError(
        f"--input {location}: its name must say what it is by .{', .'.join(TABLES)}, .parquet or .tar; or give a "
        "folder of pictures, on a disk or on s3://"
    )
