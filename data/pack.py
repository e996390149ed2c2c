"""Dealing a global batch to ranks and micro-batches by token count."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def deal(num_tokens: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Deal samples to ranks so that each has about the same tokens and the same number of micro-batches, few of them.

    num_tokens: tokens of each sample of the global batch.  Returns [rank][micro-batch] → positions, rising.
    The ranks' micro-batches of one turn are of about the same size too, since ranks wait for each other at every turn.
    A micro-batch is empty only where there are fewer samples than micro-batches.  Deterministic: ties by position.
    Raises: ValueError if one sample alone is above `max_tokens`.
    """
    if num_tokens and (largest := max(num_tokens)) > max_tokens:
        raise ValueError(
            f"a sample of {largest} tokens does not fit into a micro-batch of {max_tokens}; "
            "raise --max_tokens_per_micro_batch or lower --max_pixels"
        )
    longest_first = sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i))
    num_turns = max(1, -(-sum(num_tokens) // (num_ranks * max_tokens)))
    bins = _spread(longest_first, num_tokens, num_turns * num_ranks)
    if not _fits(bins, num_tokens, max_tokens):
        packed = _best_fit(longest_first, num_tokens, max_tokens)
        num_turns = -(-len(packed) // num_ranks)
        bins = _spread(longest_first, num_tokens, num_turns * num_ranks)
        if not _fits(bins, num_tokens, max_tokens):
            bins = _split_up(packed, num_turns * num_ranks)
    return _share_out(bins, num_tokens, num_ranks)


def _fits(bins: list[list[int]], num_tokens: Sequence[int], max_tokens: int) -> bool:
    return all(sum(num_tokens[i] for i in samples) <= max_tokens for samples in bins)


def _spread(longest_first: list[int], num_tokens: Sequence[int], num_bins: int) -> list[list[int]]:
    """Give each sample, longest first, to the bin with the fewest tokens."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, b) for b in range(num_bins)]
    for i in longest_first:
        load, b = loads[0]
        bins[b].append(i)
        heapq.heapreplace(loads, (load + num_tokens[i], b))
    return bins


def _best_fit(longest_first: list[int], num_tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each sample, longest first, into the bin where it leaves the least room, or into a new one."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for i in longest_first:
        place = bisect_left(room, (num_tokens[i], 0))
        if place == len(room):
            bins.append([])
            left, b = max_tokens, len(bins) - 1
        else:
            left, b = room.pop(place)
        bins[b].append(i)
        insort(room, (left - num_tokens[i], b))
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
