"""Dealing a global batch to ranks and micro-batches by token count."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np

Counts = tuple[int, ...]


def deal(
    num_tokens: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    counts: Sequence[Counts] | None = None,
    max_counts: Counts = (),
) -> list[list[list[int]]]:
    """Deal samples to ranks so that each has about the same tokens and the same number of micro-batches, few of them.

    num_tokens: tokens of each sample of the global batch.  Returns [rank][micro-batch] → positions, rising.
    The ranks' micro-batches of one turn are of about the same size too, since ranks wait for each other at every turn.
    A micro-batch is empty only where there are fewer samples than micro-batches.  Deterministic: ties by position.
    counts: what else is counted of each sample (its image tokens, its text tokens, 1); no micro-batch holds more than
    `max_counts` of any of it.
    Raises: ValueError if one sample alone is above `max_tokens` or `max_counts`.
    """
    if num_tokens and (largest := max(num_tokens)) > max_tokens:
        raise ValueError(
            f"a sample of {largest} tokens does not fit into a micro-batch of {max_tokens}; "
            "raise --max_tokens_per_micro_batch, or lower --max_pixels (of edits with references: --reference_pixels)"
        )
    sizes = [(n, *more) for n, more in zip(num_tokens, counts or [()] * len(num_tokens), strict=True)]
    limits = (max_tokens, *max_counts)
    if too_large := [more for _, *more in sizes if not _within(more, max_counts)]:
        raise ValueError(
            f"a sample of {max(too_large)} (image tokens, text tokens, samples) does not fit into a filled micro-batch "
            f"of {list(max_counts)}; raise --max_tokens_per_micro_batch or change --max_text_tokens_per_micro_batch"
        )
    longest_first = sorted(range(len(sizes)), key=lambda i: (-num_tokens[i], i))
    num_turns = max([1, *(-(-n // (num_ranks * most)) for n, most in zip(_total(sizes), limits, strict=False))])
    packed = None
    while (bins := _fitting(sizes, limits, num_turns * num_ranks)) is None:
        if packed is None:
            packed = _best_fit(longest_first, sizes, limits)
        if -(-len(packed) // num_ranks) <= num_turns:
            bins = _split_up(packed, num_turns * num_ranks)
            break
        num_turns += 1
    return _share_out(bins, num_tokens, num_ranks)


def spreads(sizes: Sequence[Counts], num_bins: int) -> Iterator[list[list[int]]]:
    """Yield ways to spread samples evenly over bins.  sizes: of each its tokens, then what else is counted of it."""
    longest_first = sorted(range(len(sizes)), key=lambda i: (-sizes[i][0], i))
    yield _spread(longest_first, [size[0] for size in sizes], num_bins)
    if sizes and len(sizes[0]) > 1:
        yield _spread_each(longest_first, [size[1:3] for size in sizes], num_bins)


def _fitting(sizes: Sequence[Counts], limits: Counts, num_bins: int) -> list[list[int]] | None:
    return next((bins for bins in spreads(sizes, num_bins) if _fits(bins, sizes, limits)), None)


def _total(sizes: Sequence[Counts]) -> Counts:
    return tuple(map(sum, zip(*sizes, strict=True)))


def _within(size: Counts, limits: Counts) -> bool:
    return all(n <= most for n, most in zip(size, limits, strict=False))  # no sample, no counts


def _fits(bins: list[list[int]], sizes: Sequence[Counts], limits: Counts) -> bool:
    return all(_within(_total([sizes[i] for i in samples]), limits) for samples in bins)


def _spread(longest_first: list[int], num_tokens: Sequence[int], num_bins: int) -> list[list[int]]:
    """Give each sample, longest first, to the bin with the fewest tokens."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, b) for b in range(num_bins)]
    for i in longest_first:
        load, b = loads[0]
        bins[b].append(i)
        heapq.heapreplace(loads, (load + num_tokens[i], b))
    return bins


def _spread_each(longest_first: list[int], counts: Sequence[Counts], num_bins: int) -> list[list[int]]:
    """Give each sample, longest first, to the bin that gets the least above the mean of anything that is counted.

    Of those that stay below it all, to the one with the least so far, against the means.
    """
    counted = np.array(counts, np.float64)
    mean = np.maximum(counted.sum(axis=0) / num_bins, 1.0)
    weight = np.array([1.0 / mean.sum()] * counted.shape[1])  # so that both are in parts of a whole bin
    loads, bins = np.zeros((num_bins, counted.shape[1])), [[] for _ in range(num_bins)]
    for i in longest_first:
        with_it = loads + counted[i]
        above = np.maximum(with_it - mean, 0.0) @ weight
        b = int((1e3 * above + with_it @ (1.0 / mean)).argmin())  # the first of equals
        loads[b] = with_it[b]
        bins[b].append(i)
    return bins


def _best_fit(longest_first: list[int], sizes: Sequence[Counts], limits: Counts) -> list[list[int]]:
    """Put each sample, longest first, into the bin where it leaves the least room, or into a new one."""
    bins: list[list[int]] = []
    room: list[tuple[Counts, int]] = []  # (what is left of each limit, tokens first; bin), sorted
    for i in longest_first:
        first = bisect_left(room, ((sizes[i][0],), 0))
        place = next((k for k in range(first, len(room)) if _within(sizes[i], room[k][0])), None)
        if place is None:
            left, b = limits, len(bins)
            bins.append([])
        else:
            left, b = room.pop(place)
        bins[b].append(i)
        insort(room, (tuple(most - n for most, n in zip(left, sizes[i], strict=True)), b))
    return bins


def _split_up(bins: list[list[int]], num_bins: int) -> list[list[int]]:
    """Move single samples out of the bins with most of them until there are `num_bins`."""
    while len(bins) < num_bins and len(most := max(bins, key=len)) > 1:
        bins.append([most.pop()])
    return bins + [[] for _ in range(num_bins - len(bins))]


def _share_out(bins: list[list[int]], num_tokens: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Give each rank one bin a turn: bins of like size in one turn, the larger one to the rank with less so far."""
    loads = {b: sum(num_tokens[i] for i in bins[b]) for b in range(len(bins))}
    heaviest_first = sorted(loads, key=lambda b: (-loads[b], b))
    dealt: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for turn in range(0, len(bins), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, b in zip(ranks, heaviest_first[turn : turn + num_ranks], strict=True):
            dealt[rank].append(sorted(bins[b]))
            totals[rank] += loads[b]
    return dealt
