"""CSV, TSV and JSONL files as input: a row a picture, which is a path relative to the file, or a URL.

Text may be in any encoding of `decode_text`, decided line by line; UTF-16 by its byte-order mark.
"""

import codecs
import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import BinaryIO

from data.captions import decode_text
from data.edit_row import edit_cells
from data.picture_bytes import beside
from data.row import Columns, Row, caption_member, choose_columns, fields_of, lone_references
from data.source_file import open_binary

_STRIDE = 256  # rows between two places that are remembered: few to skip, little to keep
_SAMPLE = 100  # objects of a JSONL file whose names are taken for its columns
_MAX_FIELD = 2**24  # characters; Python's own limit is 2^17

# A record is what a parser makes of one row: {column: cell}, or why it cannot be read.
Record = dict | str
Parser = Callable[[Iterator[str]], Iterator[Record]]


class Table:
    """A file of rows; reading it once finds out where they start."""

    def __init__(self, location: str, columns: Columns, quotes: bool = True):
        self.location, self._columns, self._quotes = location, columns, quotes
        self._offsets: list[int] = []  # of every _STRIDE-th row
        self.num_rows = 0
        digest, head = hashlib.sha256(), []
        with self._open() as file:
            header, parse = self._parser(file)
            digest.update(repr(header).encode("utf-8", "surrogatepass"))
            position, lines = _counted_lines(file, digest)
            start = file.tell()
            for record in self._told(parse(lines)):
                if self.num_rows % _STRIDE == 0:
                    self._offsets.append(start)
                if self.num_rows < _SAMPLE:
                    head.append(record)
                self.num_rows += 1
                start = position[0]
        self.digest = digest.hexdigest()
        names = header or dict.fromkeys(name for record in head if isinstance(record, dict) for name in record)
        self._choice = choose_columns(list(names), columns, location)
        self.has_edits = self._choice.has_edits

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from `start` to before `stop`."""
        with self._open() as file:
            _, parse = self._parser(file)
            file.seek(self._offsets[start // _STRIDE])
            _, lines = _counted_lines(file, None)
            records = islice(self._told(parse(lines)), start % _STRIDE, start % _STRIDE + stop - start)
            for number, record in enumerate(records, start):
                yield self._row(f"{self.location}:{number + 1}", record)

    def _row(self, origin: str, record: Record) -> Row:
        if isinstance(record, str):
            return Row(origin, problem=record)
        if self._choice.has_lone_references and (problem := lone_references(record)):
            return Row(origin, problem=problem)
        picture = record.get(self._choice.picture)
        if not isinstance(picture, str) or not picture.strip():
            return Row(origin, problem=f"its {self._choice.picture} is empty or no text")
        caption = caption_member([(label, record.get(column)) for label, column in self._choice.captions])
        try:
            edit = edit_cells(record, self.location) if self._choice.has_edits else None
        except ValueError as error:
            return Row(origin, problem=str(error))
        picture = beside(self.location, picture.strip())
        return Row(origin, picture, caption, fields_of(record, self._columns), edit=edit)

    def _open(self) -> BinaryIO:
        file = open_binary(self.location)
        mark = file.read(2)
        file.seek(0)
        if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # its lines cannot be found byte by byte
            with file:
                return io.BytesIO(file.read().decode("utf-16", errors="replace").encode("utf-8"))
        return file

    def _parser(self, file: BinaryIO) -> tuple[list[str], Parser]:
        """Read the header, where the kind has one; return it and what parses the lines from there on."""
        kind = self.location.lower().rpartition(".")[2]
        if kind in ("jsonl", "ndjson"):
            return [], _parse_json_lines
        csv.field_size_limit(_MAX_FIELD)
        options = {
            "delimiter": "\t" if kind == "tsv" else ",",
            "quoting": csv.QUOTE_MINIMAL if self._quotes else csv.QUOTE_NONE,
            "strict": True,
        }
        _, lines = _counted_lines(file, None)
        header = next(self._told(csv.reader(lines, **options)), None)
        if not header:
            raise ValueError(f"{self.location} is empty; its first line must name the columns")
        if twice := sorted({name for name in header if header.count(name) > 1}):
            raise ValueError(f"{self.location} has two columns called {twice[0]!r}; rename one")
        return header, lambda lines: _parse_delimited(lines, header, options)

    def _told(self, records: Iterator) -> Iterator:
        """Yield on; an error of the csv module becomes one that says where and what to do."""
        count = 0
        try:
            for record in records:
                count += 1
                yield record
        except csv.Error as error:
            raise ValueError(
                f"{self.location} cannot be read after row {count}: {error}; repair the quotes there, or give "
                "--no-quotes if the file has none that mean anything"
            ) from error


def _counted_lines(file: BinaryIO, digest) -> tuple[list[int], Iterator[str]]:
    """Return [where the next line starts], kept up to date, and the file's lines from here on as text."""
    position = [file.tell()]

    def lines() -> Iterator[str]:
        while line := file.readline():
            position[0] += len(line)
            if digest is not None:
                digest.update(line)
            yield decode_text(line)

    return position, lines()


def _parse_json_lines(lines: Iterator[str]) -> Iterator[Record]:
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            yield record if isinstance(record, dict) else "its json is not an object"
        except (ValueError, RecursionError) as error:
            yield f"its json cannot be read: {error}"


def _parse_delimited(lines: Iterator[str], header: list[str], options: dict) -> Iterator[Record]:
    for cells in csv.reader(lines, **options):
        if not cells:  # an empty line
            continue
        if len(cells) == len(header):
            yield dict(zip(header, cells, strict=True))
        else:
            yield f"it has {len(cells)} cells, the header {len(header)}"
