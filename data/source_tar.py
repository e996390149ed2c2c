"""Webdataset tars as input, read by the webdataset library and counted against the archive's own headers."""

import hashlib
import re
import tarfile
from collections.abc import Iterator
from itertools import islice

from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from data.edit import mask_member, reference_members
from data.edit_row import EditCells
from data.index import IMAGE_EXTENSIONS, META_EXTENSIONS
from data.row import Columns, Row, edit_of_json, fields_of_json
from data.source_file import open_binary

_LIBRARY_SKIPS = re.compile(r"__[^/]*__($|/)")  # members that webdataset takes as metadata
_BLOCK = 512


class Tar:
    """A tar of samples: neighbours with one stem, by webdataset's rule."""

    def __init__(self, location: str, columns: Columns):
        self.location, self._columns = location, columns
        self._offsets: list[int] = []  # of each sample's first header
        self.ignored: list[str] = []  # members that belong to no sample
        digest = hashlib.sha256()
        current = None
        for member in self._members():
            stem = None if _LIBRARY_SKIPS.match(member.name) else base_plus_ext(member.name)[0]
            if stem is None:
                self.ignored.append(f"{location}/{member.name}")
                continue
            digest.update(repr((member.name, member.size, member.offset)).encode("utf-8", "surrogateescape"))
            if stem != current:
                self._offsets.append(member.offset)
            current = stem
        self.num_rows, self.digest = len(self._offsets), digest.hexdigest()

    def _members(self) -> Iterator[tarfile.TarInfo]:
        """Yield the regular files in order.  Raises: ValueError if the archive is damaged or cut anywhere."""
        try:
            with open_binary(self.location) as file, tarfile.open(fileobj=file, mode="r:") as archive:
                end = 0
                for member in archive:
                    end = member.offset_data + (-(-member.size // _BLOCK) * _BLOCK if member.isfile() else 0)
                    if member.isfile():
                        yield member
                    archive.members = []  # else all of them are kept
                file.seek(end)
                mark = file.read(2 * _BLOCK)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise ValueError(f"{self.location} cannot be read as a tar file: {error}") from error
        if mark != bytes(2 * _BLOCK):
            raise ValueError(
                f"{self.location} has no end mark (two blocks of zeros) at byte {end}: it is cut short or "
                "damaged; copy it again"
            )

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the samples from `start` to before `stop`.

        Raises: ValueError if the library does not find as many as there are.
        """
        count = start
        with open_binary(self.location) as file:
            file.seek(self._offsets[start])  # a tar may be read from any header on
            files = tar_file_expander([{"url": self.location, "stream": file}])
            try:
                for sample in islice(group_by_keys(files), stop - start):
                    count += 1
                    yield self._row(sample)
            except (tarfile.TarError, OSError, ValueError) as error:
                raise ValueError(f"{self.location} cannot be read after sample {count}: {error}") from error
        if count != stop:
            raise ValueError(f"{self.location} ended after {count} of {self.num_rows} samples; copy it again")

    def _row(self, sample: dict) -> Row:
        key = sample["__key__"].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        origin = f"{self.location}/{key}"
        picture = next((sample[e] for e in IMAGE_EXTENSIONS if e in sample), None)
        caption = next(((e, sample[e]) for e in META_EXTENSIONS if e in sample), None)
        if picture is None:
            there = sorted(name for name in sample if not name.startswith("__"))
            return Row(origin, problem=f"it has {', '.join(there)}, but no picture")
        is_json = bool(caption) and caption[0] == "json"
        fields = fields_of_json(caption[1], self._columns) if is_json else {}
        try:
            edit = _edit(sample, *found) if is_json and (found := edit_of_json(caption[1])) else None
        except ValueError as error:
            return Row(origin, problem=str(error))
        return Row(origin, picture, caption, fields, edit=edit)


def _edit(sample: dict, count: object, actions: object) -> EditCells:
    """Return the edit that a sample of a shard is; count: of references, as its .json says."""
    if type(count) is not int or count < 0:
        raise ValueError(f"its .json says {count!r} references; a number is needed")
    names, mask = reference_members(sample, IMAGE_EXTENSIONS, count), mask_member(sample, IMAGE_EXTENSIONS)
    references = tuple(sample[name] for name in names)
    return EditCells(references, (None,) * count, sample[mask] if mask else None, actions)
