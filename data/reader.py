"""From planned samples to pictures and captions: exact reads, checked bytes, read ahead in threads."""

import logging
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
from data.images import decode_image, fit, fitted_size
from data.index import Index
from data.plan import DEFAULT_MAX_PIXELS, MULTIPLE, BatchPlan, PlannedSample

log = logging.getLogger("train")
_MAX_OPEN_SHARDS = 64
_MAX_PARSED_CAPTIONS = 65_536


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

    def read_pixels(self) -> Tensor:
        """Return the picture, uint8 (3, H, W), from the shard if it was not read ahead."""
        return self.pixels if self.pixels is not None else self.reader.read_pixels(self.plan.index)


class Reader:
    """Random access to the samples of an index.  Safe to use from several threads.

    A bad sample (checksum, picture, caption) is named in the log once, kept in `bad_samples` {key: reason}, and
    replaced by the next sample of the index, of the same size and no longer caption, that can be read: a function of
    the sample alone, so every rank of every world size puts the same one in its place.
    """

    def __init__(self, index: Index, max_pixels: int = DEFAULT_MAX_PIXELS):
        self.index, self.max_pixels = index, max_pixels
        self.bad_samples: dict[str, str] = {}
        self._files: OrderedDict[int, int] = OrderedDict()  # shard → file descriptor
        self._captions: OrderedDict[int, dict[str, list[str]]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, planned: PlannedSample, needs_pixels: Callable[[str], bool] = lambda key: True) -> Sample:
        """Read a sample, or the one that takes its place; the picture only if needs_pixels(key).

        Raises: BadDataError if no other sample can take a bad one's place.
        """
        for candidate in self._candidates(planned):
            key = self.index[candidate.index].key
            if key in self.bad_samples:
                continue
            try:
                caption = self.read_captions(candidate.index)[candidate.language][candidate.wording]
                pixels = self.read_pixels(candidate.index) if needs_pixels(key) else None
            except (ValueError, LookupError, OSError) as error:
                with self._lock:
                    if key not in self.bad_samples:
                        self.bad_samples[key] = str(error)
                        log.warning("bad sample %s: %s; another takes its place", key, error)
                continue
            return Sample(candidate, key, "" if candidate.drop_caption else caption, pixels, self)
        raise BadDataError(
            f"sample {self.index[planned.index].key} is bad, and no other of {planned.height} x {planned.width} pixels "
            f"and at most {planned.num_text_tokens} text tokens can take its place; repair the shards"
        )

    def _candidates(self, planned: PlannedSample) -> Iterator[PlannedSample]:
        """Yield the planned sample, then what may take its place, nearest following first."""
        yield planned
        for distance in range(1, len(self.index)):
            i = (planned.index + distance) % len(self.index)
            record = self.index[i]
            size = fitted_size(record.height, record.width, MULTIPLE, self.max_pixels)
            if size != (planned.height, planned.width):
                continue
            languages = sorted(record.caption_tokens, key=lambda language: (language != planned.language, language))
            for language in languages:
                for wording, tokens in enumerate(record.caption_tokens[language]):
                    if planned.drop_caption or tokens <= planned.num_text_tokens:
                        kept = planned.num_text_tokens if planned.drop_caption else tokens
                        yield replace(planned, index=i, language=language, wording=wording, num_text_tokens=kept)
                        break
                else:
                    continue
                break

    def read_captions(self, i: int) -> dict[str, list[str]]:
        """Return {language: wordings} of sample `i`.  Raises: ValueError if its bytes are damaged."""
        with self._lock:
            if i in self._captions:
                self._captions.move_to_end(i)
                return self._captions[i]
        record = self.index[i]
        data = self._bytes(record.shard, record.meta_offset, record.meta_size, record.meta_crc32)
        captions, _ = parse_captions(record.meta_extension, data)
        with self._lock:
            self._captions[i] = captions
            if len(self._captions) > _MAX_PARSED_CAPTIONS:
                self._captions.popitem(last=False)
        return captions

    def read_pixels(self, i: int) -> Tensor:
        """Return the picture of sample `i` at its training size, uint8 (3, H, W).

        Raises: ValueError if its bytes are damaged or no picture.
        """
        record = self.index[i]
        data = self._bytes(record.shard, record.image_offset, record.image_size, record.image_crc32)
        size = fitted_size(record.height, record.width, MULTIPLE, self.max_pixels)
        image = np.array(fit(decode_image(data), size))
        return torch.from_numpy(image).permute(2, 0, 1).contiguous()

    def _bytes(self, shard: int, offset: int, size: int, crc32: int) -> bytes:
        with self._lock:
            descriptor = self._files.get(shard)
            if descriptor is None:
                descriptor = self._files[shard] = os.open(self.index.shards[shard], os.O_RDONLY)
                if len(self._files) > _MAX_OPEN_SHARDS:
                    os.close(self._files.popitem(last=False)[1])
            self._files.move_to_end(shard)
            data = os.pread(descriptor, size, offset)
        if len(data) != size or zlib.crc32(data) != crc32:
            raise ValueError(f"its bytes in {self.index.shards[shard]} changed since they were indexed")
        return data

    def close(self) -> None:
        """Close every shard."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])


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
                f"--num_workers {num_workers} must not be negative, --prefetch_steps {prefetch_steps} >= 1"
            )
        self.reader, self.plan = reader, plan
        self._needs_pixels = needs_pixels
        self._pool = ThreadPoolExecutor(num_workers, "reader") if num_workers else None
        self._ahead: deque[list[list[Future]]] = deque()
        self._prefetch_steps = prefetch_steps
        self._to_submit = start_step

    def next_step(self) -> list[list[Sample]]:
        """Return the next step's samples by micro-batch."""
        if self._pool is None:
            planned = self.plan.micro_batches(self._to_submit)
            self._to_submit += 1
            return [[self.reader.read(p, self._needs_pixels) for p in micro] for micro in planned]
        while len(self._ahead) <= self._prefetch_steps:
            planned = self.plan.micro_batches(self._to_submit)
            self._to_submit += 1
            self._ahead.append(
                [[self._pool.submit(self.reader.read, p, self._needs_pixels) for p in micro] for micro in planned]
            )
        return [[future.result() for future in micro] for micro in self._ahead.popleft()]

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.reader.close()
