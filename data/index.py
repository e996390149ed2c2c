"""The index of a set of shards: where each sample lies, how large it is, and what it must contain.

Built with one pass over each shard, then kept in a cache file a shard; columns, not objects, so that 10^8 samples fit.
"""

import hashlib
import logging
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data.captions import parse_captions
from data.images import open_image, shown_size

FORMAT = "1"
IMAGE_EXTENSIONS = {"png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff"}
META_EXTENSIONS = ("json", "txt")
log = logging.getLogger("train")
_NUMBERS = (
    "image_offset", "image_size", "image_crc32", "meta_offset", "meta_size", "meta_crc32", "height", "width",
)  # fmt: skip


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


class Index:
    """Every usable sample of `shards`, in shard order; `rejects` lists (key, reason) of those that are not."""

    def __init__(self, shards: Sequence[str], parts: Sequence[dict[str, np.ndarray]]):
        self.shards = list(shards)
        self._starts = np.cumsum([0] + [len(part["key"]) for part in parts])
        self._parts = list(parts)
        self.rejects = [
            (str(k), str(r)) for part in parts for k, r in zip(part["reject_key"], part["reject_reason"], strict=True)
        ]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, i: int) -> SampleRecord:
        if not 0 <= i < len(self):
            raise IndexError(i)
        shard = int(np.searchsorted(self._starts, i, side="right")) - 1
        part, row = self._parts[shard], i - int(self._starts[shard])
        captions: dict[str, list[int]] = {}
        for c in range(part["caption_start"][row], part["caption_start"][row + 1]):
            captions.setdefault(str(part["caption_language"][c]), []).append(int(part["caption_tokens"][c]))
        return SampleRecord(
            key=f"{Path(self.shards[shard]).name}/{part['key'][row]}",
            shard=shard,
            **{name: int(part[name][row]) for name in _NUMBERS},
            meta_extension=str(part["meta_extension"][row]),
            group=str(part["group"][row]),
            caption_tokens={language: tuple(tokens) for language, tokens in captions.items()},
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every key, size, checksum and token count, in order: equal for two runs on the same data."""
        digest = hashlib.sha256()
        for shard, part in zip(self.shards, self._parts, strict=True):
            digest.update(Path(shard).name.encode())
            for name in sorted(part):
                digest.update(name.encode() + part[name].tobytes())
        return digest.hexdigest()


def build_index(
    shards: Sequence[str], count_tokens: Callable[[str], int], tokenizer_id: str, cache_folder: Path
) -> Index:
    """Index webdataset shards, from the cache where a shard has not changed.

    count_tokens: text tokens of a caption; tokenizer_id: names its tokenizer, so that another one indexes anew.
    Several processes may do this at once.  A rejected sample is logged, once, with its reason.
    Raises: ValueError for a shard that is missing, cut short or no tar file, and if two shards share a name.
    """
    names = [Path(shard).name for shard in shards]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two shards are called {twice}; sample keys need different file names")
    parts = [_cached_part(shard, count_tokens, tokenizer_id, Path(cache_folder) / "index") for shard in shards]
    index = Index(shards, parts)
    for key, reason in index.rejects[:20]:
        log.warning("left out %s: %s", key, reason)
    if len(index.rejects) > 20:
        log.warning("left out %d samples in all", len(index.rejects))
    return index


def _cached_part(shard: str, count_tokens: Callable, tokenizer_id: str, folder: Path) -> dict[str, np.ndarray]:
    try:
        status = os.stat(shard)
    except OSError as error:
        raise ValueError(f"shard {shard} cannot be read: {error.strerror}") from error
    name = f"{FORMAT}\0{Path(shard).resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{tokenizer_id}"
    path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.npz"
    try:
        with np.load(path, allow_pickle=False) as cached:  # the zip's own CRCs find a damaged file
            return {key: cached[key] for key in cached.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        pass
    part = _index_shard(shard, count_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
        np.savez(file, **part)
    os.replace(file.name, path)
    return part


def _index_shard(shard: str, count_tokens: Callable[[str], int]) -> dict[str, np.ndarray]:
    members: dict[str, dict[str, tuple[int, bytes]]] = {}  # stem → extension → (offset, content)
    rows: list[dict] = []
    rejects: list[tuple[str, str]] = []
    captions: list[tuple[int, str, int]] = []  # row, language, tokens

    def finish(stem: str, found: dict[str, tuple[int, bytes]]) -> None:
        try:
            row, wordings = _read_sample(found)
        except ValueError as error:
            rejects.append((f"{Path(shard).name}/{stem}", str(error)))
            return
        for language, texts in wordings.items():
            captions.extend((len(rows), language, count_tokens(text)) for text in texts)
        rows.append({"key": stem} | row)

    for stem, extension, offset, content in _tar_members(shard):
        # webdataset's rule: neighbouring members with one stem are one sample.
        if stem not in members:
            for done, found in members.items():
                finish(done, found)
            members.clear()
        members.setdefault(stem, {})[extension] = (offset, content)
    for done, found in members.items():
        finish(done, found)

    counts = np.bincount([row for row, _, _ in captions], minlength=len(rows)) if rows else np.zeros(0, np.int64)
    text = np.array  # of str: numpy's fixed-width unicode, which needs no pickle
    return {
        "key": text([row["key"] for row in rows], dtype=str),
        **{name: np.array([row[name] for row in rows], np.int64) for name in _NUMBERS},
        "meta_extension": text([row["meta_extension"] for row in rows], dtype=str),
        "group": text([row["group"] for row in rows], dtype=str),
        "caption_start": np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        "caption_language": text([language for _, language, _ in captions], dtype=str),
        "caption_tokens": np.array([tokens for _, _, tokens in captions], np.int32),
        "reject_key": text([key for key, _ in rejects], dtype=str),
        "reject_reason": text([reason for _, reason in rejects], dtype=str),
    }


def _read_sample(found: dict[str, tuple[int, bytes]]) -> tuple[dict, dict[str, list[str]]]:
    """Return a sample's columns and captions.  Raises: ValueError with the reason why it cannot be used."""
    image_extension = next((e for e in found if e.rsplit(".", 1)[-1] in IMAGE_EXTENSIONS), None)
    meta_extension = next((e for e in META_EXTENSIONS if e in found), None)
    if image_extension is None or meta_extension is None:
        raise ValueError(f"it has {sorted(found)}, but needs a picture and a .json or .txt")
    (image_offset, image), (meta_offset, meta) = found[image_extension], found[meta_extension]
    captions, group = parse_captions(meta_extension, meta)
    height, width = shown_size(open_image(image))
    row = dict(
        image_offset=image_offset, image_size=len(image), image_crc32=zlib.crc32(image),
        meta_offset=meta_offset, meta_size=len(meta), meta_crc32=zlib.crc32(meta),
        height=height, width=width, meta_extension=meta_extension, group=group,
    )  # fmt: skip
    return row, captions


def _tar_members(shard: str):
    """Yield (stem, extension, offset, content) of each file in a tar, in order.

    Raises: ValueError if the tar is damaged or cut, also where the cut falls between two members: a whole tar ends in
    two blocks of zeros.
    """
    try:
        with open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.isfile():
                    folder, _, base = member.name.rpartition("/")
                    stem, _, extension = base.partition(".")
                    content = os.pread(file.fileno(), member.size, member.offset_data)
                    if len(content) != member.size:
                        raise ValueError(f"shard {shard} is cut short inside {member.name}; copy it again")
                    yield (f"{folder}/{stem}" if folder else stem), extension.lower(), member.offset_data, content
                end = member.offset_data + -(-member.size // 512) * 512
            tail = os.pread(file.fileno(), 1024, end) if archive.members else os.pread(file.fileno(), 1024, 0)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"shard {shard} cannot be read as a tar file: {error}") from error
    if tail != bytes(1024):
        raise ValueError(f"shard {shard} has no end mark: it is cut short between two samples; copy it again")
