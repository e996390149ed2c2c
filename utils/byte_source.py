"""Byte ranges of one file, wherever it lies: a local path, `https://`, `http://` or `s3://`.

A remote file is pinned when it is opened, by its size and its ETag (without one, its time of modification): one that
changes while it is read is an error, never a mixture of two versions.  Of a local file only the size is compared.
Remote reads go through obstore, the Python binding of Rust's object_store.  It tries again, with jittered waits that
grow, after a server's error, a dropped connection or a stall, and continues a body where it was cut.  S3 is configured
by the usual variables (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, AWS_SKIP_SIGNATURE=true for public buckets …);
profiles in ~/.aws are not read.
"""

import functools
import os
import random
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from utils.counts import count
from utils.quick_limit import QuickLimit

REMOTE_SCHEMES = ("https", "http", "s3")


@dataclass(frozen=True)
class Patience:
    """How long a remote read is tried before it is an error."""

    max_retries: int = 8  # further attempts after the first
    first_wait_s: float = 0.2  # before the first of them; it doubles, with jitter
    max_wait_s: float = 20.0
    stall_s: float = 30.0  # without a byte for so long, an attempt has failed; the first of a small read sooner
    total_s: float = 300.0  # no further attempt after so long


_SMALL_BYTES = 2**21  # a read that may start anew where it was cut
_NO_LENGTH = "Content-Length Header missing"  # in the message for an answer without one, as a proxy in trouble gives it
DEFAULT_PATIENCE = Patience()


class SourceChangedError(OSError):
    """The file is no longer the one that was opened."""


class _NoRangesError(OSError):
    """A server that sends whole files only."""


class LocalFile:
    """A file of this machine's file system."""

    request_bytes = 2**20  # one read of this size costs little more than its copy, and stays in the core's cache
    cheap_gap = 512  # bytes that are read and dropped rather than skipped by another read

    def __init__(self, location: str):
        self.location, self.version = location, None
        self._file = os.open(location, os.O_RDONLY)
        try:
            self.size = os.fstat(self._file).st_size
        except OSError:
            self.close()
            raise

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.  Safe to call from several threads.

        Raises: OSError if they cannot be read or the file ends before.
        """
        while len(buffer):
            count = os.preadv(self._file, [buffer], offset)
            if not count:
                raise OSError(f"{self.location} ends at byte {offset}, {len(buffer)} bytes early; was it cut short?")
            offset, buffer = offset + count, buffer[count:]

    def expect(self, offset: int, num_bytes: int) -> None:
        """Have the kernel fetch a range that small reads will follow in; it saves half of their time on a cold disk."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(self._file, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def forget(self, offset: int, num_bytes: int) -> None:
        """Have the kernel read a range from the disk again."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class RemoteFile:
    """An object of a web server or an S3 store, read by ranges."""

    request_bytes = 2**23  # at some 100 MB/s a request, large against the time to its first byte
    cheap_gap = 2**20  # bytes that arrive in the time that another request would take

    def __init__(self, location: str, patience: Patience, pinned: tuple[int, str | None] | None):
        folder, self._name = _split(location)
        import obstore  # here, since a run that reads local files alone does not need it

        self._obstore, self.location = obstore, location
        self._store, self._patience, self._folder = _store(folder, patience), patience, folder
        self._limit = _quick_limit(folder, patience)
        if pinned is None:
            pinned = _version(self._call(obstore.head, self._store, self._name))
        self.size, self.version = pinned

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.  Safe to call from several threads.

        Raises: FileNotFoundError, PermissionError, SourceChangedError if the size or the version is not what it was, or
        OSError for any other failure that outlasts the patience.
        """
        if not len(buffer):
            return
        # A small read's first attempt is given up early: a stall should not hold up a whole batch.  What follows is
        # left to obstore; so is a large read, which it continues where it was cut.
        max_retries, store, limit = self._patience.max_retries, self._store, None
        if len(buffer) <= _SMALL_BYTES and max_retries:
            limit = self._limit.seconds
            store = _store(self._folder, replace(self._patience, max_retries=0, stall_s=limit))
        for attempt in range(max_retries + 1):
            is_last, result, started = attempt == max_retries, None, time.monotonic()
            try:
                result = self._get(store, (offset, offset + len(buffer)))
                self._check(result.meta)
                data = memoryview(self._call(result.bytes))
                if len(data) == len(buffer):
                    break
                # Cut, and the server had not said how much it would send.
                if is_last:
                    raise OSError(f"{self.location} gave {len(data)} of {len(buffer)} bytes from byte {offset} on")
            except (FileNotFoundError, PermissionError, SourceChangedError, _NoRangesError):
                raise
            except OSError as error:
                # obstore does not continue a body cut without an ETag, nor try again after one without a length.
                is_ours = _NO_LENGTH in str(error) or (result is not None and not result.meta["e_tag"])
                if is_last or not (is_ours or limit is not None):
                    raise
            count("data_retries")
            if limit is None or time.monotonic() - started < limit:  # a stall was wait enough
                time.sleep(min(self._patience.max_wait_s, self._patience.first_wait_s * 2**attempt) * random.random())
            if limit is not None:
                limit, store = None, _store(self._folder, replace(self._patience, max_retries=max_retries - 1))
        self._limit.note(time.monotonic() - started)
        buffer[:] = data

    def expect(self, offset: int, num_bytes: int) -> None:
        """Nothing to do: nothing is kept between reads."""

    def forget(self, offset: int, num_bytes: int) -> None:
        """Nothing to do, likewise."""

    def close(self) -> None:
        """Nothing to do: connections are shared by the files of a folder."""

    def _get(self, store, byte_range: tuple[int, int]):
        try:
            return self._call(self._obstore.get, store, self._name, options={"range": byte_range})
        except OSError as error:
            if "range" in str(error).lower():  # refused, perhaps since the file is shorter now
                self._check(self._call(self._obstore.head, self._store, self._name))
            raise

    def _check(self, meta: dict) -> None:
        if (now := _version(meta)) != (self.size, self.version):
            raise SourceChangedError(
                f"{self.location} changed while it was read: it had {self.size} bytes and version {self.version}, "
                f"now {now[0]} and {now[1]}"
            )

    def _call(self, function, *args, **kwargs):
        return in_python(self.location, function, *args, **kwargs)


