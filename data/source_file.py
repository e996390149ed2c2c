"""A local or remote file as Python's own kind of file, for the libraries that read tables and archives."""

import io
from typing import BinaryIO

from utils.byte_source import ByteSource, is_remote, open_source

_BUFFER = 2**23  # bytes: a remote read of this size is long against the time to its first byte


class _Ranges(io.RawIOBase):
    """Reads a `ByteSource` as a stream with a position."""

    def __init__(self, source: ByteSource):
        self._source, self._position = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._source.size - self._position))
        try:
            self._source.read_into(self._position, view[:count])
        except OSError as error:
            raise ValueError(str(error)) from error
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


def open_binary(location: str) -> BinaryIO:
    """Open a local path or URL for reading.  Raises: ValueError if it cannot be."""
    try:
        if is_remote(location):
            return io.BufferedReader(_Ranges(open_source(location)), _BUFFER)
        return open(location, "rb")
    except OSError as error:
        reason = str(error.strerror or error).removeprefix(f"{location} could not be read: ")
        raise ValueError(f"{location} cannot be read: {reason}") from error
