"""The global order: every epoch a permutation, well mixed, different, and cheap anywhere."""

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
