"""From planned samples to pictures and captions: exact reads, checked bytes, read ahead in threads."""

import logging
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from data.captions import parse_captions
from data.edit import ReferencePicture, decode_mask, decode_reference, parse_edit, scaled_reference
from data.encoded import EncodedMember
from data.images import decode_image, fit
from data.index import Index
from data.plan import (
    DEFAULT_CONDITION_PIXELS,
    DEFAULT_MAX_PIXELS,
    DEFAULT_REFERENCE_PIXELS,
    PlannedSample,
)
from data.replacement import replacements
from data.shard_bytes import LostShardError, ShardBytes
from data.shard_cache import ShardCache
from data.tasks import keeping_instruction
from data.word_filter import RefusedInstructionError, WordFilter
from utils.byte_source import Patience
from utils.counts import count

log = logging.getLogger("train")
_MAX_LOST_SHARDS = 8  # found one after the other in the place of one sample: then it is the network or the server
_MAX_CAPTION_BYTES = 32 << 20  # of the members whose parsed captions are kept: a small set is parsed once


class BadDataError(ValueError):
    """The data set cannot give what the plan asks for."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample as read.  `plan` describes what was read, which differs from what was asked for if that was bad."""

    plan: PlannedSample
    key: str
    caption: str  # "" if dropped
    pixels: Tensor | None  # uint8 (3, H, W), or None if it was not wanted
    reader: "Reader"
    latents: tuple[Tensor, Tensor] | None = None  # of an encoded sample: mean and std, (C, h, w) each
    states: Tensor | None = None  # of an encoded sample: the caption's text states, (T, D)
    references: tuple[ReferencePicture, ...] | None = None  # of an edit; None = text-to-image
    mask: Tensor | None = None  # of an edit: bool (H, W), True where it may change something, if that is known
    plan_text: str | None = None  # of an edit: its actions, if they are known

    @property
    def conditions(self) -> list[Tensor] | None:
        """Its references as the text encoder sees them; None = text-to-image."""
        return None if self.references is None else [reference.condition for reference in self.references]

    @property
    def references_key(self) -> str:
        """What no other sample's references have; a picture to be reconstructed may also be an edit's target."""
        return f"{self.key}\0itself" if self.plan.reconstructs else self.key

    @property
    def category(self) -> str:
        """What its .json says it is of."""
        return self.reader.index[self.plan.index].group

    def read_pixels(self) -> Tensor:
        """Return the picture, uint8 (3, H, W), from the shard if it was not read ahead."""
        return self.pixels if self.pixels is not None else self.reader.read_pixels(self.plan.index)


