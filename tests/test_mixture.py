"""Mixtures: shares exact at every sample, every group at its own pace, the same on any cluster, through any stop."""

import json
import random
from collections import Counter

import pytest

from data.index import build_index
from data.interleave import Interleaver
from data.loader import Loader
from data.mixture import load_mixture
from data.mixture_order import MixtureOrder
from data.order import GlobalOrder
from data.plan import BatchPlan
from data.reader import Reader
from tests.shards import simple_samples, write_shard

BATCH = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sources; the captions of one are in both languages, those of the other in English alone."""
    folder = tmp_path_factory.mktemp("mixture")
    english = [sample | {"captions": {"en": ["x"]}} for sample in simple_samples(10, "e")]
    both = [write_shard(folder / f"both-{n}.tar", simple_samples(7, f"b{n}-")) for n in range(3)]
    shards = {str(path): "both" for path in both} | {str(write_shard(folder / "one.tar", english)): "one"}
    index = build_index(list(shards), lambda text: len(text.split()) + 5, "t", folder / "cache")
    file = folder / "mixture.toml"
    file.write_text(f"""
        [sources]
        both = "{folder}/both-*.tar"
        one = {{data = "{folder}/one.tar", validation = "{both[0]}"}}
        [[groups]]
        language = "zh"
        category = "a"
        share = [[0, 0.6], [30, 0.2]]
        [[groups]]
        language = "zh"
        share = 0.1
        [[groups]]
        source = "one"
        share = 0.3
        [[groups]]
        language = "en"
        share = [[10, 0], [20, 0.4]]
    """)
    mixture = load_mixture(str(file))
    assert mixture.shards("train", folder) == shards
    return index, mixture, list(shards.values())


def order_of(data):
    index, mixture, sources = data
    return MixtureOrder(index, mixture, sources, BATCH, seed=3, shuffle_shards=2)


def plan_of(data, mixed, num_ranks=1, rank=0, max_tokens=200):
    order = order_of(data) if mixed else GlobalOrder(data[0].shard_sizes, BATCH, 3, shuffle_shards=2)
    return BatchPlan(data[0], order, num_ranks=num_ranks, rank=rank, max_tokens=max_tokens, seed=3, num_empty_tokens=5)


def random_shares(rng, num_groups):
    groups = [
        [(step, rng.choice([0, 0.01, 1, 5]) * rng.random()) for step in sorted(rng.sample(range(60), num_points))]
        for num_points in rng.choices([1, 3], k=num_groups)
    ]
    return [[(0, 0.5)], *groups[1:]]


@pytest.mark.parametrize("seed", range(12))
def test_every_prefix_of_a_random_mixture_is_exact(seed):
    """Against shares summed up sample by sample; the bound is Tijdeman's, less than one."""
    rng = random.Random(seed)
    num_groups, batch = rng.choice([2, 3, 5, 12]), rng.choice([1, 7, 16])
    groups = random_shares(rng, num_groups)
    interleaver, totals, counts, bound = (
        Interleaver(groups, batch),
        [0.0] * num_groups,
        Counter(),
        1 - 1 / max(2, 2 * num_groups - 2),
    )
    knots = sorted({0, *(step for points in groups for step, _ in points)})

    def line(points, step):
        before = [p for p in points if p[0] <= step] or points[:1]
        after = [p for p in points if p[0] > step]
        if not after or before[-1][0] > step:
            return before[-1][1]
        (a, x), (b, y) = before[-1], after[0]
        return x + (y - x) * (step - a) / (b - a)

    normal = {s: [line(p, s) / sum(line(q, s) for q in groups) for p in groups] for s in knots}
    for step in range(80):
        shares = [line([(s, normal[s][g]) for s in knots], step) for g in range(num_groups)]
        for group in interleaver.step(step):
            totals = [total + share for total, share in zip(totals, shares, strict=True)]
            counts[group] += 1
            assert all(abs(counts[g] - totals[g]) <= bound + 1e-5 for g in range(num_groups))


