"""Encoded samples: a picture's latents and its captions' text states in one safetensors file, a shard's member.

A sample KEY has the members KEY.json, its captions as for a picture, and KEY.safetensors with the tensors

    mean.HxW, std.HxW    (C, h, w): the VAE's normalised posterior of the picture at H x W pixels, for each size
    text.LANGUAGE.N      (T, D): the text states of the N-th wording in a language, in the order of `parse_captions`
    text.none.empty      (T, D): those of the empty prompt, for dropped captions

all bfloat16 or all float32, and in its metadata, under the name of this format, what made it: VAE, text encoder,
tokenizer and template.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor

EXTENSION = "safetensors"
_FORMAT = "encoded-1"
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_EMPTY = "text.none.empty"
_MAX_HEADER = 1 << 20  # bytes; one of a hundred wordings has 10 KiB
Size = tuple[int, int]  # height, width in pixels


def write_encoded(
    latents: Mapping[Size, tuple[Tensor, Tensor]],
    states: Mapping[str, Sequence[Tensor]],
    empty: Tensor,
    encoded_by: str,
    dtype: torch.dtype = torch.bfloat16,
) -> bytes:
    """Return the content of a member.

    latents: size → mean and std, each (C, h, w); states: language → (T, D) of each wording; empty: (T, D) of the empty
    prompt; dtype: bfloat16 or float32, in which all are kept.
    """
    tensors = {f"mean.{h}x{w}": mean for (h, w), (mean, _) in latents.items()}
    tensors |= {f"std.{h}x{w}": std for (h, w), (_, std) in latents.items()}
    tensors |= {f"text.{language}.{n}": x for language, texts in states.items() for n, x in enumerate(texts)}
    tensors = {name: x.detach().to("cpu", dtype).contiguous() for name, x in (tensors | {_EMPTY: empty}).items()}
    return safetensors.torch.save(tensors, {_FORMAT: encoded_by})  # one entry: the library shuffles several


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies in a member."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class EncodedMember:
    """A member's content, of which only what is asked for becomes a tensor.

    sizes: those of the picture, the smallest area first.
    Raises: ValueError if it is no sound member.
    """

    def __init__(self, data: bytes | memoryview):
        self._data = data
        try:
            self._tensors, metadata = _read_header(data)
            self.encoded_by = metadata.get(_FORMAT)
            sizes = [_size(name) for name in self._tensors if name.startswith("mean.")]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its .safetensors is not a sound encoded sample: {error}") from error
        self.sizes: list[Size] = sorted(sizes, key=lambda size: (math.prod(size), size))
        if not self.encoded_by or not sizes or _EMPTY not in self._tensors:
            raise ValueError(
                f"its .safetensors has the metadata {sorted(metadata)} and {len(sizes)} sizes; an encoded sample has "
                f"{_FORMAT}, at least one size, and the empty prompt"
            )

    def latents(self, size: Size) -> tuple[Tensor, Tensor]:
        """Return mean and std, (C, h, w) each, of the picture at a size."""
        mean, std = (self._tensor(f"{part}.{size[0]}x{size[1]}") for part in ("mean", "std"))
        if mean.shape != std.shape:
            raise ValueError(f"its mean is {tuple(mean.shape)}, its std {tuple(std.shape)} at {size}")
        return mean, std

    def states(self, language: str, wording: int) -> Tensor:
        """Return the text states (T, D) of a wording."""
        return self._tensor(f"text.{language}.{wording}")

    def empty_states(self) -> Tensor:
        """Return the text states (T, D) of the empty prompt."""
        return self._tensor(_EMPTY)

    def count_tokens(self, languages: Sequence[str]) -> list[int]:
        """Return T of each of a sample's wordings, given their languages.  Raises: ValueError if one has no states."""
        names = [f"text.{language}.{languages[:i].count(language)}" for i, language in enumerate(languages)]
        for name in names:
            if len(self._entry(name).shape) != 2:
                raise ValueError(f"its {name} is {self._entry(name).shape}, not tokens by width")
        return [self._entry(name).shape[0] for name in names]

    def _entry(self, name: str) -> _Stored:
        if name not in self._tensors:
            raise ValueError(f"its .safetensors has no {name}; it has {', '.join(sorted(self._tensors)[:20])}")
        return self._tensors[name]

    def _tensor(self, name: str) -> Tensor:
        stored = self._entry(name)
        # A copy of its own, so that the other captions of a sample are not kept in memory with it.
        own = bytearray(memoryview(self._data)[stored.start : stored.stop])
        return torch.frombuffer(own, dtype=stored.dtype).view(stored.shape)


def _read_header(data: bytes | memoryview) -> tuple[dict[str, _Stored], dict[str, str]]:
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(_MAX_HEADER, len(data) - 8):
        raise ValueError(f"its header would be {length} bytes long")
    entries = json.loads(bytes(data[8 : 8 + length]))
    metadata, tensors = entries.pop("__metadata__"), {}
    for name, entry in entries.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = stored = _Stored(_DTYPES[entry["dtype"]], tuple(entry["shape"]), start, stop)
        if (
            not 8 + length <= start < stop <= len(data)
            or math.prod(stored.shape) * stored.dtype.itemsize != stop - start
        ):
            raise ValueError(f"{name} does not lie inside it")
    return tensors, metadata


def _size(name: str) -> Size:
    height, width = name.partition(".")[2].split("x")
    return int(height), int(width)


def fitting_size(sizes: Iterable[Size], max_pixels: int) -> Size:
    """Return the largest of `sizes` with at most `max_pixels`.  Raises: ValueError if there is none."""
    sizes = list(sizes)
    fitting = [size for size in sizes if math.prod(size) <= max_pixels]
    if not fitting:
        height, width = min(sizes, key=math.prod)
        raise ValueError(
            f"the smallest encoded size, {height} x {width}, has {height * width} pixels, --max_pixels allows "
            f"{max_pixels}; raise it, or encode the pictures smaller"
        )
    return max(fitting, key=math.prod)
