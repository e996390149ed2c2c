"""What lies where in a set of safetensors files: every tensor's file, byte range, shape and dtype, from the headers.

A file is 8 bytes of header length, a JSON header, and the tensors' bytes without overlap or hole.
Source: the format description in github.com/huggingface/safetensors.
"""

import json
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.byte_source import ByteSource, is_remote, open_source

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# A web server lists no folder, so these names are tried.  The first is the released one.
STEMS = ("diffusion_pytorch_model", "model")
_INDEX = ".safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_FIRST_READ = 2**18  # bytes; most headers are shorter


@dataclass(frozen=True)
class StoredFile:
    """One file, pinned as it was when its header was read."""

    location: str
    size: int  # bytes
    version: str | None  # see utils.byte_source


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies."""

    file: StoredFile
    offset: int  # of its first byte, from the start of the file
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def find_files(location: str | Path) -> tuple[list[str], dict[str, str]]:
    """Return the files that a location stands for (none if it holds none), and tensor → file as an index lists them.

    location: a .safetensors file, or a folder of them, local or a URL.
    Raises: ValueError if an index is damaged; OSError if something is there and cannot be read.
    """
    location = str(location).rstrip("/")
    if location.endswith(".safetensors"):
        return ([location] if _exists(location) else []), {}
    if is_remote(location):
        indices = [index for stem in STEMS if _exists(index := f"{location}/{stem}{_INDEX}")][:1]
        files = [] if indices else [file for stem in STEMS if _exists(file := f"{location}/{stem}.safetensors")][:1]
    else:
        indices, files = (map(str, Path(location).glob(f"*{ending}")) for ending in (_INDEX, ".safetensors"))
    listed = {
        name: f"{index.rpartition('/')[0]}/{file}" for index in indices for name, file in _read_index(index).items()
    }
    return sorted({*files, *listed.values()}), listed


def read_headers(location: str | Path) -> dict[str, StoredTensor]:
    """Return where every tensor of a safetensors file or folder lies; only headers are read.

    Raises: ValueError if there is none, if a file that the index names is missing, if a file is damaged, if the index
    and the files disagree, or if two files hold the same tensor; OSError if a file cannot be read.
    """
    files, listed = find_files(location)
    if not files:
        raise ValueError(
            f"no .safetensors file in {location}; give a file, or a folder in the released layout with weights in it"
            + (f" (of a URL's folder the names {STEMS[0]}* and {STEMS[1]}* are known)" if is_remote(location) else "")
        )
    where: dict[str, StoredTensor] = {}
    with ThreadPoolExecutor(8) as pool:
        for tensors in pool.map(_read_file_header, files):
            for name, tensor in tensors.items():
                if name in where:
                    raise ValueError(
                        f"{name} is in both {where[name].file.location} and {tensor.file.location}; keep one"
                    )
                where[name] = tensor
    found = {name: tensor.file.location for name, tensor in where.items()}
    if listed and (wrong := sorted(n for n in listed.keys() | found.keys() if found.get(n) != listed.get(n))):
        raise ValueError(f"the index in {location} and its files disagree on {len(wrong)} tensors, first {wrong[0]}")
    return where


def _exists(location: str) -> bool:
    try:
        open_source(location).close()
    except FileNotFoundError:
        return False
    return True


def _read_index(location: str) -> dict[str, str]:
    """Return an index's map from tensor name to file name."""
    try:
        files = json.loads(_read(location))["weight_map"]
        if not all(isinstance(file, str) and file == Path(file).name for file in files.values()):
            raise ValueError("a file name in it is not a plain name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{location} is not an index of safetensors files ({error!r}); copy it again") from error
    return files


def _read(location: str) -> bytearray:
    source = open_source(location)
    content = bytearray(source.size)
    source.read_into(0, memoryview(content))
    source.close()
    return content


def _read_file_header(location: str) -> dict[str, StoredTensor]:
    """Return where each tensor of one file lies, having checked that they fill the file exactly."""
    try:
        source = open_source(location)
    except FileNotFoundError:
        raise ValueError(f"{location} is not there; copy it too") from None
    try:
        header, start = _header(source)
        return _parse(header, start, StoredFile(location, source.size, source.version))
    except ValueError as error:
        raise ValueError(f"{location} is not a sound safetensors file: {error}; copy it again") from error
    finally:
        source.close()


def _header(source: ByteSource) -> tuple[bytes, int]:
    """Return a file's header and the offset of its first tensor byte."""
    first = bytearray(min(source.size, _FIRST_READ))
    source.read_into(0, memoryview(first))
    length = int.from_bytes(first[:8], "little")
    if source.size < 8 or not 2 <= length <= _MAX_HEADER:
        raise ValueError(f"its header would be {length} bytes long; the file has {source.size}")
    if 8 + length > source.size:
        raise ValueError(f"it is cut short: its header is {length} bytes long, the file {source.size}")
    rest = bytearray(max(0, 8 + length - len(first)))
    source.read_into(len(first), memoryview(rest))
    return bytes(first + rest)[8 : 8 + length], 8 + length


def _parse(header: bytes, start: int, file: StoredFile) -> dict[str, StoredTensor]:
    try:
        entries = json.loads(header, object_pairs_hook=_without_duplicates)
        if not isinstance(entries, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:  # of the encoding, of JSON, or a duplicate
        raise ValueError(f"its header cannot be read ({error})") from error
    entries.pop("__metadata__", None)
    tensors, ranges = {}, []
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise ValueError(f"its entry for {name} is damaged: {entry}")
        if dtype not in DTYPES:
            raise ValueError(f"{name} has the unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
        tensors[name] = StoredTensor(file, start + begin, shape, DTYPES[dtype])
        if end - begin != tensors[name].num_bytes:
            raise ValueError(f"{name}, {dtype} {shape}, needs {tensors[name].num_bytes} bytes and has {end - begin}")
        ranges.append((begin, end, name))
    _check_filled(ranges, file.size - start)
    return tensors


def _without_duplicates(pairs: Iterable[tuple[str, object]]) -> dict:
    result = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key} stands in it twice")
        result[key] = value
    return result


def _check_filled(ranges: list[tuple[int, int, str]], size: int) -> None:
    """Raise ValueError unless the ranges fill `size` bytes without overlap or hole."""
    filled = 0
    for begin, end, name in sorted(ranges):
        if begin < filled:
            raise ValueError(f"{name} overlaps the tensor before it by {filled - begin} bytes")
        if begin > filled:
            raise ValueError(f"there is a hole of {begin - filled} bytes before {name}")
        filled = end
    if filled > size:
        raise ValueError(f"it is cut short: its tensors need {filled} bytes, it has {size}")
    if filled < size:
        raise ValueError(f"it has {size - filled} bytes too many after its last tensor")
