"""The index of a set of shards: where each sample lies, how large it is, and what it must contain.

Built with one pass over each shard, then kept in a cache file a shard; columns, not objects, so that 10^8 samples fit.
"""

import hashlib
import io
import logging
import os
import tarfile
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from data.captions import LANGUAGES, parse_captions
from data.encoded import EXTENSION, EncodedMember, Size, fitting_size
from data.images import MULTIPLE, fitted_size, shown_size

FORMAT = "3"
IMAGE_EXTENSIONS = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff")
META_EXTENSIONS = ("json", "txt")
log = logging.getLogger("train")
_MAX_REJECTS_LOGGED = 20
_DIGEST_BYTES = hashlib.sha256().digest_size
_NUM_NUMBERS = 8
_MAX_RECORDS = 8192  # kept as objects: a small set is put together once, not at every visit


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
    encoded_sizes: tuple[Size, ...] = ()  # of an encoded sample, whose "image" is its .safetensors; else none

    def trained_size(self, max_pixels: int) -> Size:
        """Return the (height, width) at which the picture is trained.

        Raises: ValueError if it is encoded at larger sizes only.
        """
        if self.encoded_sizes:
            return fitting_size(self.encoded_sizes, max_pixels)
        return fitted_size(self.height, self.width, MULTIPLE, max_pixels)


class Index:
    """Every usable sample of `shards`, in shard order; `rejects` lists (key, reason) of those that are not.

    A shard's part, N samples with C wordings in all: numbers (N, 8) int64, columns image_offset to width as in
    SampleRecord; meta_extension (N,) uint8; caption_end (N,) int64; caption_language (C,) uint8 and caption_tokens (C,)
    int32; encoded_sizes (S, 2) int32 with encoded_size_end (N,) int64; and key, group, encoded_by (of the shard, each
    once), reject_key, reject_reason, each UTF-8 bytes `<name>` uint8 with `<name>_end` int64.
    """

    def __init__(self, shards: Sequence[str], parts: Sequence[dict[str, np.ndarray]]):
        self.shards = list(shards)
        self._names = [Path(shard).name for shard in shards]
        self._parts = list(parts)
        self._record = lru_cache(_MAX_RECORDS)(self._make_record)
        self._starts = np.cumsum([0] + [len(part["numbers"]) for part in parts])
        self.rejects = [
            (f"{name}/{_string(part, 'reject_key', i)}", _string(part, "reject_reason", i))
            for name, part in zip(self._names, parts, strict=True)
            for i in range(len(part["reject_key_end"]))
        ]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, i: int) -> SampleRecord:
        return self._record(i)

    def _make_record(self, i: int) -> SampleRecord:
        shard, part, row = self._locate(i)
        captions: dict[str, tuple[int, ...]] = {}
        wordings = slice(*_span(part["caption_end"], row))
        languages, tokens = part["caption_language"][wordings].tolist(), part["caption_tokens"][wordings].tolist()
        for language, count in zip(languages, tokens, strict=True):
            captions[LANGUAGES[language]] = (*captions.get(LANGUAGES[language], ()), count)
        return SampleRecord(
            self.key(i),
            shard,
            *part["numbers"][row].tolist(),
            meta_extension=META_EXTENSIONS[part["meta_extension"][row]],
            group=_string(part, "group", row),
            caption_tokens=captions,
            encoded_sizes=tuple(
                map(tuple, part["encoded_sizes"][slice(*_span(part["encoded_size_end"], row))].tolist())
            ),
        )

    def key(self, i: int) -> str:
        """Return the key of sample `i`, which no other sample has."""
        shard, part, row = self._locate(i)
        return f"{self._names[shard]}/{_string(part, 'key', row)}"

    def check_encoded_by(self, identity: str) -> None:
        """Raise ValueError if a shard holds latents or text states of other encoders than `identity` names."""
        for shard, part in zip(self.shards, self._parts, strict=True):
            for other in (_string(part, "encoded_by", i) for i in range(len(part["encoded_by_end"]))):
                if other != identity:
                    raise ValueError(
                        f"shard {shard} was encoded by {other}, --model has {identity}; give the model that it was "
                        "encoded with, or encode the raw shards again (python -m tools.prepare_encode)"
                    )

    def _locate(self, i: int) -> tuple[int, dict[str, np.ndarray], int]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        shard = int(self._starts.searchsorted(i, side="right")) - 1
        return shard, self._parts[shard], i - int(self._starts[shard])

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every key, place, size, checksum and token count, in order: equal for runs on the same shards."""
        digest = hashlib.sha256()
        for shard, part in zip(self._names, self._parts, strict=True):
            digest.update(shard.encode())
            for name in sorted(name for name in part if not name.startswith("reject")):
                digest.update(name.encode() + part[name].tobytes())
        return digest.hexdigest()


def _string(part: dict[str, np.ndarray], name: str, row: int) -> str:
    return str(part[name][slice(*_span(part[f"{name}_end"], row))].data, "utf-8")


def _span(ends: np.ndarray, row: int) -> tuple[int, int]:
    return (int(ends[row - 1]) if row else 0), int(ends[row])


def _strings(name: str, values: list[str]) -> dict[str, np.ndarray]:
    encoded = [value.encode() for value in values]
    ends = np.cumsum([len(value) for value in encoded], dtype=np.int64)
    return {name: np.frombuffer(b"".join(encoded), np.uint8), f"{name}_end": ends}


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
    for key, reason in index.rejects[:_MAX_REJECTS_LOGGED]:
        log.warning("left out %s: %s", key, reason)
    if len(index.rejects) > _MAX_REJECTS_LOGGED:
        log.warning("left out %d of %d samples in all", len(index.rejects), len(index.rejects) + len(index))
    return index


def _cached_part(shard: str, count_tokens: Callable, tokenizer_id: str, folder: Path) -> dict[str, np.ndarray]:
    try:
        status = os.stat(shard)
    except OSError as error:
        raise ValueError(f"shard {shard} cannot be read: {error.strerror}") from error
    name = f"{FORMAT}\0{Path(shard).resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{tokenizer_id}"
    path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.npz"
    if (part := _load_part(path)) is None:
        part = _index_shard(shard, count_tokens)
        _save_part(path, part)
    return part


def _load_part(path: Path) -> dict[str, np.ndarray] | None:
    """Return a cached part, or None if there is none or its checksum does not match."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    content, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as columns:
        return dict(columns)


