"""One shard's part of the index: where each of its samples lies, how large it is, and what it must contain."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.captions import LANGUAGES
from data.column_file import ColumnFile, hash_columns, map_columns, narrow, read_notes, span, texts, write_columns
from data.encoded import Size, fitting_size
from data.images import MULTIPLE, fitted_size

META_EXTENSIONS = ("json", "txt")
_NUMBERS = ("image_offset", "image_size", "image_crc32", "meta_offset", "meta_size", "meta_crc32", "height", "width")
_REFERENCE = ("offset", "size", "crc32", "height", "width")


class Kind(NamedTuple):
    """What mixtures tell samples apart by."""

    category: str
    languages: tuple[str, ...]  # of the captions, sorted
    is_edit: bool = False

    @classmethod
    def from_json(cls, value: list) -> "Kind":
        """Take what a file's notes say."""
        category, languages, is_edit = value
        return cls(category, tuple(languages), is_edit)


@dataclass(frozen=True)
class PictureMember:
    """Another picture of a sample; offset and size in bytes, height and width in pixels as shown."""

    offset: int
    size: int
    crc32: int
    height: int
    width: int


@dataclass(frozen=True)
class SampleRecord:
    """One sample of the index; offsets and sizes in bytes, height and width in pixels as shown."""

    key: str  # "<shard file name>/<member stem>"
    shard: int
    image_offset: int
    image_size: int
    image_crc32: int
    meta_offset: int
    meta_size: int
    meta_crc32: int
    height: int
    width: int
    meta_extension: str
    group: str
    caption_tokens: dict[str, tuple[int, ...]]  # language → text tokens of each wording
    caption_weights: dict[str, tuple[float, ...]]  # language → how often each wording is chosen, against the others
    encoded_sizes: tuple[Size, ...] = ()  # of an encoded sample, whose "image" is its .safetensors; else none
    references: tuple[PictureMember, ...] | None = None  # of an edit; None = text-to-image
    mask: PictureMember | None = None  # of an edit's region

    @property
    def others(self) -> list[PictureMember]:
        """The pictures of an edit besides its target: its references, then its mask."""
        return [*(self.references or ()), *([self.mask] if self.mask is not None else [])]

    @property
    def num_bytes(self) -> int:
        """Bytes of all members that reading it takes."""
        return self.image_size + self.meta_size + sum(other.size for other in self.others)

    def trained_size(self, max_pixels: int) -> Size:
        """Return the (height, width) at which the picture is trained.

        Raises: ValueError if it is encoded at larger sizes only.
        """
        if self.encoded_sizes:
            return fitting_size(self.encoded_sizes, max_pixels)
        return fitted_size(self.height, self.width, MULTIPLE, max_pixels)

    @property
    def kind(self) -> Kind:
        """What mixtures tell it apart by."""
        return Kind(self.group, tuple(sorted(self.caption_tokens)), self.references is not None)


@dataclass(frozen=True)
class PartNotes:
    """What is known of a part without looking at its columns."""

    num_samples: int
    num_rejects: int
    digest: str  # of every key, place, size, checksum and token count
    kinds: list[Kind]
    kind_counts: list[int]
    key_prefix: str  # what all keys begin with, left out of the columns
    encoded_by: list[str]  # what made its encoded samples, each once

    @classmethod
    def read(cls, path: Path) -> "PartNotes | None":
        """Return the notes of a part's file, or None if there is no whole one."""
        notes = read_notes(path)
        return notes and cls.from_json(notes)

    @classmethod
    def from_json(cls, notes: dict) -> "PartNotes":
        """Take what `write_part` noted."""
        return cls(**notes | {"kinds": list(map(Kind.from_json, notes["kinds"]))})


class IndexPart:
    """An open part: N samples with C wordings and E encoded sizes in all, in columns.

    image_offset to width as in SampleRecord, meta_extension and kind (N,); caption_end (N,); caption_language and
    caption_tokens (C,); caption_weight (C,) or, if all are alike, none; encoded_end (N,); encoded_height and
    encoded_width (E,); the texts key, reject_key and reject_reason.
    Only if there are edits: is_edit (N,), has_mask (N,), picture_end (N,), and picture_offset to picture_width of the
    references, the mask after them.
    """

    def __init__(self, file: ColumnFile):
        self._file, self.notes = file, PartNotes.from_json(file.notes)

    @classmethod
    def open(cls, path: Path, verify: bool) -> "IndexPart | None":
        """Map a part's file; None if there is none or it is damaged, where only `verify` looks at all of it."""
        file = map_columns(path, verify)
        return file and cls(file)

    def is_encoded(self) -> bool:
        """Return whether each of its samples is encoded."""
        ends = self._file["encoded_end"]
        return bool((np.diff(ends, prepend=ends.dtype.type(0)) > 0).all())

    def record(self, row: int, shard: int, shard_name: str) -> SampleRecord:
        """Return the record of a row."""
        file, captions, weights = self._file, {}, {}
        wordings = slice(*span(file["caption_end"], row))
        languages, tokens = file["caption_language"][wordings].tolist(), file["caption_tokens"][wordings].tolist()
        chances = file["caption_weight"][wordings].tolist() or [1.0] * len(tokens)
        for number, count, weight in zip(languages, tokens, chances, strict=True):
            language = LANGUAGES[number]
            captions[language] = (*captions.get(language, ()), count)
            weights[language] = (*weights.get(language, ()), weight)
        encoded = slice(*span(file["encoded_end"], row))
        references, mask = self._edit(row)
        return SampleRecord(
            self.key(row, shard_name),
            shard,
            *(int(file[name][row]) for name in _NUMBERS),
            meta_extension=META_EXTENSIONS[file["meta_extension"][row]],
            group=self.notes.kinds[file["kind"][row]].category,
            caption_tokens=captions,
            caption_weights=weights,
            encoded_sizes=tuple(
                zip(file["encoded_height"][encoded].tolist(), file["encoded_width"][encoded].tolist(), strict=True)
            ),
            references=references,
            mask=mask,
        )

    def _edit(self, row: int) -> tuple[tuple[PictureMember, ...] | None, PictureMember | None]:
        """Return references and mask of a row; of a text-to-image sample neither."""
        file = self._file
        if "is_edit" not in file.columns or not file["is_edit"][row]:
            return None, None
        own = slice(*span(file["picture_end"], row))
        columns = (file[f"picture_{name}"][own].tolist() for name in _REFERENCE)
        pictures = [PictureMember(*numbers) for numbers in zip(*columns, strict=True)]
        return (tuple(pictures[:-1]), pictures[-1]) if file["has_mask"][row] else (tuple(pictures), None)

    def key(self, row: int, shard_name: str) -> str:
        """Return the key of a row."""
        return f"{shard_name}/{self.notes.key_prefix}{self._file.text('key', row)}"

    def rows_of(self, kinds: frozenset[Kind]) -> np.ndarray:
        """Return the rows, rising, whose samples are of one of these kinds."""
        return np.flatnonzero(np.array([kind in kinds for kind in self.notes.kinds], bool)[self._file["kind"]])

    def rejects(self, shard_name: str) -> Iterator[tuple[str, str]]:
        """Yield (key, reason) of what cannot be used."""
        for i in range(self.notes.num_rejects):
            yield f"{shard_name}/{self._file.text('reject_key', i)}", self._file.text("reject_reason", i)


