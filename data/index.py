"""The index of a set of shards: where each sample lies, how large it is, and what it must contain.

Built with one pass over each shard, then kept in a cache file a shard, its part, and one file that sums all of them up.
A run reads the summary; parts are mapped when a sample of theirs is looked at, and few stay so: 10^8 samples fit.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np

from data.captions import parse_wordings
from data.edit import MAX_RATIO, mask_member, parse_edit, reference_members
from data.encoded import EXTENSION, EncodedMember
from data.images import shown_size
from data.index_folder import IndexFolder
from data.index_part import META_EXTENSIONS, IndexedSample, IndexPart, Kind, PictureMember, SampleRecord
from data.index_summary import IndexSummary
from data.instructions import normalize
from data.reference_size import area_size
from data.tar import tar_samples
from data.versions import Version, shard_versions
from utils.checksum import crc32

IMAGE_EXTENSIONS = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff")
log = logging.getLogger("train")
_MAX_REJECTS_LOGGED = 20
_MAX_RECORDS = 8192  # kept as objects: a small set is put together once, not at every visit
_MAX_OPEN_PARTS = 64  # mapped at a time


class Index:
    """Every usable sample of `shards`, in shard order; `rejects` lists (key, reason) of those that are not."""

    def __init__(
        self,
        shards: Sequence[str],
        versions: Sequence[Version],
        summary: IndexSummary,
        open_part: Callable[[int, str], IndexPart],
    ):
        """Put an index together.

        versions: what each shard was when it was indexed; open_part(shard, digest): maps a shard's part.
        """
        self.shards, self.versions, self.summary = list(shards), list(versions), summary
        self._names = [os.path.basename(shard) for shard in shards]
        self._starts = np.concatenate(([0], np.cumsum(summary.num_samples, dtype=np.int64)))
        self._part = lru_cache(_MAX_OPEN_PARTS)(lambda shard: open_part(shard, summary.digests[shard].tobytes().hex()))
        self._record = lru_cache(_MAX_RECORDS)(self._make_record)
        self._rows = lru_cache(_MAX_OPEN_PARTS)(lambda shard, kinds: self._part(shard).rows_of(kinds))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, i: int) -> SampleRecord:
        return self._record(i)

    def _make_record(self, i: int) -> SampleRecord:
        shard, row = self._locate(i)
        return self._part(shard).record(row, shard, self._names[shard])

    def key(self, i: int) -> str:
        """Return the key of sample `i`, which no other sample has."""
        shard, row = self._locate(i)
        return self._part(shard).key(row, self._names[shard])

    def check_encoded_by(self, identity: str) -> None:
        """Raise ValueError if a shard holds latents or text states of other encoders than `identity` names."""
        for other, shard in self.summary.encoded_by:
            if other != identity:
                raise ValueError(
                    f"shard {self.shards[shard]} was encoded by {other}, --model has {identity}; give the model that "
                    "it was encoded with, or encode the raw shards again (python -m tools.prepare_encode)"
                )

    def is_encoded(self) -> bool:
        """Return whether every sample is encoded, so that training on them takes no encoder.  Looks at every part."""
        return bool(self.summary.encoded_by) and all(self._part(n).is_encoded() for n in range(len(self.shards)))

    def _locate(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        shard = int(self._starts.searchsorted(i, side="right")) - 1
        return shard, i - int(self._starts[shard])

    @property
    def shard_sizes(self) -> np.ndarray:
        """How many samples each shard has, (S,) int64."""
        return np.diff(self._starts)

    def first(self, shard: int) -> int:
        """Return the index of a shard's first sample."""
        return int(self._starts[shard])

    def of_kinds(self, shard: int, kinds: frozenset[Kind], place: int) -> int:
        """Return the index of the sample at `place` among those of a shard that are of one of these kinds."""
        return int(self._starts[shard] + self._rows(shard, kinds)[place])

    def spread(self, num_samples: int, max_shards: int = _MAX_OPEN_PARTS, edits_only: bool = False) -> list[int]:
        """Return about `num_samples` samples from all over the index, from `max_shards` shards at most.

        edits_only: none that is no edit; then there may be none.
        """
        kinds = frozenset(kind for kind in self.summary.kinds if kind.is_edit)
        with_samples = np.flatnonzero(self.summary.count(kinds) if edits_only else self.shard_sizes)
        step = max(1, -(-len(with_samples) // max_shards))
        chosen = with_samples[::step].tolist()
        rows = (self._rows(shard, kinds) if edits_only else np.arange(self.shard_sizes[shard]) for shard in chosen)
        parts = [self._starts[shard] + some for shard, some in zip(chosen, rows, strict=True)]
        indices = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return indices[:: max(1, len(indices) // num_samples)][:num_samples].tolist()

    @property
    def num_rejects(self) -> int:
        """How many samples cannot be used."""
        return int(self.summary.num_rejects.sum(dtype=np.int64))

    def iter_rejects(self) -> Iterator[tuple[str, str]]:
        """Yield (key, reason) of what cannot be used."""
        having = np.flatnonzero(self.summary.num_rejects).tolist()
        return chain.from_iterable(self._part(shard).rejects(self._names[shard]) for shard in having)

    @cached_property
    def rejects(self) -> list[tuple[str, str]]:
        """(key, reason) of each sample that cannot be used."""
        return list(self.iter_rejects())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every key, place, size, checksum and token count, in order: equal for runs on the same shards."""
        return self.summary.fingerprint(self._names)


def build_index(
    shards: Sequence[str],
    count_tokens: Callable[..., int],
    tokenizer_id: str,
    cache_folder: Path,
    rank: int = 0,
    num_ranks: int = 1,
    encoded_by: str | None = None,
    condition_pixels: int | None = None,
) -> Index:
    """Index webdataset shards, from the cache where a shard has not changed.

    count_tokens: text tokens of a caption; tokenizer_id: names its tokenizer, so that another one indexes anew.
    condition_pixels: the area at which the text encoder sees the references of edits, of which
    count_tokens(instruction, sizes) is then asked; None leaves edits out, as rejects.
    Several processes may do this at once; as `num_ranks` ranks they share the work.  A rejected sample is logged, once,
    with its reason.
    encoded_by: what must have made the encoded samples; None asks for none or any.
    Raises: ValueError for a shard that is missing, cut short, no tar file or encoded by something else, and if two
    shards share a name.
    """
    names = [os.path.basename(shard) for shard in shards]
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"two shards are called {twice}; sample keys need different file names")
    versions = shard_versions(shards)
    if condition_pixels is not None:
        tokenizer_id += f" {condition_pixels} pixels, either wording"
    folder = IndexFolder(
        Path(cache_folder) / "index", shards, versions, tokenizer_id,
        lambda shard, version: _index_shard(shard, version, count_tokens, condition_pixels),
    )  # fmt: skip
    index = Index(shards, versions, folder.summary(rank, num_ranks), folder.open_part)
    if rank == 0:
        for key, reason in islice(index.iter_rejects(), _MAX_REJECTS_LOGGED):
            log.warning("left out %s: %s", key, reason)
        if index.num_rejects > _MAX_REJECTS_LOGGED:
            log.warning("left out %d of %d samples in all", index.num_rejects, index.num_rejects + len(index))
    if encoded_by is not None:
        index.check_encoded_by(encoded_by)
    return index


def _index_shard(
    shard: str, version: Version, count_tokens: Callable[..., int], condition_pixels: int | None
) -> tuple[list[IndexedSample], list[tuple[str, str]]]:
    """Return what a shard holds, and (stem, reason) of what of it cannot be used."""
    samples: dict[str, IndexedSample] = {}
    rejects: list[tuple[str, str]] = []
    for stem, members in tar_samples(shard, version):
        try:
            if stem in samples:
                raise ValueError("an earlier sample has the same name")
            samples[stem] = _read_sample(stem, members, count_tokens, condition_pixels)
        except ValueError as error:
            rejects.append((stem, str(error)))
    return list(samples.values()), rejects


def _read_sample(
    stem: str,
    members: dict[str, tuple[int, bytes]],
    count_tokens: Callable[..., int],
    condition_pixels: int | None,
) -> IndexedSample:
    """Return what the index is to know of a sample.

    members: extension → (offset in the shard, content); an encoded picture counts before a file.
    Raises: ValueError with the reason why it cannot be used.
    """
    image_extension = next((e for e in (EXTENSION, *IMAGE_EXTENSIONS) if e in members), None)
    meta_extension = next((e for e in META_EXTENSIONS if e in members), None)
    if image_extension is None or meta_extension is None:
        raise ValueError(f"it has {sorted(members)}, but needs a picture or .safetensors, and a .json or .txt")
    (image_offset, image), (meta_offset, meta) = members[image_extension], members[meta_extension]
    wordings, group = parse_wordings(meta_extension, meta)
    edit, references, mask = parse_edit(meta_extension, meta), None, None
    if edit is not None:
        if condition_pixels is None:
            raise ValueError("it is an edit, and this run trains no edits (train_edit_ddp.py does)")
        if image_extension == EXTENSION:
            raise ValueError("it is an encoded edit; edits are read as pictures")
        references = [
            _picture(*members[name]) for name in reference_members(members, IMAGE_EXTENSIONS, edit.num_references)
        ]
        for number, r in enumerate(references, start=1):
            if max(r.height, r.width) > MAX_RATIO * min(r.height, r.width):
                raise ValueError(
                    f"its reference {number}, {r.height} x {r.width} pixels, is thinner than {MAX_RATIO}:1"
                )
        mask_extension = mask_member(members, IMAGE_EXTENSIONS)
        mask = _picture(*members[mask_extension]) if mask_extension else None
    places = (image_offset, len(image), crc32(image), meta_offset, len(meta), crc32(meta))
    if image_extension == EXTENSION:
        encoded = EncodedMember(image)
        size, encoded_sizes, encoded_by = encoded.sizes[-1], encoded.sizes, encoded.encoded_by
        tokens = encoded.count_tokens([wording.language for wording in wordings])
    else:
        size, encoded_sizes, encoded_by = shown_size(image), (), ""
        sizes = references and [area_size(r.height, r.width, condition_pixels) for r in references]
        shown = () if references is None else (sizes,)
        # Of an instruction, which a run may put into its canonical wording, the longer of the two.
        said = [{w.text} | ({normalize(w.text).text} if edit is not None else set()) for w in wordings]
        tokens = [max(count_tokens(text, *shown) for text in texts) for texts in said]
        if mask is not None and (mask.height, mask.width) != tuple(size):
            raise ValueError(f"its mask has {mask.height} x {mask.width} pixels, its target {size[0]} x {size[1]}")
    captions = [(w.language, count, w.weight) for w, count in zip(wordings, tokens, strict=True)]
    return IndexedSample(
        stem, (*places, *size), meta_extension, group, captions, encoded_sizes, encoded_by, references, mask
    )


def _picture(offset: int, content: bytes) -> PictureMember:
    return PictureMember(offset, len(content), crc32(content), *shown_size(content))
