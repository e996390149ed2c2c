"""The plan: the same samples, wordings and dropouts a step on any number of ranks."""

import json
from collections import Counter

import pytest

from data.balanced_sampler import CategoryBalancedSampler
from data.index import build_index
from data.order import GlobalOrder
from data.plan import BatchPlan, every_language
from tests.shards import simple_samples, write_shard


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    shard = write_shard(folder / "a.tar", simple_samples(23))
    return build_index([str(shard)], lambda text: len(text.split()) + 5, "t", folder / "cache")


def plan_of(index, num_ranks=1, rank=0, batch=16, max_tokens=200, **settings):
    order = GlobalOrder(len(index), batch, seed=5)
    return BatchPlan(
        index, order, num_ranks=num_ranks, rank=rank, max_tokens=max_tokens, seed=5, num_empty_tokens=5, **settings
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_share_out_the_same_global_batch(index, num_ranks):
    for step in range(6):
        expected = plan_of(index).global_batch(step)
        ranks = [plan_of(index, num_ranks, rank).micro_batches(step) for rank in range(num_ranks)]
        assert len({len(rank) for rank in ranks}) == 1
        dealt = [p for rank in ranks for micro in rank for p in micro if p.weight]
        assert Counter(dealt) == Counter(expected)
        assert all(micro and sum(p.num_tokens for p in micro) <= 200 for rank in ranks for micro in rank)


def test_token_counts_are_those_of_what_is_read(index):
    for planned in plan_of(index, caption_dropout=0.5).global_batch(0):
        record = index[planned.index]
        assert planned.num_image_tokens == record.height // 16 * (record.width // 16)
        text = 5 if planned.drop_caption else record.caption_tokens[planned.language][planned.wording]
        assert planned.num_text_tokens == text


def test_shares_of_languages_wordings_and_dropout(index):
    seen = [p for s in range(400) for p in plan_of(index, caption_dropout=0.2, zh_share=0.7).global_batch(s)]
    num = len(seen)
    assert sum(p.language == "zh" for p in seen) / num == pytest.approx(0.7, abs=0.03)
    assert sum(p.drop_caption for p in seen) / num == pytest.approx(0.2, abs=0.03)
    english = [p.wording for p in seen if p.language == "en"]
    assert english.count(0) / len(english) == pytest.approx(0.5, abs=0.05)


def test_wordings_are_chosen_by_their_weights(tmp_path):
    """Also those of an encoded shard come this way: the index has one column for both."""
    weighted = [{"text": "one", "weight": 1}, {"text": "none", "weight": 0}, {"text": "three times", "weight": 3.0}]
    captions = [{"en": weighted, "zh": "东西"}, {"en": ["a thing"]}] * 8
    samples = [
        {"key": f"{i:03d}", "height": 32, "width": 32, "captions": both, "category": ""}
        for i, both in enumerate(captions)
    ]
    shard = write_shard(tmp_path / "a.tar", samples)
    index = build_index([str(shard)], lambda text: len(text.split()) + 5, "t", tmp_path / "cache")
    assert index[0].caption_tokens == {"en": (6, 7), "zh": (6,)}
    assert index[0].caption_weights == {"en": (1.0, 3.0), "zh": (1.0,)} and index[1].caption_weights == {"en": (1.0,)}
    seen = [p for step in range(200) for p in plan_of(index).global_batch(step) if p.index % 2 == 0]
    english = [p.wording for p in seen if p.language == "en"]
    assert english.count(1) / len(english) == pytest.approx(0.75, abs=0.04)
    assert set(english) == {0, 1} and {p.wording for p in seen if p.language == "zh"} == {0}


def test_a_sample_draws_afresh_each_epoch(index):
    plan = plan_of(index)
    draws = {}
    for step in range(60):
        for p in plan.global_batch(step):
            draws.setdefault(p.index, set()).add((p.language, p.wording, p.drop_caption))
    assert all(len(drawn) > 1 for drawn in draws.values())


@pytest.mark.parametrize(
    "stretches", [[(4, 3)], [(4, 3), (4, 3)], [(6, 2), (3, 1)], [(3, 4), (5, 4)], [(0, 5), (5, 1)]]
)
def test_skipped_stretches_are_left_out_and_nothing_else(index, stretches):
    """A resumed run leaves the same out, on any number of ranks, also if it learns of a stretch twice."""
    left_out = {batch for first, count in stretches for batch in range(first, first + count)}
    expected = [plan_of(index).global_batch(batch) for batch in range(30) if batch not in left_out]
    plan = plan_of(index)
    for stretch in stretches:
        plan.skip([stretch])
    assert [plan.global_batch(step) for step in range(18)] == expected[:18]
    resumed = plan_of(index, 3, 1)
    resumed.skip(stretches[:1])
    resumed.load_state(json.loads(json.dumps(plan.state(7))))
    assert [resumed.global_batch(step) for step in range(7, 18)] == expected[7:18]
    assert "skipped" not in plan_of(index).state(7)


def test_a_skipped_stretch_of_a_stateful_order(index):
    """The stretch begins where a state was taken that did not know of it yet."""
    orders = [CategoryBalancedSampler(index, {"a": 2.0, "b": 1.0}, 1, 0, 5, 16) for _ in range(2)]
    plans = [BatchPlan(index, o, num_ranks=1, rank=0, max_tokens=200, seed=5, num_empty_tokens=5) for o in orders]
    state = plans[0].state(6)
    plans[1].skip([(6, 4)])
    plans[1].load_state(state)
    assert [plans[1].global_batch(s) for s in range(6, 12)] == [plans[0].global_batch(s) for s in range(10, 16)]


def test_too_few_samples_fill_up_at_weight_zero(index):
    ranks = [plan_of(index, 4, rank, batch=2).micro_batches(0) for rank in range(4)]
    weights = sorted(p.weight for rank in ranks for micro in rank for p in micro)
    assert weights == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("max_text_tokens", [0, 48])
def test_filled_micro_batches_keep_to_each_limit_and_lose_no_sample(index, max_text_tokens):
    filled = [plan_of(index, 2, rank, batch=40, fill=True, max_text_tokens=max_text_tokens) for rank in range(2)]
    *suited, (num_img, num_txt, _) = filled[0].fill_to
    assert filled[1].fill_to == filled[0].fill_to and num_img + num_txt == 200
    assert num_txt == max_text_tokens or (not max_text_tokens and num_txt % 16 == 0)
    assert bool(suited) != bool(max_text_tokens)
    for step in range(6):
        ranks = [plan.micro_batches(step) for plan in filled]
        assert len({len(rank) for rank in ranks}) == 1
        dealt = [p for rank in ranks for micro in rank for p in micro if p.weight]
        assert Counter(dealt) == Counter(plan_of(index, batch=40).global_batch(step))
        for micro in (micro for rank in ranks for micro in rank):
            counts = sum(p.num_image_tokens for p in micro), sum(p.num_text_tokens for p in micro), len(micro) + 1
            assert any(all(n <= most for n, most in zip(counts, size, strict=True)) for size in filled[0].fill_to)


def test_no_room_for_text_is_refused(index):
    with pytest.raises(ValueError, match="200 tokens cannot have 200 of them for text"):
        plan_of(index, fill=True, max_text_tokens=200)
    with pytest.raises(ValueError, match="does not fit into a filled micro-batch of .199, 1.*max_text_tokens"):
        plan_of(index, fill=True, max_text_tokens=1).micro_batches(0)


def test_every_language_once(index):
    assert [p.language for p in every_language(index, 3)] == ["en", "zh"]


def test_bad_shares_are_refused(index):
    with pytest.raises(ValueError, match="caption_dropout"):
        plan_of(index, caption_dropout=1.5)
