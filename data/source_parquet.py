"""Parquet files as input: pictures embedded as bytes, plain or as {bytes, path}, or named by path or URL."""

import hashlib
from collections.abc import Iterator

from data.edit_row import edit_cells
from data.picture_bytes import beside
from data.row import Columns, Row, caption_member, choose_columns, fields_of, lone_references
from data.source_file import open_binary

_BATCH = 32  # rows decoded at once: pictures are large


class Parquet:
    """A parquet file; only its footer is read before its rows are asked for."""

    def __init__(self, location: str, columns: Columns):
        self.location, self._columns = location, columns
        with self._open() as file:
            metadata, names = file.metadata, file.schema_arrow.names
            self._group_rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            described = repr((file.schema_arrow, self._group_rows, [_sizes(metadata, i) for i in self._groups]))
        self.num_rows = sum(self._group_rows)
        self.digest = hashlib.sha256(described.encode()).hexdigest()
        self._choice = choose_columns(names, columns, location)
        self.has_edits = self._choice.has_edits
        wanted = {columns.category, columns.source, columns.license, *columns.keep, *self._choice.names}
        self._read = [name for name in names if name in wanted]

    @property
    def _groups(self) -> range:
        return range(len(self._group_rows))

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the rows from `start` to before `stop`; whole row groups are read, so large ones several times."""
        with self._open() as file:
            first = 0  # row of the group
            for group, count in enumerate(self._group_rows):
                if first < stop and start < first + count:
                    batches = file.iter_batches(_BATCH, row_groups=[group], columns=self._read, use_threads=False)
                    at = first
                    for batch in batches:
                        keep = slice(max(start - at, 0), max(stop - at, 0))
                        part = batch.slice(keep.start, max(0, min(keep.stop, len(batch)) - keep.start))
                        for number, record in enumerate(part.to_pylist(), at + keep.start):
                            yield self._row(f"{self.location}:{number}", record)
                        at += len(batch)
                        if at >= stop:
                            break
                first += count

    def _row(self, origin: str, record: dict) -> Row:
        if self._choice.has_lone_references and (problem := lone_references(record)):
            return Row(origin, problem=problem)
        cell = record[self._choice.picture]
        if isinstance(cell, dict):
            cell = cell.get("bytes") or cell.get("path")
        if not isinstance(cell, str | bytes) or not cell:
            return Row(origin, problem=f"its {self._choice.picture} is empty or neither bytes nor text")
        picture = beside(self.location, cell) if isinstance(cell, str) else cell
        caption = caption_member([(label, record[column]) for label, column in self._choice.captions])
        try:
            edit = edit_cells(record, self.location) if self._choice.has_edits else None
        except ValueError as error:
            return Row(origin, problem=str(error))
        return Row(origin, picture, caption, fields_of(record, self._columns), edit=edit)

    def _open(self):
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ValueError(f"{self.location} needs pyarrow: pip install -r requirements.txt") from error
        try:
            return pq.ParquetFile(open_binary(self.location))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.location} cannot be read as parquet: {error}") from error


def _sizes(metadata, group: int) -> list[int]:
    return [metadata.row_group(group).column(c).total_compressed_size for c in range(metadata.num_columns)]
