"""A `torch.distributed.checkpoint` writer that knows the size and checksum of every file it wrote."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from utils.checksum import crc32


class _CheckedFileSystem(FileSystem):
    """Notes the size and CRC-32 of every file while it is written."""

    def __init__(self):
        self.written: dict[str, dict[str, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path, mode) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as raw, contextlib.closing(_CheckedStream(raw)) as stream:
            yield stream
        self.written[path.name] = {"size": stream.size, "crc32": stream.crc32}

    def rename(self, path, new_path) -> None:
        super().rename(path, new_path)
        self.written[new_path.name] = self.written.pop(path.name)


class _CheckedStream:
    """A file opened for writing that keeps count of what it was given, and syncs before it closes."""

    def __init__(self, raw: io.BufferedWriter):
        self.raw, self.size, self.crc32 = raw, 0, 0
        self.tell, self.flush = raw.tell, raw.flush

    def write(self, data) -> int:
        self.crc32 = crc32(data, self.crc32)
        self.size += memoryview(data).nbytes
        return self.raw.write(data)

    def close(self) -> None:
        if not self.raw.closed:
            self.raw.flush()
            os.fsync(self.raw.fileno())
            self.raw.close()


class CheckedWriter(dcp.FileSystemWriter):
    """One file a rank, written by one thread: with several, torch loses the failure of all but the first."""

    def __init__(self, path: Path):
        super().__init__(path, single_file_per_rank=True, sync_files=False, thread_count=1)
        self.fs = _CheckedFileSystem()

    @property
    def written(self) -> dict[str, dict[str, int]]:
        """File name → its size in bytes and the CRC-32 of what was to be written; on this rank."""
        return self.fs.written


@contextlib.contextmanager
def without_torch_crc32() -> Iterator[None]:
    """Keep torch.save from checksumming as well, which costs twice the time of all else."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
