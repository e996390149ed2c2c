"""Dealing: every sample once, no micro-batch too large, equal numbers, as few as can be, balanced."""

import random

import pytest

from data.pack import deal


def fits(tokens: list[int], num_bins: int, max_tokens: int) -> bool:
    """Whether any way at all puts the tokens into the bins, by trying every one."""
    loads = [0] * num_bins

    def place(i: int) -> bool:
        if i == len(tokens):
            return True
        for load in set(loads):  # bins of equal load are alike
            b = loads.index(load)
            if load + tokens[i] <= max_tokens:
                loads[b] += tokens[i]
                if place(i + 1):
                    return True
                loads[b] -= tokens[i]
        return False

    tokens = sorted(tokens, reverse=True)
    return place(0)


def check(tokens: list[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    dealt = deal(tokens, num_ranks, max_tokens)
    assert dealt == deal(tokens, num_ranks, max_tokens)
    assert len(dealt) == num_ranks and len({len(rank) for rank in dealt}) == 1
    assert sorted(i for rank in dealt for micro in rank for i in micro) == list(range(len(tokens)))
    assert all(sum(tokens[i] for i in micro) <= max_tokens for rank in dealt for micro in rank)
    empty = sum(not micro for rank in dealt for micro in rank)
    assert empty == max(0, num_ranks * len(dealt[0]) - len(tokens))
    return dealt


def test_number_of_micro_batches_against_every_way_there_is():
    rng, more = random.Random(0), 0
    for _ in range(300):
        tokens = [rng.randint(1, 60) for _ in range(rng.randint(1, 11))]
        num_ranks, max_tokens = rng.choice([1, 2, 3]), rng.choice([60, 80, 100])
        best = 1
        while not fits(tokens, num_ranks * best, max_tokens):
            best += 1
        num_micro = len(check(tokens, num_ranks, max_tokens)[0])
        assert num_micro <= best + 1
        more += num_micro > best
    assert more <= 3  # the best is NP-hard; this hard case of few large samples misses it in one of 100 or less


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed):
    """Captions of 8-40 tokens beside pictures of a few sizes."""
    rng = random.Random(seed)
    num_ranks, max_tokens = rng.choice([1, 2, 3, 8, 32]), rng.choice([80, 300, 4096])
    tokens = [rng.choice([16, 24, 36]) + rng.randint(8, 40) for _ in range(rng.choice([1, 3, 17, 128, 1000]))]
    dealt = check(tokens, num_ranks, max_tokens)
    totals = [sum(tokens[i] for micro in rank for i in micro) for rank in dealt]
    if max_tokens > 80:  # micro-batches of several samples
        assert max(totals) - min(totals) <= max(tokens)
        assert len(dealt[0]) <= -(-sum(tokens) // (num_ranks * max_tokens)) * 1.2 + 1
    if max_tokens == 4096:
        for turn in zip(*dealt, strict=True):
            loads = [sum(tokens[i] for i in micro) for micro in turn]
            assert max(loads) - min(loads) <= max(tokens)


@pytest.mark.parametrize("seed", range(10))
def test_further_counts_are_limits_too(seed):
    rng = random.Random(seed)
    num_ranks, max_counts = rng.choice([1, 2, 5]), (150, 60, 6)
    counts = [(rng.choice([16, 24, 36]), rng.randint(1, 40), 1) for _ in range(rng.choice([1, 17, 128]))]
    tokens = [img + txt for img, txt, _ in counts]
    dealt = deal(tokens, num_ranks, sum(max_counts[:2]), counts, max_counts)
    assert len({len(rank) for rank in dealt}) == 1
    assert sorted(i for rank in dealt for micro in rank for i in micro) == list(range(len(tokens)))
    for micro in (micro for rank in dealt for micro in rank):
        assert all(sum(counts[i][k] for i in micro) <= most for k, most in enumerate(max_counts))
    least = max(-(-sum(column) // most) for column, most in zip(zip(*counts, strict=True), max_counts, strict=True))
    assert num_ranks * (len(dealt[0]) - 1) <= least * 1.25


def test_world_size_only_changes_who():
    tokens = [random.Random(1).randint(8, 40) for _ in range(64)]
    for ranks in (1, 2, 4):
        check(tokens, ranks, 200)


def test_a_tight_fit_is_found():
    assert deal([6, 4, 4, 3, 3], 2, 10) == [[[0, 1]], [[2, 3, 4]]]  # the even spread alone gives 9 and 11


def test_fewer_samples_than_ranks_leaves_empty_micro_batches():
    assert deal([5, 9], 4, 10) == [[[1]], [[0]], [[]], [[]]]
    assert deal([], 2, 10) == [[[]], [[]]]


def test_a_sample_too_large_is_named():
    with pytest.raises(ValueError, match="70 tokens.*64.*max_tokens_per_micro_batch"):
        deal([10, 70], 2, 64)