ByteSource = LocalFile | RemoteFile


def open_source(
    location: str | Path, patience: Patience | None = None, pinned: tuple[int, str | None] | None = None
) -> ByteSource:
    """Open a file for reading by ranges; it has `location`, `size` in bytes and `version` (None for a local one).

    pinned: (size, version) that another process found: the file must still be that one, and a remote one is not asked.
    Raises: FileNotFoundError; SourceChangedError if a local file has another size than the pinned one; OSError.
    """
    location = str(location)
    if is_remote(location):
        return RemoteFile(location, patience or DEFAULT_PATIENCE, pinned)
    source = LocalFile(location)
    if pinned is not None and source.size != pinned[0]:
        source.close()
        raise SourceChangedError(f"{location} has {source.size} bytes here, {pinned[0]} where it was looked up first")
    return source


def folder_versions(folder: str, patience: Patience | None = None) -> dict[str, tuple[int, str]]:
    """Return {name: (size, version)} of the objects that lie directly in an s3:// folder.

    Raises: OSError if it cannot be listed.
    """
    listed = in_python(folder, _list_folder, folder, patience or DEFAULT_PATIENCE)
    return {meta["path"].rpartition("/")[2]: _version(meta) for meta in listed}


def list_below(folder: str, patience: Patience | None = None) -> dict[str, tuple[int, str]]:
    """Return {path in an s3:// folder: (size, version)} of all objects below it, also of those in folders of it.

    Raises: OSError if it cannot be listed.
    """
    listed = in_python(folder, _list_below, folder, patience or DEFAULT_PATIENCE)
    return {meta["path"]: _version(meta) for meta in listed}


def is_remote(location: str | Path) -> bool:
    """Return whether a location is a URL rather than a local path.

    Raises: ValueError for a URL of an unknown scheme.
    """
    scheme, separator, _ = str(location).partition("://")
    if separator and scheme not in REMOTE_SCHEMES:
        raise ValueError(f"{location}: no reader for {scheme}://; use a local path or {', '.join(REMOTE_SCHEMES)}")
    return bool(separator)


def object_store(folder: str, patience: Patience):
    """Return obstore's client of a URL's folder, which tries again as `patience` says; it is shared by all callers."""
    return _store(folder, patience)


def in_python(location: str, function, *args, **kwargs):
    """Call into obstore and turn its exceptions into Python's: FileNotFoundError, PermissionError or OSError."""
    from obstore import exceptions as errors

    try:
        return function(*args, **kwargs)
    except FileNotFoundError:
        raise FileNotFoundError(f"{location} does not exist") from None
    except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
        raise PermissionError(f"access to {location} was refused: {_first_line(error)}") from error
    except errors.NotSupportedError as error:
        raise _NoRangesError(f"{location} could not be read: {_first_line(error)}") from error
    except errors.BaseError as error:
        if "404 Not Found" in str(error):  # to the request that goes on with a body that was cut
            raise FileNotFoundError(f"{location} does not exist") from None
        raise OSError(f"{location} could not be read: {_first_line(error)}") from error


def _list_folder(folder: str, patience: Patience) -> list[dict]:
    import obstore

    return obstore.list_with_delimiter(_store(folder, patience))["objects"]


def _list_below(folder: str, patience: Patience) -> list[dict]:
    import obstore

    return [meta for chunk in obstore.list(_store(folder, patience)) for meta in chunk]


def _version(meta: dict) -> tuple[int, str]:
    """Return the size in bytes and what else tells two versions of a remote file apart."""
    return meta["size"], meta["e_tag"] or str(meta["last_modified"])


def _split(location: str) -> tuple[str, str]:
    """Return a URL's folder, still encoded, and the decoded name in it."""
    if urlsplit(location).query:
        raise ValueError(f"{location}: a URL with a query cannot be read; give the plain one")
    folder, _, name = location.rpartition("/")
    return folder, unquote(name)


@functools.cache
def _quick_limit(folder: str, patience: Patience) -> QuickLimit:
    """Return what is learnt from the files of a folder together."""
    return QuickLimit(patience.stall_s)


@functools.cache
def _store(folder: str, patience: Patience):
    """Return the store that all files of a folder share, with its connections."""
    from obstore.store import from_url

    return from_url(
        folder,
        client_options={
            "allow_http": True,
            "connect_timeout": timedelta(seconds=patience.stall_s),
            "read_timeout": timedelta(seconds=patience.stall_s),
            "timeout": timedelta(seconds=patience.total_s),
        },
        retry_config={
            "max_retries": patience.max_retries,
            "retry_timeout": timedelta(seconds=patience.total_s),
            "backoff": {
                "init_backoff": timedelta(seconds=patience.first_wait_s),
                "max_backoff": timedelta(seconds=patience.max_wait_s),
                "base": 2,
            },
        },
    )


def _first_line(error: Exception) -> str:
    """Return the message without the dump of Rust structures below it."""
    return str(error).partition("\n")[0]
