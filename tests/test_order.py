"""The global order: every epoch a permutation, well mixed, different, and cheap anywhere."""

import random
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from data.order import GlobalOrder, SampleRef


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 16, 17, 463, 4096, 10_007])
def test_every_epoch_is_a_permutation(num_samples):
    order = GlobalOrder(num_samples, 1, seed=3)
    places = np.arange(num_samples, dtype=np.uint64)
    for epoch in range(3):
        assert sorted(order.permute(epoch, places).tolist()) == list(range(num_samples))


def test_batches_are_consecutive_pieces_of_the_epochs():
    order = GlobalOrder(7, 4, seed=0)
    visits = [ref for step in range(14) for ref in order.batch(step)]
    for epoch in range(8):
        part = visits[epoch * 7 : (epoch + 1) * 7]
        assert {ref.epoch for ref in part} == {epoch}
        assert sorted(ref.index for ref in part) == list(range(7))


def test_a_batch_larger_than_the_data_set_spans_epochs():
    assert sorted((r.epoch, r.index) for r in GlobalOrder(3, 8, 0).batch(0))[:6] == [
        (e, i) for e in (0, 1) for i in range(3)
    ]


def test_epochs_and_seeds_differ():
    places = np.arange(1000, dtype=np.uint64)
    a, b = GlobalOrder(1000, 1, 0), GlobalOrder(1000, 1, 1)
    for x, y in ((a.permute(0, places), a.permute(1, places)), (a.permute(0, places), b.permute(0, places))):
        assert (x == y).mean() < 0.01


def many_epochs(order: GlobalOrder, epochs: int) -> np.ndarray:
    """Return the permutation of each epoch, (epochs, N)."""
    which = np.repeat(np.arange(epochs, dtype=np.uint64), order.num_samples)
    places = np.tile(np.arange(order.num_samples, dtype=np.uint64), epochs)
    return order.permute(which, places).reshape(epochs, -1)


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_every_order_of_a_few_samples_is_equally_likely(num_samples):
    counts, epochs = Counter(), 6000
    for seed in range(2):
        counts.update(map(tuple, many_epochs(GlobalOrder(num_samples, 1, seed), epochs).tolist()))
    orders = list(permutations(range(num_samples)))
    expected, freedom = 2 * epochs / len(orders), len(orders) - 1
    chi2 = sum((counts[order] - expected) ** 2 / expected for order in orders)
    assert set(counts) == set(orders) and chi2 < freedom + 4 * (2 * freedom) ** 0.5


def test_order_is_well_mixed():
    """Where a sample lands is uniform: chi-square of (place, sample) tables over many epochs, 15 x 15 degrees."""
    order, places = GlobalOrder(16, 1, seed=0), np.arange(16, dtype=np.uint64)
    table, following, epochs = np.zeros((16, 16)), np.zeros((16, 16)), 4000
    for permuted in many_epochs(order, epochs):
        table[places, permuted] += 1
        following[permuted[:-1], permuted[1:]] += 1
    expected = epochs / 16
    assert ((table - expected) ** 2 / expected).sum() < 225 + 5 * (2 * 225) ** 0.5
    pairs = following[~np.eye(16, dtype=bool)]  # neighbours are independent as well
    expected = epochs * 15 / 240
    assert ((pairs - expected) ** 2 / expected).sum() < 239 + 5 * (2 * 239) ** 0.5


WINDOWED = [([5, 0, 3, 7, 1, 4], 2), ([1, 1, 1], 1), ([100] * 37, 4), ([0, 0, 9, 0, 8], 1), ([3] * 16, 16)]


@pytest.mark.parametrize("sizes, shuffle_shards", WINDOWED)
def test_every_windowed_epoch_is_a_permutation_that_reads_few_shards_at_a_time(sizes, shuffle_shards):
    order, shard_of = GlobalOrder(sizes, 1, 3, shuffle_shards), np.repeat(np.arange(len(sizes)), sizes)
    with_samples = sum(size > 0 for size in sizes)
    assert order.num_windows == -(-with_samples // shuffle_shards)
    for epoch in range(4):
        visits = order.permute(epoch, np.arange(order.num_samples, dtype=np.uint64)).astype(int)
        assert sorted(visits.tolist()) == list(range(order.num_samples))
        # A shard is read in one run of consecutive visits, together with no more others than a window has.
        runs = [(int(at.min()), int(at.max())) for at in (np.flatnonzero(shard_of[visits] == s) for s in set(shard_of))]
        open_at_once = max(sum(first <= at <= last for first, last in runs) for at in range(order.num_samples))
        assert open_at_once <= shuffle_shards


def test_windows_differ_between_epochs_and_are_mixed_within():
    order = GlobalOrder([50] * 40, 1, 0, shuffle_shards=4)
    places = np.arange(2000, dtype=np.uint64)
    first, second = (order.permute(epoch, places).astype(int) // 50 for epoch in (0, 1))
    windows = [{frozenset(part.tolist()) for part in np.split(epoch, 10)} for epoch in (first, second)]
    assert all(len(window) == 4 for epoch in windows for window in epoch) and len(windows[0] & windows[1]) <= 1
    for part in np.split(first, 10):  # as many changes of shard as if 200 visits were shuffled: 149 of 199, deviation 6
        assert 120 < (part[1:] != part[:-1]).sum() < 178


def test_a_shard_is_as_likely_in_any_window():
    """Chi-square of (shard, window) over many epochs: 7 x 3 degrees."""
    order, table, epochs = GlobalOrder([2] * 8, 1, 0, shuffle_shards=2), np.zeros((8, 4)), 400
    for epoch in range(epochs):
        visits = order.permute(epoch, np.arange(16, dtype=np.uint64)).astype(int)
        table[visits // 2, np.arange(16) // 4] += 1  # once for both samples of the shard
    expected = epochs / 4
    assert ((table - expected) ** 2 / expected).sum() < 21 + 5 * (2 * 21) ** 0.5


def test_any_position_alone_is_what_it_is_in_the_whole():
    order = GlobalOrder([7, 3, 0, 9, 2, 6], 5, 1, shuffle_shards=2)
    whole = order.visits(np.arange(200))
    fresh = GlobalOrder([7, 3, 0, 9, 2, 6], 5, 1, shuffle_shards=2)
    assert all(fresh.visits(np.array([n])) == [whole[n]] for n in random.Random(0).sample(range(200), 60))
    assert [ref for step in range(40) for ref in order.batch(step)] == whole


def test_far_positions_of_huge_sets_cost_no_memory():
    order = GlobalOrder(10**12, 4, seed=0)
    batch = order.batch(10**12)
    assert len(set(batch)) == 4 and all(0 <= r.index < 10**12 and r.epoch == 4 for r in batch)
    assert batch == GlobalOrder(10**12, 4, seed=0).batch(10**12)
    assert isinstance(batch[0], SampleRef)


def test_an_empty_set_is_refused():
    with pytest.raises(ValueError, match="no usable sample"):
        GlobalOrder(0, 4, 0)
    with pytest.raises(ValueError, match="global_batch_size"):
        GlobalOrder(4, 0, 0)
    with pytest.raises(ValueError, match="no usable sample"):
        GlobalOrder([0, 0], 4, 0)
    with pytest.raises(ValueError, match="--shuffle_shards must be at least 1, got 0"):
        GlobalOrder([4, 4], 4, 0, shuffle_shards=0)