class Reader:
    """Random access to the samples of an index.  Safe to use from several threads.

    A bad sample (checksum, picture, caption, a shard that cannot be reached) is named in the log once, kept in
    `bad_samples` {key: reason}, and replaced by the next readable sample of the index with the same size and no longer
    caption, else by the next with no more tokens.  That is a function of the sample alone: every rank of every world
    size puts the same one in its place.
    max_bad_samples: how many this reader replaces before it gives up.
    reference_pixels, condition_pixels: the areas at which VAE and text encoder see the references of edits.
    refused_words: a file of words; a sample whose caption has one is bad.  check_caption: instead, raises ValueError
    for a caption that is not to be trained on.
    cache, patience: for shards on a web server or in an S3 store.
    """

    def __init__(
        self,
        index: Index,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        max_bad_samples: float = math.inf,
        cache: ShardCache | None = None,
        patience: Patience | None = None,
        reference_pixels: int = DEFAULT_REFERENCE_PIXELS,
        condition_pixels: int = DEFAULT_CONDITION_PIXELS,
        refused_words: str = "",
        check_caption: Callable[[str], None] | None = None,
    ):
        self.index, self.max_pixels, self.max_bad_samples = index, max_pixels, max_bad_samples
        self.reference_pixels, self.condition_pixels = reference_pixels, condition_pixels
        self._check_caption = check_caption or WordFilter.of_run(refused_words).check
        self.bad_samples: dict[str, str] = {}
        self.num_refused = 0  # of them for the words of their instruction
        self.shards = ShardBytes(index.shards, index.versions, cache, patience)
        self._captions: OrderedDict[int, tuple[_Meta, int]] = OrderedDict()  # i → what was parsed, its bytes
        self._caption_bytes = 0
        self._lock = threading.Lock()

    def read(
        self,
        planned: PlannedSample,
        needs_pixels: Callable[[str], bool] = lambda key: True,
        fetched: Future | None = None,
    ) -> Sample:
        """Read a sample, or the one that takes its place; the picture only if needs_pixels(key).

        fetched: what `fetch` gives for the sample, under way already.
        Raises: BadDataError if no other sample can take a bad one's place, or over max_bad_samples.
        """
        num_lost, reason = 0, ""
        places = replacements(self.index, planned, self.max_pixels, self.shards.is_lost, self.reference_pixels)
        for candidate in chain((planned,), places):
            key = self.index.key(candidate.index)
            under_way = fetched if candidate is planned else None
            if key in self.bad_samples:
                continue
            try:
                wants_picture = self._wants_picture(candidate, needs_pixels)
                members = under_way.result() if under_way else self._fetch(candidate, wants_picture)
                meta = self._parse(candidate.index, members.meta)
                caption = meta.captions[candidate.language][candidate.wording]
                self._check_caption(caption)
                if candidate.reconstructs:
                    caption = keeping_instruction(candidate.language)
                caption = "" if candidate.drop_caption else caption
                if self.index[candidate.index].encoded_sizes:
                    latents, states = _encoded(candidate, members.image)
                    return Sample(candidate, key, caption, None, self, latents, states)
                pixels = self._decode(candidate.index, members.image) if wants_picture else None
                if candidate.reconstructs:
                    itself = scaled_reference(pixels, self.reference_pixels, self.condition_pixels)
                    return Sample(candidate, key, caption, pixels, self, references=(itself,))
                references, mask = self._decode_edit(candidate, members.others)
            except (ValueError, LookupError, OSError) as error:
                self.note_bad(key, str(error), isinstance(error, RefusedInstructionError))
                reason = str(error)
                num_lost += isinstance(error, LostShardError)
                if num_lost > _MAX_LOST_SHARDS:
                    raise BadDataError(f"{num_lost} shards in a row cannot be reached; the last: {error}") from error
                continue
            return Sample(
                candidate, key, caption, pixels, self, references=references, mask=mask, plan_text=meta.plan_text
            )  # fmt: skip
        key = self.index.key(planned.index)
        reason = self.bad_samples.get(key) or reason
        remedy = "repair the shards"
        if self.num_refused:
            remedy = f"{self.num_refused} samples hold --refused_words; shorten that list or leave them out of the data"
        raise BadDataError(
            f"sample {key} is bad ({reason}), and no other of at most {planned.num_tokens} tokens, or with "
            f"pictures no larger, can take its place: {remedy}"
        )

    def fetch(self, planned: PlannedSample, needs_pixels: Callable[[str], bool]) -> "_Members":
        """Return the sample's bytes, checked but not decoded.  Raises: what reading them may."""
        key = self.index.key(planned.index)
        if key in self.bad_samples:
            return _Members()
        return self._fetch(planned, self._wants_picture(planned, needs_pixels))

    def note_bad(self, key: str, reason: str, is_refused: bool = False) -> None:
        """Count a sample as bad and never read it again.  Raises: BadDataError over max_bad_samples.

        is_refused: for the words of its instruction.
        """
        with self._lock:
            if key in self.bad_samples:
                return
            self.bad_samples[key] = reason
            self.num_refused += is_refused
            num_bad = len(self.bad_samples)
        count("data_errors", "bad_sample")
        log.warning("bad sample %s: %s; another takes its place", key, reason)
        if num_bad > self.max_bad_samples:
            raise BadDataError(f"{num_bad} bad samples, over --max_bad_samples; the last is {key}: {reason}")

    def _wants_picture(self, planned: PlannedSample, needs_pixels: Callable[[str], bool]) -> bool:
        """Return whether the picture's member is to be read; an encoded one holds the text states as well."""
        i = planned.index
        return bool(self.index[i].encoded_sizes) or planned.reconstructs or needs_pixels(self.index.key(i))

    def read_meta(self, i: int) -> bytes:
        """Return the .json or .txt member of sample `i`.  Raises: ValueError if it is damaged; LostShardError."""
        record = self.index[i]
        [data] = self.shards.read(record.shard, [(record.meta_offset, record.meta_size, record.meta_crc32)])
        return bytes(data)

    def read_captions(self, i: int) -> dict[str, list[str]]:
        """Return {language: wordings} of sample `i`.  Raises: ValueError if its bytes are damaged; LostShardError."""
        return self._parse(i, None).captions

    def read_pixels(self, i: int) -> Tensor:
        """Return the picture of sample `i` at its training size, uint8 (3, H, W).

        Raises: ValueError if its bytes are damaged or no picture; LostShardError.
        """
        return self._decode(i, None)

    def _fetch(self, planned: PlannedSample, wants_picture: bool) -> "_Members":
        """Read what is wanted of a sample and not in memory: the picture and the caption lie side by side."""
        i = planned.index
        with self._lock:
            knows_captions = i in self._captions
        record = self.index[i]
        members = [] if knows_captions else [(record.meta_offset, record.meta_size, record.meta_crc32)]
        if wants_picture:
            members.append((record.image_offset, record.image_size, record.image_crc32))
        others = () if planned.reconstructs else record.others
        members += [(other.offset, other.size, other.crc32) for other in others]
        contents = deque(self.shards.read(record.shard, members) if members else [])
        meta = None if knows_captions else bytes(contents.popleft())
        return _Members(meta, contents.popleft() if wants_picture else None, tuple(contents))

    def _decode_edit(
        self, planned: PlannedSample, contents: Sequence[memoryview]
    ) -> tuple[tuple[ReferencePicture, ...] | None, Tensor | None]:
        """Return an edit's references and mask; of a text-to-image sample neither."""
        record = self.index[planned.index]
        if record.references is None:
            return None, None
        how = self.reference_pixels, self.condition_pixels, (record.height, record.width)
        trained = planned.height, planned.width
        pictures = tuple(decode_reference(bytes(data), *how, trained) for data in contents[: len(record.references)])
        if record.mask is None:
            return pictures, None
        return pictures, decode_mask(bytes(contents[-1]), how[-1], trained)

    def _parse(self, i: int, data: bytes | None) -> "_Meta":
        with self._lock:
            if i in self._captions:
                self._captions.move_to_end(i)
                return self._captions[i][0]
        if data is None:
            data = self.read_meta(i)
        captions, _ = parse_captions(self.index[i].meta_extension, data)
        edit = parse_edit(self.index[i].meta_extension, data)
        meta = _Meta(captions, edit and edit.plan_text)
        with self._lock:
            if i not in self._captions:
                self._captions[i] = meta, len(data)
                self._caption_bytes += len(data)
            while self._caption_bytes > _MAX_CAPTION_BYTES:
                self._caption_bytes -= self._captions.popitem(last=False)[1][1]
        return meta

    def _decode(self, i: int, data: memoryview | None) -> Tensor:
        record = self.index[i]
        if record.encoded_sizes:
            raise ValueError("it is encoded: its shard holds latents and text states, not the picture")
        if data is None:
            [data] = self.shards.read(record.shard, [(record.image_offset, record.image_size, record.image_crc32)])
        image = decode_image(bytes(data))
        if (image.height, image.width) != (record.height, record.width):
            raise ValueError(
                f"it decodes to {image.height} x {image.width} pixels, the index says {record.height} x {record.width}"
            )
        fitted = fit(image, record.trained_size(self.max_pixels))
        return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()

    def close(self) -> None:
        """Close every shard."""
        self.shards.close()


def _encoded(planned: PlannedSample, data: memoryview) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the latents and text states of an encoded sample."""
    member = EncodedMember(data)
    states = member.empty_states() if planned.drop_caption else member.states(planned.language, planned.wording)
    return member.latents((planned.height, planned.width)), states


@dataclass(frozen=True)
class _Members:
    """A sample's bytes; None for what is not wanted or was in memory."""

    meta: bytes | None = None
    image: memoryview | None = None
    others: tuple[memoryview, ...] = ()  # of an edit: its references, then its mask


@dataclass(frozen=True)
class _Meta:
    """A parsed .json or .txt member."""

    captions: dict[str, list[str]]  # language → wordings
    plan_text: str | None