@dataclass(frozen=True)
class IndexedSample:
    """A sample as found in its shard."""

    stem: str
    numbers: tuple[int, ...]  # image_offset to width
    meta_extension: str
    group: str
    captions: list[tuple[str, int, float]]  # language, text tokens, weight
    encoded_sizes: Sequence[Size] = ()
    encoded_by: str = ""
    references: Sequence[PictureMember] | None = None  # None = text-to-image
    mask: PictureMember | None = None

    @property
    def kind(self) -> Kind:
        """What mixtures tell it apart by."""
        languages = tuple(sorted({language for language, _, _ in self.captions}))
        return Kind(self.group, languages, self.references is not None)


def write_part(path: Path, samples: Sequence[IndexedSample], rejects: Sequence[tuple[str, str]]) -> None:
    """Write a part's file.  rejects: (stem, reason) of what cannot be used.  Raises: OSError."""
    kind_counts = Counter(sample.kind for sample in samples)
    number_of = {kind: n for n, kind in enumerate(sorted(kind_counts))}
    prefix = os.path.commonprefix([sample.stem for sample in samples])
    captions = [caption for sample in samples for caption in sample.captions]
    weights = [weight for _, _, weight in captions]
    sizes = [sample.encoded_sizes for sample in samples]
    encoded_by = sorted({sample.encoded_by for sample in samples if sample.encoded_by})
    columns = {
        name: narrow(column)
        for name, column in zip(
            _NUMBERS, np.array([sample.numbers for sample in samples], np.uint64).reshape(-1, len(_NUMBERS)).T,
            strict=True,
        )
    }  # fmt: skip
    columns |= {
        "meta_extension": narrow([META_EXTENSIONS.index(sample.meta_extension) for sample in samples]),
        "kind": narrow([number_of[sample.kind] for sample in samples]),
        "caption_end": narrow(np.cumsum([len(sample.captions) for sample in samples], dtype=np.uint64)),
        "caption_language": narrow([LANGUAGES.index(language) for language, _, _ in captions]),
        "caption_tokens": narrow([tokens for _, tokens, _ in captions]),
        "caption_weight": np.array(weights if set(weights) - {1.0} else [], np.float32),
        "encoded_end": narrow(np.cumsum([len(of_sample) for of_sample in sizes], dtype=np.uint64)),
        "encoded_height": narrow([height for of_sample in sizes for height, _ in of_sample]),
        "encoded_width": narrow([width for of_sample in sizes for _, width in of_sample]),
        **texts("key", [sample.stem.removeprefix(prefix) for sample in samples]),
    }
    if any(sample.references is not None for sample in samples):
        columns |= _edit_columns(samples)
    told_apart = [kind[:2] for kind in number_of]  # what is an edit is in the columns
    content = json.dumps([hash_columns(columns), prefix, told_apart, encoded_by])  # rejects do not count
    notes = {
        "num_samples": len(samples),
        "num_rejects": len(rejects),
        "digest": hashlib.sha256(content.encode()).hexdigest(),
        "kinds": list(number_of),
        "kind_counts": [kind_counts[kind] for kind in number_of],
        "key_prefix": prefix,
        "encoded_by": encoded_by,
    }
    columns |= texts("reject_key", [stem for stem, _ in rejects])
    columns |= texts("reject_reason", [reason for _, reason in rejects])
    write_columns(path, columns, notes)


def _edit_columns(samples: Sequence[IndexedSample]) -> dict[str, np.ndarray]:
    pictures = [[*(s.references or ()), *([s.mask] if s.mask is not None else [])] for s in samples]
    flat = [picture for of_sample in pictures for picture in of_sample]
    return {
        "is_edit": narrow([s.references is not None for s in samples]),
        "has_mask": narrow([s.mask is not None for s in samples]),
        "picture_end": narrow(np.cumsum([len(of_sample) for of_sample in pictures], dtype=np.uint64)),
        **{f"picture_{name}": narrow([getattr(picture, name) for picture in flat]) for name in _REFERENCE},
    }