def _save_part(path: Path, part: dict[str, np.ndarray]) -> None:
    """Write an .npz file with its SHA-256 behind it: whole under its name, or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **part)
    content = buffer.getvalue()
    aside = path.with_suffix(f".{uuid.uuid4().hex}.tmp")  # the folder may be shared by several machines
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_bytes(content + hashlib.sha256(content).digest())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"the index cannot be kept in {path.parent}: {error.strerror}; make room or give another --cache_folder"
        ) from error


def _index_shard(shard: str, count_tokens: Callable[[str], int]) -> dict[str, np.ndarray]:
    keys: dict[str, None] = {}
    rows: list[tuple[int, ...]] = []
    groups: list[str] = []
    meta_extensions: list[int] = []
    captions: list[tuple[int, int]] = []  # language, tokens
    caption_ends: list[int] = []
    sizes: list[Size] = []
    size_ends: list[int] = []
    encoded_by: set[str] = set()
    rejects: list[tuple[str, str]] = []
    for stem, members in _samples(shard):
        try:
            if stem in keys:
                raise ValueError("an earlier sample has the same name")
            numbers, extension, tokens, group, encoded = _read_sample(members, count_tokens)
        except ValueError as error:
            rejects.append((stem, str(error)))
            continue
        keys[stem] = None
        rows.append(numbers)
        groups.append(group)
        meta_extensions.append(META_EXTENSIONS.index(extension))
        captions.extend((LANGUAGES.index(language), count) for language, count in tokens)
        caption_ends.append(len(captions))
        sizes.extend(encoded.sizes if encoded else ())
        size_ends.append(len(sizes))
        encoded_by |= {encoded.encoded_by} if encoded else set()
    return {
        "numbers": np.array(rows, np.int64).reshape(-1, _NUM_NUMBERS),
        "meta_extension": np.array(meta_extensions, np.uint8),
        "caption_end": np.array(caption_ends, np.int64),
        "caption_language": np.array([language for language, _ in captions], np.uint8),
        "caption_tokens": np.array([tokens for _, tokens in captions], np.int32),
        "encoded_sizes": np.array(sizes, np.int32).reshape(-1, 2),
        "encoded_size_end": np.array(size_ends, np.int64),
        **_strings("encoded_by", sorted(encoded_by)),
        **_strings("key", list(keys)),
        **_strings("group", groups),
        **_strings("reject_key", [stem for stem, _ in rejects]),
        **_strings("reject_reason", [reason for _, reason in rejects]),
    }


def _read_sample(
    members: dict[str, tuple[int, bytes]], count_tokens: Callable[[str], int]
) -> tuple[tuple[int, ...], str, list[tuple[str, int]], str, EncodedMember | None]:
    """Return a sample's numbers, its caption member's extension, (language, tokens) of each caption, group and latents.

    members: extension → (offset in the shard, content); an encoded picture counts before a file.
    Raises: ValueError with the reason why it cannot be used.
    """
    image_extension = next((e for e in (EXTENSION, *IMAGE_EXTENSIONS) if e in members), None)
    meta_extension = next((e for e in META_EXTENSIONS if e in members), None)
    if image_extension is None or meta_extension is None:
        raise ValueError(f"it has {sorted(members)}, but needs a picture or .safetensors, and a .json or .txt")
    (image_offset, image), (meta_offset, meta) = members[image_extension], members[meta_extension]
    captions, group = parse_captions(meta_extension, meta)
    places = (image_offset, len(image), zlib.crc32(image), meta_offset, len(meta), zlib.crc32(meta))
    if image_extension == EXTENSION:
        encoded = EncodedMember(image)
        return (*places, *encoded.sizes[-1]), meta_extension, encoded.count_tokens(captions), group, encoded
    tokens = [(language, count_tokens(text)) for language, texts in captions.items() for text in texts]
    return (*places, *shown_size(image)), meta_extension, tokens, group, None


def _samples(shard: str) -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """Yield (stem, {extension: (offset, content)}): by webdataset's rule, neighbours with one stem are one sample."""
    current, members = None, {}
    for stem, extension, offset, content in _tar_members(shard):
        if stem != current and members:
            yield current, members
            members = {}
        current = stem
        members[extension] = (offset, content)
    if members:
        yield current, members