def test_reweighting_keeps_to_the_shares_and_resumes():
    rng = random.Random(5)
    for _ in range(6):
        groups = random_shares(rng, 5)
        whole, worst, totals, counts = Interleaver(groups, 8), 0.0, [0.0] * 5, [0] * 5
        for step in range(90):
            if step % 10 == 5:
                whole.reweight(step, [rng.choice([0.5, 0.75, 1, 1.5, 2]) for _ in range(5)])
                resumed = Interleaver(groups, 8)
                resumed.load_state(json.loads(json.dumps(whole.state(step))))
            if step > 5:
                assert resumed.step(step) == whole.step(step)
            for group in whole.step(step):
                counts[group] += 1
            totals = [total + 8 * share for total, share in zip(totals, whole.shares(step), strict=True)]
            worst = max(worst, *(abs(n - total) for n, total in zip(counts, totals, strict=True)))
        assert worst < 2


def test_groups_get_their_own_samples_each_once_a_pass(data):
    index, mixture, sources = data
    order, seen = order_of(data), {}
    for step in range(60):
        refs = order.batch(step)
        assert Counter(ref.group for ref in refs) == {
            group: n
            for group in range(4)
            if (n := list(order.counts(step + 1).values())[group] - list(order.counts(step).values())[group])
        }
        for ref in refs:
            record = index[ref.index]
            assert all(mixture.group_of_record(record, name, None, sources) == ref.group for name in ref.languages)
            seen.setdefault((ref.group, ref.epoch), []).append(ref.index)
    eligible = {
        group: {i for i in range(len(index)) for name in index[i].caption_tokens
                if mixture.group_of_record(index[i], name, None, sources) == group}
        for group in range(4)
    }  # fmt: skip
    for group in range(4):
        epochs = sorted(epoch for g, epoch in seen if g == group)
        assert len(epochs) > 2
        for epoch in epochs[:-1]:
            assert sorted(seen[group, epoch]) == sorted(eligible[group])
        assert set(seen[group, epochs[-1]]) <= eligible[group]
    assert len({epoch for _, epoch in seen}) == len(seen)  # no two visits of a sample share their random numbers
    planned = [p for step in range(60) for p in plan_of(data, True).global_batch(step)]
    assert all(p.language == "zh" for p in planned if p.group < 2)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("max_tokens", [60, 200, 5000])
def test_the_same_samples_on_any_number_of_ranks(data, mixed, max_tokens):
    for step in (0, 1, 7, 40):
        expected = plan_of(data, mixed).global_batch(step)
        for num_ranks in (1, 2, 4):
            ranks = [plan_of(data, mixed, num_ranks, rank, max_tokens).micro_batches(step) for rank in range(num_ranks)]
            assert len({len(rank) for rank in ranks}) == 1
            assert Counter(p for rank in ranks for micro in rank for p in micro if p.weight) == Counter(expected)


@pytest.mark.parametrize("mixed", [False, True])
def test_random_stops_on_changing_world_sizes_lose_and_repeat_nothing(data, mixed):
    """50 of them, two in one epoch (of 31 samples, batches of 16), one at the end of the run's 16th epoch exactly.

    What is compared is what loaders hand out, of any number of ranks and threads, with what the undisturbed order has.
    """
    index, num_steps = data[0], 200
    undisturbed = plan_of(data, mixed)
    expected = [Counter(undisturbed.global_batch(step)) for step in range(num_steps)]
    rng, state, visits = random.Random(1), undisturbed.state(0), Counter()
    stops = sorted({31, 124, 125, *rng.sample([n for n in range(1, num_steps) if n not in (31, 124, 125)], 47)})
    assert len(stops) == 50
    ways = [(num_ranks, num_workers) for num_ranks in (1, 2, 4) for num_workers in (0, 1, 2)]
    for life, (first, last) in enumerate(zip([0, *stops], [*stops, num_steps], strict=True)):
        num_ranks, num_workers = ways[life % len(ways)]
        max_tokens = rng.choice([60, 300])
        plans = [plan_of(data, mixed, num_ranks, rank, max_tokens) for rank in range(num_ranks)]
        for plan in plans:
            plan.load_state(state)
        reader = Reader(index)
        loaders = [Loader(reader, plan, first, num_workers, 2, needs_pixels=lambda key: False) for plan in plans]
        for step in range(first, last):
            ranks = [loader.next_step() for loader in loaders]
            assert len({len(rank) for rank in ranks}) == 1
            seen = [s for rank in ranks for micro in rank for s in micro if s.plan.weight]
            assert all(sample.key == index.key(sample.plan.index) for sample in seen)
            assert Counter(sample.plan for sample in seen) == expected[step]
            visits.update((sample.plan.group, sample.plan.epoch, sample.plan.index) for sample in seen)
        state = json.loads(json.dumps(plans[0].state(last)))  # two steps more are read ahead
        assert len(json.dumps(state)) < 4096
        for loader in loaders:
            loader.close()
    assert visits.total() == num_steps * BATCH
    assert set(visits.values()) == {1}  # nothing twice in an epoch of a group
    if not mixed:
        num_epochs, rest = divmod(num_steps * BATCH, len(index))
        whole = [epoch for epoch, count in Counter(epoch for _, epoch, _ in visits).items() if count == len(index)]
        assert sorted(whole) == list(range(num_epochs)) and rest


