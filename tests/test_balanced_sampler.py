"""Balanced categories: shares exact in every epoch, nothing lost, the same on any ranks, through any stop."""

import json
import random
from collections import Counter
from fractions import Fraction

import pytest
from torch.utils.data import DataLoader

from data.balanced_sampler import CategoryBalancedSampler
from data.epoch_quotas import EpochQuotas, whole_weights
from data.index import build_index
from data.plan import BatchPlan
from tests.shards import simple_samples, write_shard

MOSTLY_TEXT = ["text"] * 160 + ["remove"] * 13 + ["recolor"] * 20 + ["add"] * 7  # 80 % of 200
random.Random(0).shuffle(MOSTLY_TEXT)


def epoch_of(sampler, epoch):
    """All places of an epoch, in order, from the order's side."""
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    return [ref for step in steps for ref in sampler.batch(step)]


@pytest.mark.parametrize(
    "shares",
    [
        None,
        {"text": 1, "remove": 1},
        {"text": 0.8, "remove": 0.1, "recolor": 0.07, "add": 0.03},
        {"add": 1},
        {"text": 1e-3, "remove": 1, "recolor": 1 / 3, "add": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 8, 64, 300])
def test_shares_repeats_and_cover_in_closed_form(shares, batch):
    sampler = CategoryBalancedSampler(MOSTLY_TEXT, shares, 1, 0, seed=5, global_batch_size=batch)
    taken = {n: s for n, s in (shares or dict.fromkeys(MOSTLY_TEXT, 1)).items() if s}
    sizes = Counter(name for name in MOSTLY_TEXT if name in taken)
    length = max(1, sizes.total() // batch) * batch
    assert sampler.total_size == length
    exact = {n: Fraction(str(float(s))) for n, s in taken.items()}
    due = {n: s / sum(exact.values()) for n, s in exact.items()}
    in_all = Counter()
    seen = set()
    for epoch in range(12):
        refs = epoch_of(sampler, epoch)
        assert len(refs) == length
        counts = Counter(MOSTLY_TEXT[ref.index] for ref in refs)
        visits = Counter(ref.index for ref in refs)
        for name, share in due.items():
            assert abs(counts[name] - share * length) < 1
            members = [i for i, other in enumerate(MOSTLY_TEXT) if other == name]
            low = counts[name] // sizes[name]
            assert {visits[i] for i in members} <= {low, -(-counts[name] // sizes[name])}  # no more than the share asks
            in_all.update({i: visits[i] for i in members})
            assert max(in_all[i] for i in members) - min(in_all[i] for i in members) <= 1  # pass after pass
        assert counts.keys() <= due.keys()
        for ref in refs:  # so noise and wording are drawn anew at every visit
            assert (ref.epoch, ref.index) not in seen
            seen.add((ref.epoch, ref.index))
        tally = Counter()
        for m, ref in enumerate(refs, 1):  # every prefix of an epoch
            tally[MOSTLY_TEXT[ref.index]] += 1
            assert all(abs(tally[n] - counts[n] * m / length) < 1 for n in due)
    for name, share in due.items():
        assert abs(sum(in_all[i] for i, other in enumerate(MOSTLY_TEXT) if other == name) - 12 * length * share) < 2


def test_what_rounding_takes_comes_back():
    """Random shares, hundreds of epochs: each epoch off by less than one, all of them together by less than two."""
    rng = random.Random(1)
    for _ in range(100):
        weights = [rng.choice([1, rng.randint(1, 20), rng.randint(1, 1000)]) for _ in range(rng.randint(1, 12))]
        length = rng.randint(1, 40)
        quotas, totals = EpochQuotas(weights, length), [0] * len(weights)
        for epoch in range(300):
            assert quotas.before(epoch) == totals
            now = quotas.quotas(epoch)
            due = [Fraction(weight * length, sum(weights)) for weight in weights]
            assert sum(now) == length and all(abs(n - d) < 1 for n, d in zip(now, due, strict=True))
            totals = [total + n for total, n in zip(totals, now, strict=True)]
            assert all(abs(total - (epoch + 1) * d) < 2 for total, d in zip(totals, due, strict=True))
    assert quotas.before(3) == EpochQuotas(weights, length).before(3)  # long forgotten


def test_shares_are_the_decimals_they_are_written_as():
    assert whole_weights({"a": 0.1, "b": 0.2, "c": 0.7}) == [1, 2, 7]
    assert whole_weights({"a": 1, "b": 1e-4}) == [10000, 1]
    assert whole_weights({"a": 6.0}) == [1]


def test_a_small_category_is_not_left_out_and_an_epoch_is_not_the_last_one():
    sampler = CategoryBalancedSampler(MOSTLY_TEXT, None, 1, 0, global_batch_size=20)
    first, second = (epoch_of(sampler, epoch) for epoch in (0, 1))
    assert Counter(MOSTLY_TEXT[ref.index] for ref in first) == dict.fromkeys(set(MOSTLY_TEXT), 50)
    adds = [ref.index for ref in first if MOSTLY_TEXT[ref.index] == "add"]
    assert [len(set(adds[n : n + 7])) for n in range(0, 49, 7)] == [7] * 7  # all, then all again
    texts = [[ref.index for ref in epoch if MOSTLY_TEXT[ref.index] == "text"] for epoch in (first, second)]
    assert not set(texts[0]) & set(texts[1])
    assert len({i for e in range(4) for r in epoch_of(sampler, e) if MOSTLY_TEXT[i := r.index] == "text"}) == 160
    assert adds[:7] != adds[7:14] and [r.index for r in first] != [r.index for r in second]
    other = CategoryBalancedSampler(MOSTLY_TEXT, None, 1, 0, seed=1, global_batch_size=20)
    assert epoch_of(other, 0) != first


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_number_of_ranks_has_one_order(num_ranks):
    alone = CategoryBalancedSampler(MOSTLY_TEXT, {"text": 1, "remove": 1}, 1, 0, seed=2, global_batch_size=8)
    ranks = [
        CategoryBalancedSampler(MOSTLY_TEXT, {"text": 1, "remove": 1}, num_ranks, rank, seed=2, global_batch_size=8)
        for rank in range(num_ranks)
    ]
    for epoch in (0, 3):
        for sampler in (alone, *ranks):
            sampler.set_epoch(epoch)
        whole, parts = list(alone), [list(sampler) for sampler in ranks]
        assert whole == [ref.index for ref in epoch_of(alone, epoch)] and len(whole) == len(alone) == 168
        for rank, part in enumerate(parts):
            assert len(part) == len(ranks[rank])
            batches = [whole[n : n + 8][rank::num_ranks] for n in range(0, len(whole), 8)]
            assert part == [i for batch in batches for i in batch]


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_sampler_resumes_after_any_global_batch_on_any_ranks(before, after):
    def samplers(num_ranks):
        return [CategoryBalancedSampler(MOSTLY_TEXT, None, num_ranks, r, 3, 20) for r in range(num_ranks)]

    for sampler in (undisturbed := samplers(after)):
        sampler.set_epoch(2)
    rest, following = [list(sampler) for sampler in undisturbed], []
    for sampler in undisturbed:
        sampler.set_epoch(3)
        following.append(list(sampler))
    for step in range(undisturbed[0].steps_per_epoch + 1):
        stopped = samplers(before)
        for sampler in stopped:
            sampler.set_epoch(2)
            iterator = iter(sampler)
            for _ in range(step * 20 // before):
                next(iterator)
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in stopped]
        assert all(state == states[0] for state in states)
        assert states[0] == samplers(1)[0].state_dict() | states[0] and states[0]["position"] == step * 20
        for rank, sampler in enumerate(samplers(after)):
            sampler.load_state_dict(states[0])
            sampler.set_epoch(sampler.epoch)  # as a loop over epochs does
            assert list(sampler) == rest[rank][step * 20 // after :]
            assert list(sampler) == rest[rank]  # and again from the first
            sampler.set_epoch(3)
            assert list(sampler) == following[rank]


def test_a_sampler_resumes_amid_a_batch_where_ranks_come_out_even():
    whole = list(CategoryBalancedSampler(MOSTLY_TEXT, None, 1, 0, 3, 20))
    sampler = CategoryBalancedSampler(MOSTLY_TEXT, None, 2, 1, 3, 20)
    iterator = iter(sampler)
    for _ in range(13):
        next(iterator)
    four = CategoryBalancedSampler(MOSTLY_TEXT, None, 4, 3, 3, 20)
    with pytest.raises(ValueError, match="after 26 samples of the epoch, 4 ranks"):
        four.load_state_dict(sampler.state_dict())
    next(iterator)
    four.load_state_dict(sampler.state_dict())
    assert list(four) == whole[28:][3::4]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_takes_it(num_workers):
    parts = []
    for rank in range(2):
        sampler = CategoryBalancedSampler(MOSTLY_TEXT, {"text": 1, "remove": 3}, 2, rank, seed=1, global_batch_size=8)
        loader = DataLoader(range(len(MOSTLY_TEXT)), batch_size=4, sampler=sampler, num_workers=num_workers)
        assert len(loader) == sampler.steps_per_epoch
        parts.append([batch.tolist() for batch in loader])
        if num_workers == 0:
            continue
        # Workers draw ahead, so the loop says what it has used.
        next(iter(loader))
        resumed = CategoryBalancedSampler(MOSTLY_TEXT, {"text": 1, "remove": 3}, 2, rank, seed=1, global_batch_size=8)
        resumed.load_state_dict(sampler.state_dict(position=8))
        assert [resumed.epoch, *resumed] == [0, *(i for batch in parts[-1][1:] for i in batch)]
    alone = CategoryBalancedSampler(MOSTLY_TEXT, {"text": 1, "remove": 3}, 1, 0, seed=1, global_batch_size=8)
    for step in range(alone.steps_per_epoch):
        batch = [None] * 8
        batch[0::2], batch[1::2] = parts[0][step], parts[1][step]
        assert batch == [ref.index for ref in alone.batch(step)]


# ---- With an index and a plan ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    texts = [sample | {"category": "text"} for sample in simple_samples(40, "t")]
    mixed = simple_samples(11, "m")  # of categories a and b
    english = [{**sample, "captions": {"en": ["x"]}, "category": "a"} for sample in simple_samples(5, "e")]
    shards = [write_shard(folder / f"{n}.tar", s) for n, s in enumerate((texts[:25], mixed, texts[25:] + english))]
    return build_index([str(shard) for shard in shards], lambda text: len(text.split()) + 5, "t", folder / "cache")


def plan_of(index, num_ranks=1, rank=0):
    sampler = CategoryBalancedSampler(index, {"text": 2, "a": 1, "b": 1}, num_ranks, rank, 7, 12)
    return BatchPlan(index, sampler, num_ranks=num_ranks, rank=rank, max_tokens=100, seed=7, num_empty_tokens=5)


def test_an_index_is_the_list_of_its_categories(index):
    listed = CategoryBalancedSampler([index[i].group for i in range(len(index))], None, 1, 0, 7, 12)
    indexed = CategoryBalancedSampler(index, None, 1, 0, 7, 12)
    for step in range(20):
        assert indexed.batch(step) == listed.batch(step)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_plan_deals_its_batches_on_any_ranks(index, num_ranks):
    whole = plan_of(index)
    plans = [plan_of(index, num_ranks, rank) for rank in range(num_ranks)]
    for step in range(13):
        planned = whole.global_batch(step)
        micros = [plan.micro_batches(step) for plan in plans]
        assert len({len(micro) for micro in micros}) == 1
        dealt = [p for micro in micros for samples in micro for p in samples if p.weight]
        assert Counter((p.epoch, p.index) for p in dealt) == Counter((p.epoch, p.index) for p in planned)
        counts = Counter(index[p.index].group for p in planned)
        assert all(abs(counts[name] - due) < 2 for name, due in (("text", 6), ("a", 3), ("b", 3)))


def test_a_plan_resumes_at_any_step(index):
    undisturbed = plan_of(index)
    batches = [undisturbed.global_batch(step) for step in range(20)]
    for stop in range(20):
        stopped = plan_of(index, 2, 0)
        stopped.micro_batches(min(19, stop + 3))  # as loaders do, ahead of what is saved
        state = json.dumps(stopped.state(stop))
        assert len(state) < 4096
        resumed = plan_of(index, 4, 1)
        resumed.load_state(json.loads(state))
        assert [resumed.global_batch(step) for step in range(stop, 20)] == batches[stop:]
        assert resumed.state(stop) == undisturbed.state(stop) == json.loads(state)
        assert resumed.global_batch(max(0, stop - 1)) == batches[max(0, stop - 1)]  # what lies before is still there


# ---- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("categories", "arguments", "message"),
    [
        ([], {}, "no usable sample"),
        (
            ["a", "b"],
            {"shares": {"a": 1, "recolour": 1}},
            r"shares name \['recolour'\].*the categories are \['a', 'b'\]",
        ),
        (["a"], {"shares": {"a": -1}}, "share of 'a' must be a number from 0 on, got -1"),
        (["a"], {"shares": {"a": float("nan")}}, "got nan"),
        (["a"], {"shares": {"a": 0}}, "all shares are zero"),
        (["a"], {"shares": {}}, "all shares are zero"),
        (["a"], {"global_batch_size": 0}, "--global_batch_size must be at least 1, got 0"),
        (["a"], {"num_replicas": 2, "rank": 2}, "rank"),
    ],
)
def test_faults_are_named(categories, arguments, message):
    with pytest.raises(ValueError, match=message):
        CategoryBalancedSampler(categories, **arguments)


def test_ranks_that_would_have_unequally_many_are_refused_as_a_sampler_only():
    sampler = CategoryBalancedSampler(MOSTLY_TEXT, None, 3, 0, 0, 8)
    assert len(sampler.batch(0)) == 8
    for use in (len, iter):
        with pytest.raises(ValueError, match="a global_batch_size of 8 does not divide evenly among 3 ranks"):
            use(sampler)


def test_another_balance_does_not_resume():
    state = CategoryBalancedSampler(MOSTLY_TEXT, {"text": 1, "add": 1}, 1, 0, 3, 8).state_dict()
    CategoryBalancedSampler(MOSTLY_TEXT, {"text": 50, "add": 50, "remove": 0}, 1, 0, 3, 8).load_state_dict(state)
    for shares, seed, batch in (({"text": 1, "add": 2}, 3, 8), ({"text": 1, "add": 1}, 4, 8), (None, 3, 8),
                                ({"text": 1, "add": 1}, 3, 16)):  # fmt: skip
        with pytest.raises(ValueError, match="other shares, categories, seed or global_batch_size"):
            CategoryBalancedSampler(MOSTLY_TEXT, shares, 1, 0, seed, batch).load_state_dict(state)
    with pytest.raises(ValueError, match="position 400"):
        CategoryBalancedSampler(MOSTLY_TEXT, None, 1, 0, 3, 8).state_dict(position=400)


def test_categories_without_a_share_are_named(caplog):
    with caplog.at_level("WARNING", "train"):
        CategoryBalancedSampler(MOSTLY_TEXT, {"text": 1, "remove": 1}, 1, 0)
    assert "27 of 200 samples are of categories without a share ('add', 'recolor'): never visited" in caplog.text


def test_ranks_are_those_of_torch_distributed(monkeypatch):
    alone = CategoryBalancedSampler(MOSTLY_TEXT)
    assert (alone.num_replicas, alone.rank, alone.global_batch_size) == (1, 0, 1)
    for name, value in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 3)):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    given = CategoryBalancedSampler(MOSTLY_TEXT, None, 4, 3, 0, 4)
    assert list(CategoryBalancedSampler(MOSTLY_TEXT)) == list(given)
