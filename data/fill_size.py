"""To which sizes micro-batches are filled where all have to be of few: those that compute the fewest tokens.

A size is (image tokens, text tokens, samples).
"""

import math
from collections.abc import Sequence

from data.pack import Counts, deal, spreads

_MULTIPLE = 16  # tokens: what matrix products on GPUs like
_SPARE_TOKENS = 0.005  # of all, for text beyond the fullest micro-batch seen: who needs more takes a turn more
_SPARE_SAMPLES = 0.25  # a place for a sample costs a row of the modulation, not a token
_MORE_TURNS, _MIN_GAIN = 0.25, 0.004  # how many more turns are tried; what another turn or size must save
_MAX_SIZES = 5  # each is compiled once
_ROOMY = 0.03  # of all, by which one more size is larger: a batch unlike those looked at then costs no turn more


def fill_sizes(batches: Sequence[Sequence[Counts]], num_ranks: int, max_tokens: int, smallest: Counts) -> list[Counts]:
    """Return the sizes, rising, to which the micro-batches of such global batches are best filled.

    A step of fewer, fuller turns is not always the cheaper one: of 9 pictures of one size two ranks compute 10 in 5
    turns of one each, and 12 in 3 of two.  So each number of turns is tried on all batches.
    batches: of each, the (image tokens, text tokens, 1) of its samples; smallest: what each size must hold.
    Returns nothing if no size of at most `max_tokens` tokens does.
    """
    fewest = max(1, math.ceil(max(sum(i + t for i, t, _ in batch) for batch in batches) / (num_ranks * max_tokens)))
    best, best_cost = [], math.inf
    for num_turns in range(fewest, fewest + math.ceil(_MORE_TURNS * fewest) + 3):
        needs = sorted((_needed(batch, num_turns * num_ranks) for batch in batches), key=_tokens)
        for num_sizes in range(1, _MAX_SIZES + 1):
            parts = [needs[: math.ceil(len(needs) * n / num_sizes)] for n in range(1, num_sizes + 1)]
            sizes = [_rounded([max(largest) for largest in zip(*part, smallest, strict=True)]) for part in parts]
            cost = num_turns * sum(map(_tokens, sizes)) / num_sizes
            if _tokens(sizes[-1]) <= max_tokens and cost < best_cost * (1 - _MIN_GAIN):
                best, best_cost = sizes, cost
    if best:
        images, texts, samples = best[-1]
        more = -(-math.ceil(_ROOMY * (images + texts)) // (2 * _MULTIPLE)) * _MULTIPLE  # half of it for each
        roomy = images + more, texts + more, samples
        best = [*best, roomy] if _tokens(roomy) <= max_tokens else best
    return best


def deal_filled(
    counts: Sequence[Counts], num_ranks: int, max_tokens: int, sizes: Sequence[Counts]
) -> list[list[list[int]]]:
    """Deal a global batch as `deal` does, to the size at which the fewest tokens are computed.

    counts: (image tokens, text tokens, 1) of each sample.
    Raises: ValueError if a sample fits no size.
    """
    best, best_cost = None, math.inf
    sums, largest = ([reduce(n) for n in zip(*counts, strict=True)] for reduce in (sum, max))
    for number, size in enumerate(sizes):
        fewest = max(math.ceil(total / (num_ranks * most)) for total, most in zip(sums, size, strict=True))
        is_last_hope = best is None and number == len(sizes) - 1
        if not is_last_hope and (
            fewest * _tokens(size) >= best_cost or any(n > most for n, most in zip(largest, size, strict=True))
        ):
            continue
        dealt = deal([i + t for i, t, _ in counts], num_ranks, max_tokens, counts, size)
        if (cost := len(dealt[0]) * _tokens(size)) < best_cost:
            best, best_cost = dealt, cost
    return best


def _tokens(size: Counts) -> int:
    return size[0] + size[1]


def _rounded(size: Sequence[int]) -> Counts:
    """Return a size with some room to spare, most of it for text, whose lengths differ most."""
    tokens = size[0], size[1] + math.ceil(_SPARE_TOKENS * _tokens(size))
    return *(n + -n % _MULTIPLE for n in tokens), math.ceil(size[2] * (1 + _SPARE_SAMPLES))


def _needed(batch: Sequence[Counts], num_bins: int) -> Counts:
    """Return the fewest image tokens, text tokens and samples that hold each of the bins a batch is spread over."""
    needs = []
    for bins in spreads([(i + t, i, t, n) for i, t, n in batch], num_bins):
        sums = [tuple(map(sum, zip(*(batch[i] for i in samples), strict=True))) for samples in bins if samples]
        needs.append(tuple(map(max, zip(*sums, strict=True))))
    return min(needs, key=_tokens)
