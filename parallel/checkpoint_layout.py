"""Which rank writes which part of which tensor to which file, and the table of contents that says where all of it is.

Who writes what is planned by `torch.distributed.checkpoint`: what several ranks hold alike is written once, by the rank
with the least to write.  Files are the bare bytes of tensors' parts, end to end; index.json says where each lies.
"""

import json
import math
from dataclasses import dataclass

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from parallel.distributed import gather_results, num_ranks, on_main, rank

INDEX = "index.json"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that this rank writes: `start` to `stop` are its bytes' place among all that it writes.

    offsets, shape: which part of `item` it is.
    """

    item: WriteItem
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout:
    """What this rank writes, in which files; holds for tensors of the same names, shapes, dtypes and cut.

    files: file name → its pieces, which follow each other.  num_bytes: of this rank; total_bytes, total_files: of all.
    """

    def __init__(self, tensors: dict[str, Tensor], file_bytes: int):
        """Plan; every rank takes part.

        file_bytes: a file that has reached this size gets no further piece, and no piece is larger.
        Raises: ValueError on every rank if the ranks' tensors do not fit together.
        """
        self.signature = signature(tensors)
        self._planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        try:
            self._planner.set_up_planner(dict(tensors), None, rank() == 0)
            plans = gather_results(self._planner.create_local_plan)
            plans, metadata = on_main(lambda: self._planner.create_global_plan(plans))
        except OSError as error:
            raise ValueError(f"the ranks' tensors do not fit together: {error}") from error
        self._shapes = {
            name: (tuple(entry.size), entry.properties.dtype) for name, entry in metadata.state_dict_metadata.items()
        }
        # Large elements first: so each piece starts at a multiple of its elements' size.
        items = sorted(plans[rank()].items, key=lambda item: -item.tensor_data.properties.dtype.itemsize)
        self.files: dict[str, list[Piece]] = {}
        end, file_start, file = 0, 0, None
        for item in items:
            itemsize = item.tensor_data.properties.dtype.itemsize
            for offsets, shape in _cut(tuple(item.tensor_data.chunk.sizes), file_bytes // itemsize):
                size, filled = math.prod(shape) * itemsize, end - file_start
                if file is None or filled >= file_bytes or (filled and filled + size > 2**32):
                    file, file_start = f"rank-{rank():05d}-{len(self.files):05d}.bin", end
                    self.files[file] = []
                self.files[file].append(Piece(item, offsets, shape, end, end + size))
                end += size
        self.num_bytes = end
        of_all = gather_results(lambda: (end, len(self.files)))
        self.total_bytes, self.total_files = sum(size for size, _ in of_all), sum(count for _, count in of_all) + 2

    def local_tensors(self, tensors: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return file name → the parts of `tensors` that its pieces are."""
        self._planner.set_up_planner(dict(tensors), None, rank() == 0)
        return {file: [self._resolve(piece) for piece in pieces] for file, pieces in self.files.items()}

    def _resolve(self, piece: Piece) -> Tensor:
        part = self._planner.resolve_data(piece.item).detach()
        return part[tuple(map(slice, piece.offsets, map(int.__add__, piece.offsets, piece.shape)))]

    def parts(self, written: dict[str, dict]) -> list[tuple]:
        """Return (name, offsets, shape, file, first byte, number of bytes, crc32) of each piece of this rank."""
        found = []
        for file, pieces in self.files.items():
            for piece, crc in zip(pieces, written[file]["pieces"], strict=True):
                place = (file, piece.start - pieces[0].start, piece.stop - piece.start, crc)
                offsets = list(map(int.__add__, piece.item.tensor_data.chunk.offsets, piece.offsets))
                found.append((piece.item.index.fqn, offsets, list(piece.shape), *place))
        return found

    def index(self, parts: list[tuple]) -> bytes:
        """Return the table of contents; parts: of all ranks."""
        tensors = {
            name: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "parts": []}
            for name, (shape, dtype) in sorted(self._shapes.items())
        }
        for name, *part in sorted(parts):
            tensors[name]["parts"].append(part)
        return json.dumps({"tensors": tensors}).encode()


def _cut(shape: tuple[int, ...], max_elements: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets, shape) of parts of a tensor that hold at most so many elements each, in the order of memory."""
    if math.prod(shape) <= max_elements:
        return [((0,) * len(shape), shape)]
    dim = next(dim for dim, length in enumerate(shape) if length > 1)
    step = max(1, max_elements // math.prod(shape[dim + 1 :]))
    parts = []
    for first in range(0, shape[dim], step):
        part = (*shape[:dim], min(step, shape[dim] - first), *shape[dim + 1 :])
        for offsets, cut in _cut(part, max_elements):
            parts.append(((*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]), cut))
    return parts


def signature(tensors: dict[str, Tensor]) -> tuple:
    """Return what a layout depends on."""
    return num_ranks(), *(
        (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None))
        for name, tensor in tensors.items()
    )


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in host memory; of a contiguous one that lies there no copy is made."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


@dataclass(frozen=True)
class Place:
    """Where a part of a tensor lies: its file, first byte and number of bytes, with their checksum."""

    file: str
    start: int
    num_bytes: int
    crc32: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_index(data: bytes) -> Metadata:
    """Return a table of contents as `torch.distributed.checkpoint` knows it; its storage_data are `Place`s."""
    tensors, places = {}, {}
    for name, entry in json.loads(data)["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        chunks = []
        for offsets, shape, file, start, num_bytes, crc in entry["parts"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
            at = MetadataIndex(name, torch.Size(offsets))
            places[at] = Place(file, start, num_bytes, crc, tuple(shape), dtype)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["shape"]), chunks)
    return Metadata(tensors, storage_data=places)
