"""Reads that fill this rank's shards from safetensors files: which byte ranges, and into which memory."""

import ctypes
import math
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from parallel.safetensors_files import StoredTensor
from utils.byte_source import ByteSource

NUM_THREADS = 8  # reads in flight
Read = tuple[ByteSource, list["Rows"]]  # see plan_reads


@dataclass(frozen=True)
class Rows:
    """Equally long runs of elements at equal distances in a file, and where they go."""

    offset: int  # of the first byte in the file
    stride: int  # bytes from one row's start to the next's
    dtype: torch.dtype  # in the file
    target: Tensor  # (rows, elements), contiguous, of any dtype and device

    @property
    def row_bytes(self) -> int:
        return self.target.shape[1] * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + (len(self.target) - 1) * self.stride + self.row_bytes

    @property
    def is_dense(self) -> bool:
        return len(self.target) == 1 or self.stride == self.row_bytes

    @property
    def is_in_place(self) -> bool:
        """Whether the bytes of the file are those of the target."""
        return self.dtype == self.target.dtype and self.target.device.type == "cpu"

    def split(self, num_rows: int) -> Iterator["Rows"]:
        """Cut into parts of at most `num_rows` rows."""
        for start in range(0, len(self.target), num_rows):
            target = self.target[start : start + num_rows]
            yield Rows(self.offset + start * self.stride, self.stride, self.dtype, target)


def shard_rows(stored: StoredTensor, local: Tensor, box: tuple[slice, ...]) -> Iterator[Rows]:
    """Return the rows of a stored tensor's box, in the order of the file.

    local: the memory to fill, contiguous, of the box's shape.
    box: one slice a dimension of the stored tensor.
    """
    assert local.is_contiguous() and not local.is_meta, "a shard needs memory of its own"
    if not local.numel():
        return
    shape, itemsize = stored.shape, stored.dtype.itemsize
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    # The innermost dimension that is cut, and all inside it, make one run of the file.
    cut = max((dim for dim, part in enumerate(box) if part.stop - part.start < shape[dim]), default=0)
    local = local.view(*local.shape[:cut], -1)
    outer = [range(part.start, part.stop) for part in box[: max(0, cut - 1)]]
    for index in product(*outer):
        target = local[tuple(i - part.start for i, part in zip(index, box, strict=False))]
        starts = [*index, *(part.start for part in box[len(index) : cut + 1])]
        offset = stored.offset + sum(i * stride for i, stride in zip(starts, strides, strict=False))
        if cut:
            yield Rows(offset, strides[cut - 1], stored.dtype, target)
        else:
            yield _dense(offset, stored.dtype, target)


def plan_reads(rows: Iterable[Rows], source: ByteSource) -> list[list[Rows]]:
    """Group rows of one file into reads of about the size that suits the source.

    A group is read as one range where no gap in it is larger than the source's cheap one; a group of wider rows is one
    read a row.
    """
    parts: list[Rows] = []
    for part in rows:
        if part.is_dense or part.row_bytes > source.request_bytes:
            for run in [part] if part.is_dense else part.split(1):
                elements = _dense(run.offset, run.dtype, run.target)
                parts += elements.split(source.request_bytes // run.dtype.itemsize)
        else:
            row = part.stride if _one_range(part, source) else part.row_bytes
            parts += part.split(max(1, source.request_bytes // row))
    parts.sort(key=lambda part: part.offset)
    reads = [parts[:1]] if parts else []
    for before, part in pairwise(parts):
        joined = part.end - reads[-1][0].offset <= source.request_bytes and part.offset - before.end <= source.cheap_gap
        if joined and _one_range(before, source) and _one_range(part, source):
            reads[-1].append(part)
        else:
            reads.append([part])
    return reads


def run_reads(reads: Iterable[Read]) -> int:
    """Carry out reads, several at a time, and return how many bytes were read.

    Raises: OSError of the first read that failed; those not yet begun are dropped.
    """
    scratch = threading.local()  # a buffer a thread: fresh memory for every read would cost more than the read
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            return sum(pool.map(lambda read: _run(*read, scratch), reads))
        finally:
            pool.shutdown(cancel_futures=True)


def _dense(offset: int, dtype: torch.dtype, target: Tensor) -> Rows:
    """Return a contiguous range as rows of one element, so that it can be cut anywhere."""
    return Rows(offset, dtype.itemsize, dtype, target.reshape(-1, 1))


def _one_range(rows: Rows, source: ByteSource) -> bool:
    return rows.is_dense or rows.stride - rows.row_bytes <= source.cheap_gap


def _run(source: ByteSource, group: list[Rows], scratch: threading.local) -> int:
    """Carry out one read."""
    first = group[0]
    if len(group) == 1 and first.is_dense and first.is_in_place:
        source.read_into(first.offset, _memory(first.target))
        return first.end - first.offset
    if _one_range(first, source):
        start, num_bytes = first.offset, group[-1].end - first.offset
        buffer = _buffer(scratch, num_bytes)
        source.read_into(start, _memory(buffer))
        for rows in group:
            part = buffer[rows.offset - start : rows.end - start]
            if part.storage_offset() % rows.dtype.itemsize:
                part = part.clone()  # a view as another dtype has to be aligned
            values = part.view(rows.dtype)
            _copy(rows.target, values.as_strided(rows.target.shape, (rows.stride // rows.dtype.itemsize, 1)))
        return num_bytes
    num_bytes, row_bytes = len(first.target) * first.row_bytes, first.row_bytes
    source.expect(first.offset, first.end - first.offset)
    packed = first.target if first.is_in_place else _buffer(scratch, num_bytes).view(first.dtype)
    memory = _memory(packed)
    for i in range(len(first.target)):
        source.read_into(first.offset + i * first.stride, memory[i * row_bytes : (i + 1) * row_bytes])
    if packed is not first.target:
        _copy(first.target, packed.view(first.target.shape))
    return num_bytes


def _copy(target: Tensor, values: Tensor) -> None:
    """Copy to the device first and convert there."""
    target.copy_(values.to(target.device))


def _memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which has to outlive the view."""
    # Not through numpy: a tensor that numpy has seen can never be resized again, which sharding libraries do.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _buffer(scratch: threading.local, num_bytes: int) -> Tensor:
    """Return this thread's buffer, uint8 (num_bytes,)."""
    if getattr(scratch, "buffer", torch.empty(0)).numel() < num_bytes:
        scratch.buffer = torch.empty(num_bytes, dtype=torch.uint8)
    return scratch.buffer[:num_bytes]