def _tar_members(shard: str) -> Iterator[tuple[str, str, int, bytes]]:
    """Yield (stem, extension, offset, content) of each file in a tar, in order.

    Raises: ValueError if the tar is damaged or cut, also where the cut falls between two members: a whole tar ends in
    two blocks of zeros, and nothing but zeros follows them.
    """
    try:
        with open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            end = 0
            for member in archive:
                end = member.offset_data + (-(-member.size // 512) * 512 if member.isfile() else 0)
                if not member.isfile():
                    continue
                content = os.pread(file.fileno(), member.size, member.offset_data)
                if len(content) != member.size:
                    raise ValueError(f"shard {shard} is cut short inside {member.name}; copy it again")
                # A name that is not UTF-8 becomes one that is, and stays different from every other.
                name = member.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                folder, slash, base = name.rpartition("/")
                stem, _, extension = base.partition(".")
                yield folder + slash + stem, extension.lower(), member.offset_data, content
            file.seek(end)
            mark, after = file.read(1024), 0
            while not after and (block := file.read(1 << 20)):
                after = len(block) - block.count(0)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"shard {shard} cannot be read as a tar file: {error}") from error
    if mark != bytes(1024):
        raise ValueError(
            f"shard {shard} has no end mark (two blocks of zeros) at byte {end}: it is cut short between two members, "
            "or damaged there; copy it again"
        )
    if after:
        raise ValueError(f"shard {shard} goes on after its end mark at byte {end}: give joined tar files one by one")
