"""A folder of pictures, on a disk or s3://, with all below it; the caption of a.jpg is in a.json or a.txt beside it."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

from data.index import IMAGE_EXTENSIONS, META_EXTENSIONS
from data.picture_bytes import read_picture_bytes
from data.row import Columns, Row, edit_of_json, fields_of_json
from utils.byte_source import is_remote, list_below

_NUM_REQUESTS = 16  # for captions, at once
_OF_FILES = ("csv", "tsv", "jsonl", "ndjson", "parquet", "tar")  # inputs that are files
# Of each folder, with a slash at its end: its files' sizes in bytes, or whatever tells two versions of them apart.
_Listing = Iterator[tuple[str, dict[str, object]]]


class Folder:
    """The pictures of a folder, sorted by path; links to folders are not followed."""

    def __init__(self, location: str, columns: Columns):
        self.location, self._columns = location, columns
        self._pictures: list[tuple[str, str]] = []  # paths in the folder, of the caption or ""
        self.ignored: list[str] = []  # files that are neither
        sizes: dict[str, object] = {}
        self._is_remote = is_remote(location)
        listing = _list_remote(location) if self._is_remote else _walk(location, "", self.ignored)
        for folder, names in listing:
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
            kinds = sorted({name.rpartition("/")[2].rpartition(".")[2].lower() for name in self.ignored})
            files = [kind for kind in kinds if kind in _OF_FILES]
            raise ValueError(
                f"{location} holds no pictures ({', '.join(IMAGE_EXTENSIONS)})"
                + (f", but .{', .'.join(kinds[:5])}" if kinds else "")
                + (f"; of tables and tars give the files: '{location}/*.{files[0]}'" if files else "")
            )

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the pictures from `start` to before `stop`."""
        if not self._is_remote:
            yield from (self._row(*names) for names in self._pictures[start:stop])
            return
        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            yield from pool.map(lambda names: self._row(*names), self._pictures[start:stop])

    def _row(self, name: str, caption: str) -> Row:
        origin, member, fields = f"{self.location}/{_readable(name)}", None, {}
        if caption:
            try:
                content = read_picture_bytes(self._place(caption))
            except (OSError, ValueError) as error:
                return Row(origin, problem=f"its caption cannot be read: {getattr(error, 'strerror', None) or error}")
            member = (_split(caption)[1], content)
            if member[0] == "json" and edit_of_json(content) is not None:
                return Row(origin, problem="it is an edit; edits are taken from JSONL, parquet and tar files")
            fields = fields_of_json(content, self._columns) if member[0] == "json" else {}
        return Row(origin, self._place(name), member, fields)

    def _place(self, name: str) -> str:
        """Return the path or, with its special characters encoded, the URL of a file."""
        return f"{self.location}/{quote(name)}" if self._is_remote else os.path.join(self.location, name)


def _list_remote(location: str) -> _Listing:
    """Yield what lies in an s3:// folder and in those below it.  Raises: ValueError if it cannot be listed."""
    try:
        found = list_below(location)
    except OSError as error:
        raise ValueError(f"--input {location} cannot be listed: {error}") from error
    folders: dict[str, dict[str, object]] = {}
    for path, version in found.items():
        folder, slash, name = path.rpartition("/")
        folders.setdefault(folder + slash, {})[name] = version
    yield from folders.items()


def _split(name: str) -> tuple[str, str]:
    """Return a file name's stem and its extension in small letters."""
    stem, _, extension = name.rpartition(".")
    return stem, extension.lower()


def _walk(location: str, folder: str, ignored: list[str]) -> _Listing:
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
