"""Safetensors files written one tensor at a time: names, shapes and dtypes are known before any value is.

A file is 8 bytes that say how long its header is, a JSON header with the place of every tensor, and the tensors' bytes
without gaps.
Source: the format's description in the README of github.com/huggingface/safetensors.
"""

import json
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ENTRY_BYTES = 160  # no header entry is longer, its name aside
_ALIGNMENT = 8  # the header is padded so that the first tensor starts at a multiple of this


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, specs: dict[str, TensorSpec], read: Callable[[str], Tensor], metadata: dict[str, str]
) -> None:
    """Write one file and make it durable; it holds the tensors in the order of `specs`.

    read: gives the tensor of a name, of the shape and dtype of its spec; called once a name, in order.
    """
    with path.open("xb") as file:
        file.write(_header(specs, metadata))
        for name, spec in specs.items():
            tensor = read(name)
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(spec.shape), spec.dtype), f"{name} is not {spec}"
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is read
        file.flush()
        os.fsync(file.fileno())


def write_sharded(
    folder: Path,
    stem: str,
    specs: dict[str, TensorSpec],
    read: Callable[[str], Tensor],
    max_bytes: int,
    metadata: dict[str, str],
) -> None:
    """Write files of at most `max_bytes` and their index, named as `diffusers` does; one file needs no index.

    A tensor that is larger than `max_bytes` has a file of its own.
    """
    shards = split_shards(specs, max_bytes - len(_header({}, metadata)))
    if len(shards) == 1:
        write_safetensors(folder / f"{stem}.safetensors", specs, read, metadata)
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        name = f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, read, metadata)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": sum(spec.num_bytes for spec in specs.values())}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def split_shards(specs: dict[str, TensorSpec], max_bytes: int) -> list[dict[str, TensorSpec]]:
    """Split into runs of neighbours whose values and header entries take at most `max_bytes` each."""
    shards: list[dict[str, TensorSpec]] = [{}]
    used = 0
    for name, spec in specs.items():
        size = spec.num_bytes + len(name.encode()) + _ENTRY_BYTES
        if shards[-1] and used + size > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = spec
        used += size
    return shards


def _header(specs: dict[str, TensorSpec], metadata: dict[str, str]) -> bytes:
    """Return a file's header and, in front of it, its length."""
    content: dict = {"__metadata__": {"format": "pt"} | metadata}
    end = 0
    for name, spec in specs.items():
        start, end = end, end + spec.num_bytes
        content[name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
