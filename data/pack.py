"""Dealing a global batch to ranks and micro-batches by token count."""

import heapq
from collections.abc import Sequence


def deal(num_tokens: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Deal samples to ranks so that each has about the same tokens and the same number of micro-batches.

    num_tokens: tokens of each sample of the global batch.  Returns [rank][micro-batch] → positions, rising.
    Longest first, always to the emptiest; ties by position: deterministic.  A micro-batch is empty only where a rank
    has fewer samples than there are micro-batches.
    Raises: ValueError if one sample alone is above `max_tokens`.
    """
    if num_tokens and (largest := max(num_tokens)) > max_tokens:
        raise ValueError(
            f"a sample of {largest} tokens does not fit into a micro-batch of {max_tokens}; "
            "raise --max_tokens_per_micro_batch or lower --max_pixels"
        )
    longest_first = sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i))
    by_rank = _spread(longest_first, num_tokens, num_ranks)
    num_micro = max(1, *(len(_first_fit(mine, num_tokens, max_tokens)) for mine in by_rank))
    dealt = []
    for mine in by_rank:
        micro_batches = _spread(mine, num_tokens, num_micro)
        if any(sum(num_tokens[i] for i in micro) > max_tokens for micro in micro_batches):
            packed = _first_fit(mine, num_tokens, max_tokens)
            micro_batches = packed + [[] for _ in range(num_micro - len(packed))]
        dealt.append([sorted(micro) for micro in micro_batches])
    return dealt


def _spread(longest_first: list[int], num_tokens: Sequence[int], num_parts: int) -> list[list[int]]:
    """Give each sample, longest first, to the part with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for i in longest_first:
        load, part = heapq.heappop(loads)
        parts[part].append(i)
        heapq.heappush(loads, (load + num_tokens[i], part))
    return parts


def _first_fit(longest_first: list[int], num_tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each sample, longest first, into the first micro-batch with room for it."""
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for i in longest_first:
        for m, left in enumerate(room):
            if num_tokens[i] <= left:
                micro_batches[m].append(i)
                room[m] -= num_tokens[i]
                break
        else:
            micro_batches.append([i])
            room.append(max_tokens - num_tokens[i])
    return micro_batches
