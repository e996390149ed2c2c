"""Dealing: every sample once, no micro-batch too large, equal numbers, balanced."""

import random

import pytest

from data.pack import deal


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed):
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 2, 3, 8])
    tokens = [rng.randint(1, 60) for _ in range(rng.choice([1, 3, 17, 128]))]
    max_tokens = rng.choice([60, 100, 1000])
    dealt = deal(tokens, num_ranks, max_tokens)
    assert sorted(i for rank in dealt for micro in rank for i in micro) == list(range(len(tokens)))
    assert len(dealt) == num_ranks and len({len(rank) for rank in dealt}) == 1
    assert all(sum(tokens[i] for i in micro) <= max_tokens for rank in dealt for micro in rank)
    loads = [sum(tokens[i] for micro in rank for i in micro) for rank in dealt]
    assert max(loads) - min(loads) <= max(tokens)  # longest first to the emptiest
    # First fit decreasing needs at most 11/9 of the best number of micro-batches, plus one.
    lower_bound = -(-max(loads) // max_tokens)
    assert len(dealt[0]) <= lower_bound * 11 / 9 + 1


def test_world_size_only_changes_who():
    tokens = [random.Random(1).randint(8, 40) for _ in range(64)]
    assert deal(tokens, 4, 200) == deal(tokens, 4, 200)
    for ranks in (1, 2, 4):
        assert sorted(i for r in deal(tokens, ranks, 200) for m in r for i in m) == list(range(64))


def test_fewer_samples_than_ranks_leaves_empty_micro_batches():
    assert deal([5, 9], 4, 10) == [[[1]], [[0]], [[]], [[]]]


def test_a_sample_too_large_is_named():
    with pytest.raises(ValueError, match="70 tokens.*64.*max_tokens_per_micro_batch"):
        deal([10, 70], 2, 64)