def test_the_largest_state_is_small():
    interleaver = Interleaver([[(0, 1.0 + n / 7)] for n in range(64)], 4096)
    interleaver.load_state(
        {"step": 10**9, "counts": [10**11] * 64, "factors": [1.984375] * 64, "offsets": [-1 / 3] * 64}
    )
    assert len(json.dumps(interleaver.state(10**9)) + "x" * 200) < 4096


def test_another_mixture_is_refused(data):
    plan = plan_of(data, True)
    with pytest.raises(ValueError, match="mixture's groups or shares"):
        plan.load_state(plan.state(3) | {"mixture": "?"})
    with pytest.raises(ValueError, match="other data"):
        plan.load_state(plan.state(3) | {"index": "?"})


GROUP = {"share": 1}
WRONG = [
    ([], "it must be a table"),
    ({"sources": {"a": "x"}}, "it needs 'groups'"),
    ({"sources": {"a": "x"}, "groups": [GROUP], "weights": 1}, "no field 'weights'"),
    ({"sources": {}, "groups": [GROUP]}, "sources must be"),
    ({"sources": {"a": {"validation": "x"}}, "groups": [GROUP]}, "sources.a needs 'data'"),
    ({"sources": {"a": "b.toml"}, "groups": [GROUP]}, "sources.a.data must be"),
    ({"sources": {"a": "x"}, "groups": []}, "1 to 64"),
    ({"sources": {"a": "x"}, "groups": [{"language": "zh"}]}, r"groups\[0\] needs 'share'"),
    ({"sources": {"a": "x"}, "groups": [GROUP | {"language": "fr"}]}, "one of zh, en, other, none, got 'fr'"),
    ({"sources": {"a": "x"}, "groups": [GROUP | {"source": "b"}]}, "one of a, got 'b'"),
    ({"sources": {"a": "x"}, "groups": [GROUP | {"category": 3}]}, "category must be a text"),
    ({"sources": {"a": "x"}, "groups": [{"share": -1}]}, "number from 0 on"),
    ({"sources": {"a": "x"}, "groups": [{"share": True}]}, "number from 0 on"),
    ({"sources": {"a": "x"}, "groups": [{"share": [[0, 1], [0, 2]]}]}, "steps must rise"),
    ({"sources": {"a": "x"}, "groups": [{"share": []}]}, "steps must rise"),
    ({"sources": {"a": "x"}, "groups": [GROUP, GROUP]}, "are both"),
]


@pytest.mark.parametrize("content, words", WRONG)
def test_a_wrong_file_is_named_with_its_field(tmp_path, content, words):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as error:
        load_mixture(str(path))
    assert str(path) in str(error.value)


def test_no_file_no_sense_and_no_sample(tmp_path, data):
    with pytest.raises(ValueError, match="cannot be read"):
        load_mixture(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ValueError, match="is no TOML"):
        load_mixture(str(tmp_path / "bad.toml"))
    (tmp_path / "m.json").write_text(json.dumps({"sources": {"both": "x", "one": "y"}, "groups": [
        {"share": 1, "category": "no such"}, {"share": 1}]}))  # fmt: skip
    with pytest.raises(ValueError, match="'no such' has no sample"):
        MixtureOrder(data[0], load_mixture(str(tmp_path / "m.json")), data[2], 4, 0)
    with pytest.raises(ValueError, match="share of zero at step 0"):
        Interleaver([[(0, 0.0)], [(0, 0.0)]], 4)
    with pytest.raises(ValueError, match="--reweight needs a mixture"):
        load_mixture("emoji-small").check_reweight(1.0, 600)
