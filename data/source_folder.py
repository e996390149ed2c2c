"""A folder of pictures as input, with all below it; the caption of a.jpg is in a.json or a.txt beside it."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from data.index import IMAGE_EXTENSIONS, META_EXTENSIONS
from data.row import Columns, Row, edit_of_json, fields_of_json


class Folder:
    """The pictures of a folder, sorted by path; links to folders are not followed."""

    def __init__(self, location: str, columns: Columns):
        self.location, self._columns = location, columns
        self._pictures: list[tuple[str, str]] = []  # paths in the folder, of the caption or ""
        self.ignored: list[str] = []  # files that are neither
        sizes: dict[str, int] = {}
        for folder, names in _walk(location, "", self.ignored):
            kinds = {name: _split(name) for name in names}
            captions = {kind: name for name, kind in kinds.items() if kind[1] in META_EXTENSIONS}
            used = set()
            for name, (stem, extension) in kinds.items():
                if extension not in IMAGE_EXTENSIONS:
                    continue
                caption = next((captions[stem, e] for e in META_EXTENSIONS if (stem, e) in captions), "")
                self._pictures.append((folder + name, caption and folder + caption))
                used |= {name, caption}
            sizes |= {folder + name: size for name, size in names.items() if name in used}
            self.ignored += [f"{location}/{_readable(folder + name)}" for name in names if name not in used]
        self._pictures.sort()
        self.ignored.sort()
        self.num_rows = len(self._pictures)
        described = "\n".join(f"{name} {sizes[name]}" for name in sorted(sizes))
        self.digest = hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()
        if not self._pictures:
            kinds = sorted({name.rpartition(".")[2] for name in self.ignored})
            raise ValueError(
                f"{location} holds no pictures ({', '.join(IMAGE_EXTENSIONS)})"
                + (f", but .{', .'.join(kinds[:5])}; of tables and tars give the files: '{location}/*.{kinds[0]}'"
                   if kinds else "")
            )  # fmt: skip

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the pictures from `start` to before `stop`."""
        for name, caption in self._pictures[start:stop]:
            origin, member, fields = f"{self.location}/{_readable(name)}", None, {}
            if caption:
                try:
                    content = Path(self.location, caption).read_bytes()
                except OSError as error:
                    yield Row(origin, problem=f"its caption cannot be read: {error.strerror}")
                    continue
                member = (_split(caption)[1], content)
                if member[0] == "json" and edit_of_json(content) is not None:
                    yield Row(origin, problem="it is an edit; edits are taken from JSONL, parquet and tar files")
                    continue
                fields = fields_of_json(content, self._columns) if member[0] == "json" else {}
            yield Row(origin, os.path.join(self.location, name), member, fields)


def _split(name: str) -> tuple[str, str]:
    """Return a file name's stem and its extension in small letters."""
    stem, _, extension = name.rpartition(".")
    return stem, extension.lower()


def _walk(location: str, folder: str, ignored: list[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield (folder in `location` with a slash, {file name: size in bytes}) of it and all below."""
    names, below = {}, []
    try:
        with os.scandir(os.path.join(location, folder)) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below.append(f"{folder}{entry.name}/")
                elif entry.is_file():
                    names[entry.name] = entry.stat().st_size
                else:  # a link to a folder or to nothing, a device
                    ignored.append(f"{location}/{_readable(folder + entry.name)}")
    except OSError as error:
        raise ValueError(f"{location}/{folder} cannot be read: {error.strerror}") from error
    yield folder, names
    for deeper in below:
        yield from _walk(location, deeper, ignored)


def _readable(name: str) -> str:
    """Return a file name that may not be UTF-8 as text."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
