"""Where checkpoints lie: a folder of a local disk or of NFS, or a prefix of an S3 bucket.

Both offer the same few calls on folders ("step-00000100") of files.  A local folder is written beside its final name
and renamed; objects cannot be renamed, so on S3 the files are written where they stay and the commit record, which
makes them count, is the last object.  Every object is one PUT, which takes effect as a whole or not at all: no
multipart upload is ever begun, so none can be left behind.  S3 requests are tried again with jittered waits.
"""

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from parallel.commit_record import RECORD, sync_folder
from utils.byte_source import DEFAULT_PATIENCE, ByteSource, Patience, in_python, object_store, open_source

log = logging.getLogger("train")
_WRITE_BYTES = 2**24  # a write call's at most: some systems refuse 2 GiB


class LocalStorage:
    """Checkpoints in a folder of a file system."""

    is_local = True
    file_bytes = 2**34  # a rank's files are about this large at most

    def __init__(self, folder: Path):
        self.folder = Path(folder).absolute()

    def path(self, name: str) -> Path:
        """Return where a folder lies."""
        return self.folder / name

    def names(self) -> list[str]:
        """Return the names of all folders, half-written ones (".….partial") included."""
        try:
            with os.scandir(self.folder) as entries:
                return sorted(entry.name for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, name: str) -> dict[str, int]:
        """Return file name → size in bytes of what a folder holds; empty if there is none."""
        try:
            with os.scandir(self.path(name)) as entries:
                return {entry.name: entry.stat().st_size for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def open(self, name: str, file: str) -> ByteSource:
        """Open a file for reading by ranges; name "" is for one beside the folders."""
        return open_source(self.path(name) / file)

    def beside(self, name: str, token: str) -> str:
        """Return the name under which a folder is written before it is published; token: no other attempt's."""
        return f".{name}.{token}.partial"

    def begin(self, beside: str) -> None:
        """Make an empty folder to write to."""
        if (path := self.path(beside)).exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)

    def write(self, name: str, file: str, blocks: Iterable[memoryview | bytes]) -> None:
        """Write a file's blocks and make it durable."""
        descriptor = os.open(self.path(name) / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for block in blocks:
                rest = memoryview(block)
                while len(rest):
                    rest = rest[os.write(descriptor, rest[:_WRITE_BYTES]) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, file: str, content: bytes) -> None:
        """Write a small file beside the folders, as a whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = f".{file}.{secrets.token_hex(4)}"
        self.write("", beside, [content])
        os.replace(self.folder / beside, self.folder / file)
        sync_folder(self.folder)

    def publish(self, beside: str, name: str, record: bytes) -> None:
        """Complete a folder with its record and give it its name, durably; a damaged one of that name goes."""
        self.write(beside, RECORD, [record])
        sync_folder(self.path(beside))
        aside = None
        if (final := self.path(name)).exists():  # damaged, else it would have been kept
            aside = f"{beside.removesuffix('.partial')}.replaced.partial"
            os.rename(final, self.path(aside))
        os.rename(self.path(beside), final)
        sync_folder(self.folder)
        if aside is not None:
            shutil.rmtree(self.path(aside))

    def delete(self, name: str) -> None:
        """Delete a folder, its record first: half of it is not taken for a checkpoint."""
        path = self.path(name)
        if path.is_symlink():  # to what somebody keeps elsewhere
            path.unlink()
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / RECORD)
            sync_folder(path)
        shutil.rmtree(path)

    def leftovers(self) -> list[str]:
        """Return the folders that interrupted saves left behind."""
        return [name for name in self.names() if name.startswith(".step-") and name.endswith(".partial")]

    def room(self) -> tuple[int, int]:
        """Return how many bytes and how many files can still be written."""
        path = self.folder
        while not path.exists():
            path = path.parent
        free = os.statvfs(path)
        return free.f_bavail * free.f_frsize, free.f_favail if free.f_files else 2**62  # some count no files


class S3Storage:
    """Checkpoints below an s3:// prefix; configured as `utils.byte_source` says."""

    is_local = False  # a request is dear, whatever it fetches
    file_bytes = 2**27  # one PUT (of 5 GiB at most), repeated as a whole after a failure

    def __init__(self, folder: str, patience: Patience = DEFAULT_PATIENCE):
        self.folder, self.patience = folder.rstrip("/"), patience

    def path(self, name: str) -> str:
        """Return where a folder lies, or a file beside the folders."""
        return f"{self.folder}/{name}"

    def names(self) -> list[str]:
        """Return the names of all folders."""
        import obstore

        listed = self._request(obstore.list_with_delimiter)
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"])

    def sizes(self, name: str) -> dict[str, int]:
        """Return object name → size in bytes of what a folder holds; empty if there is none."""
        return {path.partition("/")[2]: size for path, size in self._below(name)}

    def open(self, name: str, file: str) -> ByteSource:
        """Open an object for reading by ranges; name "" is for one beside the folders."""
        return self._try(open_source, self.path(f"{name}/{file}".lstrip("/")), self.patience)

    def beside(self, name: str, token: str) -> str:
        """Return the name under which a folder is written before it is published: its own."""
        return name

    def begin(self, beside: str) -> None:
        """Delete what an interrupted save left there."""
        self.delete(beside)

    def write(self, name: str, file: str, blocks: Iterable[memoryview | bytes]) -> None:
        """Write an object with one PUT."""
        import obstore

        content = b"".join(blocks)
        self._request(obstore.put, f"{name}/{file}".lstrip("/"), content, use_multipart=False)

    def replace(self, file: str, content: bytes) -> None:
        """Write a small object beside the folders."""
        self.write("", file, [content])

    def publish(self, beside: str, name: str, record: bytes) -> None:
        """Write the record, which makes the objects that lie there count."""
        self.write(name, RECORD, [record])

    def delete(self, name: str) -> None:
        """Delete a folder's objects, the record first."""
        import obstore

        paths = [path for path, _ in self._below(name)]
        if (record := f"{name}/{RECORD}") in paths:
            self._request(obstore.delete, record)
            paths.remove(record)
        if paths:
            self._request(obstore.delete, paths)

    def leftovers(self) -> list[str]:
        """Return nothing: what an interrupted save left has the name of its step, and no record."""
        return []

    def room(self) -> tuple[int, int]:
        """Return how many bytes and how many files can still be written: no limit is known."""
        return 2**62, 2**62

    def _below(self, name: str) -> list[tuple[str, int]]:
        import obstore

        return self._request(
            lambda store: [
                (meta["path"], meta["size"]) for chunk in obstore.list(store, prefix=f"{name}/") for meta in chunk
            ]
        )

    def _request(self, function, *args, **kwargs):
        return self._try(in_python, self.folder, function, object_store(self.folder, self.patience), *args, **kwargs)

    def _try(self, function, *args, **kwargs):
        """Every request goes through here, where tests count them.

        What obstore tries again within one is not counted: it tells nobody, and trying again here instead would mean
        to know its errors apart by their texts.  A count of this process would also lack the writer process' requests.
        """
        return function(*args, **kwargs)


Storage = LocalStorage | S3Storage


def open_storage(folder: str | Path | Storage) -> Storage:
    """Return the storage of a local path or an s3:// URL.

    Raises: ValueError for a URL of another kind.
    """
    if isinstance(folder, LocalStorage | S3Storage):
        return folder
    text = str(folder)
    if text.startswith("s3://"):
        return S3Storage(text)
    if ":/" in text.split("/", 1)[0] + "/":
        raise ValueError(f"checkpoints go to a local path or to s3://, got {text}; a URL must be a str, not a Path")
    return LocalStorage(Path(text))
