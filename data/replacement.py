"""What may take a bad sample's place: a function of the sample alone, so every rank puts the same one there."""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace

from data.edit import num_reference_tokens
from data.index import Index
from data.plan import PlannedSample, trained_pictures
from data.reference_size import Size, clipped_area_size

_MAX_LOOKED_AT = 20_000  # records, each way of looking: a second's work, however large the index is
_MAX_LONGER = 64  # samples with longer captions that are tried
_JUMP = 32  # records that finding the end of a shard looks at


def replacements(
    index: Index, planned: PlannedSample, max_pixels: int, is_lost: Callable[[int], bool], reference_pixels: int
) -> Iterator[PlannedSample]:
    """Yield what may stand in for `planned`: the following samples of its size, then those with no more tokens.

    Where none has as few, then those with pictures no larger and the shortest captions: a micro-batch gets some text
    tokens more than it was to have, which is better than a stop.
    An edit stands in for an edit; of its size are those whose references have the same sizes, too.  To be reconstructed
    any picture will do.
    is_lost: whether a shard cannot be reached; its samples are passed over without a look.
    """
    for same_size in (True, False):
        for i in _following(index, planned, is_lost):
            if candidate := _in_place_of(index, planned, i, max_pixels, reference_pixels, same_size):
                yield candidate
    if not planned.reconstructs:
        every = _following(index, planned, is_lost)
        longer = (_in_place_of(index, planned, i, max_pixels, reference_pixels, False, math.inf) for i in every)
        yield from heapq.nsmallest(_MAX_LONGER, filter(None, longer), key=lambda candidate: candidate.num_text_tokens)


def _following(index: Index, planned: PlannedSample, is_lost: Callable[[int], bool]) -> Iterator[int]:
    """Yield the samples after `planned`, round the end of the index, without those of lost shards."""
    distance, num_looked_at = 1, 0
    while distance < len(index) and num_looked_at < _MAX_LOOKED_AT:
        i = (planned.index + distance) % len(index)
        if is_lost(index[i].shard):
            distance += _end_of_shard(index, i) - i
            num_looked_at += _JUMP
            continue
        yield i
        distance += 1
        num_looked_at += 1


def _end_of_shard(index: Index, i: int) -> int:
    return bisect_right(range(len(index)), index[i].shard, lo=i, key=lambda j: index[j].shard)


def _in_place_of(
    index: Index,
    planned: PlannedSample,
    i: int,
    max_pixels: int,
    reference_pixels: int,
    same_size: bool,
    more_text: float = 0,
) -> PlannedSample | None:
    """Return sample `i` in place of `planned`, in its language if possible, or None if it does not fit there.

    more_text: tokens by which its caption may be too long.
    """
    record = index[i]
    if planned.reconstructs:
        return _reconstructing(planned, i, record.trained_size(max_pixels), reference_pixels, same_size)
    (height, width), references, image_tokens = trained_pictures(record, max_pixels, reference_pixels)
    sizes = (height, width, references)
    if same_size and sizes != (planned.height, planned.width, planned.reference_sizes):
        return None
    if (references is None) != (planned.reference_sizes is None):
        return None
    room = planned.num_tokens - image_tokens
    if more_text and room < planned.num_text_tokens:  # its pictures are larger
        return None
    for language in sorted(record.caption_tokens, key=lambda language: (language != planned.language, language)):
        for wording, tokens in enumerate(record.caption_tokens[language]):
            # A dropped caption has the same tokens everywhere, but for those of an edit's references.
            text_tokens = planned.num_text_tokens if planned.drop_caption and references is None else tokens
            if text_tokens <= room + more_text:
                return replace(
                    planned, index=i, language=language, wording=wording, height=height, width=width,
                    num_image_tokens=image_tokens, num_text_tokens=text_tokens, reference_sizes=references,
                )  # fmt: skip
    return None


def _reconstructing(
    planned: PlannedSample, i: int, size: Size, reference_pixels: int, same_size: bool
) -> PlannedSample | None:
    reference = clipped_area_size(*size, reference_pixels)
    image_tokens = num_reference_tokens((size, reference))
    # Another shape may have more text tokens, by how the area at which the text encoder sees it is rounded: for that
    # a quarter of them is left free.
    room = planned.num_image_tokens - planned.num_text_tokens // 4
    if size != (planned.height, planned.width) if same_size else image_tokens > room:
        return None
    return replace(
        planned, index=i, height=size[0], width=size[1], num_image_tokens=image_tokens, reference_sizes=(reference,)
    )
