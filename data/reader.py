"""From planned samples to pictures and captions: exact reads, checked bytes, read ahead in threads."""

import logging
import math
import os
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from data.captions import parse_captions
from data.encoded import EncodedMember
from data.images import MULTIPLE, decode_image, fit
from data.index import Index, SampleRecord
from data.plan import DEFAULT_MAX_PIXELS, BatchPlan, PlannedSample

log = logging.getLogger("train")
_MAX_OPEN_SHARDS = 64
_MAX_CAPTION_BYTES = 32 << 20  # of the members whose parsed captions are kept: a small set is parsed once
_MAX_TASK_SAMPLES = 16  # read by one task of a thread: handing over each sample alone costs more than reading it


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

    def read_pixels(self) -> Tensor:
        """Return the picture, uint8 (3, H, W), from the shard if it was not read ahead."""
        return self.pixels if self.pixels is not None else self.reader.read_pixels(self.plan.index)


class _Shard:
    """A file open for reading, closed when the last thread has let go of it."""

    def __init__(self, path: str):
        self._descriptor: int | None = None
        self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self):
        if self._descriptor is not None:
            os.close(self._descriptor)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)


class Reader:
    """Random access to the samples of an index.  Safe to use from several threads.

    A bad sample (checksum, picture, caption) is named in the log once, kept in `bad_samples` {key: reason}, and
    replaced by the next readable sample of the index with the same size and no longer caption, else by the next with no
    more tokens.  That is a function of the sample alone: every rank of every world size puts the same one in its place.
    max_bad_samples: how many this reader replaces before it gives up.
    """

    def __init__(self, index: Index, max_pixels: int = DEFAULT_MAX_PIXELS, max_bad_samples: float = math.inf):
        self.index, self.max_pixels, self.max_bad_samples = index, max_pixels, max_bad_samples
        self.bad_samples: dict[str, str] = {}
        self._shards: OrderedDict[int, _Shard] = OrderedDict()
        self._captions: OrderedDict[int, tuple[dict[str, list[str]], int]] = OrderedDict()  # i → captions, bytes
        self._caption_bytes = 0
        self._lock = threading.Lock()

    def read(self, planned: PlannedSample, needs_pixels: Callable[[str], bool] = lambda key: True) -> Sample:
        """Read a sample, or the one that takes its place; the picture only if needs_pixels(key).

        Raises: BadDataError if no other sample can take a bad one's place, or over max_bad_samples.
        """
        for candidate in self._candidates(planned):
            key = self.index.key(candidate.index)
            if key in self.bad_samples:
                continue
            try:
                caption = self.read_captions(candidate.index)[candidate.language][candidate.wording]
                if self.index[candidate.index].encoded_sizes:
                    latents, states = self._read_encoded(candidate)
                    return Sample(
                        candidate, key, "" if candidate.drop_caption else caption, None, self, latents, states
                    )
                pixels = self.read_pixels(candidate.index) if needs_pixels(key) else None
            except (ValueError, LookupError, OSError) as error:
                self._note_bad(key, str(error))
                continue
            return Sample(candidate, key, "" if candidate.drop_caption else caption, pixels, self)
        raise BadDataError(
            f"sample {self.index.key(planned.index)} is bad, and no other of at most {planned.num_tokens} tokens can "
            "take its place; repair the shards"
        )

    def _note_bad(self, key: str, reason: str) -> None:
        with self._lock:
            if key in self.bad_samples:
                return
            self.bad_samples[key] = reason
            count = len(self.bad_samples)
        log.warning("bad sample %s: %s; another takes its place", key, reason)
        if count > self.max_bad_samples:
            raise BadDataError(f"{count} bad samples, over --max_bad_samples; the last is {key}: {reason}")

    def _candidates(self, planned: PlannedSample) -> Iterator[PlannedSample]:
        """Yield the planned sample, then what may take its place, nearest following first."""
        yield planned
        for same_size in (True, False):
            for distance in range(1, len(self.index)):
                i = (planned.index + distance) % len(self.index)
                if candidate := self._in_place_of(planned, i, same_size):
                    yield candidate

    def _in_place_of(self, planned: PlannedSample, i: int, same_size: bool) -> PlannedSample | None:
        """Return sample `i` in place of `planned`, in its language if possible, or None if it does not fit there."""
        record = self.index[i]
        height, width = record.trained_size(self.max_pixels)
        if same_size and (height, width) != (planned.height, planned.width):
            return None
        image_tokens = (height // MULTIPLE) * (width // MULTIPLE)
        room = planned.num_tokens - image_tokens
        for language in sorted(record.caption_tokens, key=lambda language: (language != planned.language, language)):
            for wording, tokens in enumerate(record.caption_tokens[language]):
                text_tokens = planned.num_text_tokens if planned.drop_caption else tokens
                if text_tokens <= room:
                    return replace(
                        planned, index=i, language=language, wording=wording, height=height, width=width,
                        num_image_tokens=image_tokens, num_text_tokens=text_tokens,
                    )  # fmt: skip
        return None

    def read_captions(self, i: int) -> dict[str, list[str]]:
        """Return {language: wordings} of sample `i`.  Raises: ValueError if its bytes are damaged."""
        with self._lock:
            if i in self._captions:
                self._captions.move_to_end(i)
                return self._captions[i][0]
        data = self.read_meta(i)
        captions, _ = parse_captions(self.index[i].meta_extension, data)
        with self._lock:
            if i not in self._captions:
                self._captions[i] = captions, len(data)
                self._caption_bytes += len(data)
            while self._caption_bytes > _MAX_CAPTION_BYTES:
                self._caption_bytes -= self._captions.popitem(last=False)[1][1]
        return captions

    def read_meta(self, i: int) -> bytes:
        """Return the .json or .txt member of sample `i`.  Raises: ValueError if its bytes are damaged."""
        record = self.index[i]
        return self._bytes(record, record.meta_offset, record.meta_size, record.meta_crc32)

    def read_pixels(self, i: int) -> Tensor:
        """Return the picture of sample `i` at its training size, uint8 (3, H, W).

        Raises: ValueError if its bytes are damaged or no picture.
        """
        record = self.index[i]
        if record.encoded_sizes:
            raise ValueError("it is encoded: its shard holds latents and text states, not the picture")
        image = decode_image(self._bytes(record, record.image_offset, record.image_size, record.image_crc32))
        if (image.height, image.width) != (record.height, record.width):
            raise ValueError(
                f"it decodes to {image.height} x {image.width} pixels, the index says {record.height} x {record.width}"
            )
        fitted = fit(image, record.trained_size(self.max_pixels))
        return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()

    def _read_encoded(self, planned: PlannedSample) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the latents and text states of an encoded sample."""
        record = self.index[planned.index]
        data = self._bytes(record, record.image_offset, record.image_size, record.image_crc32)
        member = EncodedMember(data)
        if planned.drop_caption:
            states = member.empty_states()
        else:
            states = member.states(planned.language, planned.wording)
        return member.latents((planned.height, planned.width)), states

    def _bytes(self, record: SampleRecord, offset: int, size: int, crc32: int) -> bytes:
        data = self._shard(record.shard).read(offset, size)
        if len(data) != size or zlib.crc32(data) != crc32:
            raise ValueError(f"its bytes in {self.index.shards[record.shard]} changed since they were indexed")
        return data

    def _shard(self, number: int) -> _Shard:
        with self._lock:
            if number not in self._shards:
                self._shards[number] = _Shard(self.index.shards[number])
                if len(self._shards) > _MAX_OPEN_SHARDS:
                    self._shards.popitem(last=False)
            self._shards.move_to_end(number)
            return self._shards[number]

    def close(self) -> None:
        """Close every shard."""
        with self._lock:
            self._shards.clear()


class Loader:
    """The micro-batches of one data rank, step after step, read ahead by threads.

    num_workers: reader threads; 0 reads when asked.  prefetch_steps: how many steps may lie in memory ahead.  Neither
    changes what comes out.  needs_pixels(key): whether a picture must be read, or its latents are already known.
    """

    def __init__(
        self,
        reader: Reader,
        plan: BatchPlan,
        start_step: int = 0,
        num_workers: int = 2,
        prefetch_steps: int = 2,
        needs_pixels: Callable[[str], bool] = lambda key: True,
    ):
        if num_workers < 0 or prefetch_steps < 1:
            raise ValueError(
                f"--num_workers must be at least 0, got {num_workers}, and --prefetch_steps at least 1, "
                f"got {prefetch_steps}"
            )
        self.reader, self.plan = reader, plan
        self._needs_pixels = needs_pixels
        self._num_workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers, "reader") if num_workers else None
        self._ahead: deque[list[list[Future]]] = deque()
        self._prefetch_steps = prefetch_steps
        self._to_submit = start_step

    def next_step(self) -> list[list[Sample]]:
        """Return the next step's samples by micro-batch."""
        if self._pool is None:
            planned = self.plan.micro_batches(self._to_submit)
            self._to_submit += 1
            return [self._read_all(micro) for micro in planned]
        while len(self._ahead) <= self._prefetch_steps:
            self._ahead.append(self._submit(self.plan.micro_batches(self._to_submit)))
            self._to_submit += 1
        return [[sample for task in micro for sample in task.result()] for micro in self._ahead.popleft()]

    def _submit(self, micro_batches: list[list[PlannedSample]]) -> list[list[Future]]:
        num_samples = sum(map(len, micro_batches))
        size = max(1, min(_MAX_TASK_SAMPLES, num_samples // self._num_workers))
        return [
            [self._pool.submit(self._read_all, micro[i : i + size]) for i in range(0, len(micro), size)]
            for micro in micro_batches
        ]

    def _read_all(self, planned: list[PlannedSample]) -> list[Sample]:
        return [self.reader.read(sample, self._needs_pixels) for sample in planned]

    def close(self) -> None:
        """Stop the threads and close the shards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.reader.close()
