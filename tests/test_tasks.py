"""Tasks in one run: exact shares, pictures that are their own reference, the same on any number of ranks."""

import json
import logging
import random
from collections import Counter

import pytest
import torch

from data.balanced_sampler import CategoryBalancedSampler
from data.index import build_index
from data.mixture import load_mixture
from data.mixture_order import MixtureOrder
from data.plan import BatchPlan
from data.reader import Reader
from data.reference_size import area_size, clipped_area_size
from data.tasks import keeping_instruction
from model.text_encoder import TextEncoder
from tests.edit_shards import write_edit_shard
from tests.shards import simple_samples, write_shard

BATCH, AREAS = 12, {"reference_pixels": 96 * 96, "condition_pixels": 96 * 96}
SHARES = {"t2i": 0.5, "edit": 0.3, "reconstruction": 0.2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Plain samples and edits, also in one shard; the tokenizer of the tiny model."""
    folder = tmp_path_factory.mktemp("tasks")
    write_shard(folder / "plain.tar", simple_samples(9))
    write_edit_shard(folder / "edits.tar", 11)
    text = TextEncoder.tokenizer_only("assets/tiny")
    shards = [str(folder / "plain.tar"), str(folder / "edits.tar")]
    index = build_index(shards, text.count_tokens, "t", folder / "cache", condition_pixels=AREAS["condition_pixels"])
    return folder, index, load_mixture(str(folder / "*.tar")), text


def order_of(data, task="mixed", shares=SHARES, batch=BATCH):
    _, index, mixture, _ = data
    return MixtureOrder(index, mixture.for_task(task, shares), [""] * 2, batch, seed=3)


def plan_of(data, num_ranks=1, rank=0, order=None, **more):
    order = order or order_of(data)
    return BatchPlan(
        data[1], order, num_ranks=num_ranks, rank=rank, max_tokens=400, seed=3,
        num_empty_tokens=data[3].count_tokens(""), count_tokens=data[3].count_tokens, **AREAS, **more,
    )  # fmt: skip


def test_shares_are_exact_over_any_window(data):
    order = order_of(data)
    tasks = [list(SHARES)[ref.group] for step in range(60) for ref in order.batch(step)]
    rng = random.Random(0)
    for _ in range(400):
        first, last = sorted(rng.sample(range(len(tasks) + 1), 2))
        counts = Counter(tasks[first:last])
        for task, share in SHARES.items():
            # Tijdeman's bound, 1 - 1/(2k - 2) after any number of samples, at both ends of a window: see notes.md
            assert abs(counts[task] - share * (last - first)) <= 2 * 0.75 + 1e-6
    for end in range(len(tasks) + 1):
        counts = Counter(tasks[:end])
        assert all(abs(counts[task] - share * end) <= 0.75 + 1e-6 for task, share in SHARES.items())
    assert order.counts(60) == Counter(tasks)


def test_each_task_has_its_samples(data):
    _, index, _, _ = data
    seen = {task: set() for task in SHARES}
    for step in range(40):
        for planned in plan_of(data).global_batch(step):
            task, is_edit = list(SHARES)[planned.group], index[planned.index].references is not None
            assert planned.reconstructs == (task == "reconstruction")
            assert task == "reconstruction" or is_edit == (task == "edit")
            seen[task].add(planned.index)
    assert {task: len(found) for task, found in seen.items()} == {"t2i": 9, "edit": 11, "reconstruction": 20}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_number_of_ranks_sees_the_same_in_one_pack(data, num_ranks):
    both = 0
    for step in range(6):
        whole = sorted(plan_of(data).global_batch(step), key=repr)
        dealt = [plan_of(data, num_ranks, rank).micro_batches(step) for rank in range(num_ranks)]
        assert len({len(micro_batches) for micro_batches in dealt}) == 1
        micro_batches = [micro for of_rank in dealt for micro in of_rank]
        assert sorted((p for micro in micro_batches for p in micro if p.weight), key=repr) == whole
        both += sum(len({p.group for p in micro}) == len(SHARES) for micro in micro_batches)
    assert both  # all tasks in one micro-batch


def test_resumes_in_any_place(data):
    whole = plan_of(data)
    for step in (1, 7, 23):
        resumed = plan_of(data)
        resumed.load_state(json.loads(json.dumps(whole.state(step))))
        assert [resumed.global_batch(s) for s in range(step, step + 5)] == [
            whole.global_batch(s) for s in range(step, step + 5)
        ]
    with pytest.raises(ValueError, match="mixture's groups or shares"):
        plan_of(data, order=order_of(data, shares=SHARES | {"edit": 1.0})).load_state(whole.state(3))


def test_a_reconstruction_is_its_own_reference(data):
    _, index, _, text = data
    reader = Reader(index, **AREAS)
    found = [p for step in range(20) for p in plan_of(data, caption_dropout=0.3).global_batch(step) if p.reconstructs]
    for planned in found:
        sample, size = reader.read(planned, lambda key: False), (planned.height, planned.width)
        (reference,) = sample.references
        assert sample.caption == ("" if planned.drop_caption else keeping_instruction(planned.language))
        assert tuple(reference.vae.shape[1:]) == planned.reference_sizes[0] == area_size(*size, 96 * 96)
        assert torch.equal(sample.pixels, reader.read_pixels(planned.index)) and sample.mask is None
        # Scaled without a shift of its colours: the means over the picture agree.
        assert reference.vae.float().mean() == pytest.approx(sample.pixels.float().mean(), abs=1.5)
        tokens = text.count_tokens(keeping_instruction(planned.language), [tuple(reference.condition.shape[1:])])
        assert planned.num_text_tokens == tokens
        assert planned.num_image_tokens == sum(h * w // 256 for h, w in (size, planned.reference_sizes[0]))
        assert sample.references_key != sample.key
    assert {planned.language for planned in found} == {"en", "zh"} and any(p.drop_caption for p in found)


def test_a_bad_one_is_replaced_by_a_reconstruction(data):
    _, index, _, _ = data
    planned = next(p for step in range(20) for p in plan_of(data).global_batch(step) if p.reconstructs)
    reader = Reader(index, **AREAS)
    reader.note_bad(index.key(planned.index), "for the test")
    sample = reader.read(planned)
    assert sample.plan.reconstructs and sample.plan.index != planned.index
    assert sample.plan.num_tokens <= planned.num_tokens and len(sample.references) == 1


def test_filled_micro_batches_have_room_for_reconstructions(data):
    plan = plan_of(data, fill=True)
    for step in range(10):
        for micro in plan.micro_batches(step):
            used = sum(p.num_image_tokens for p in micro), sum(p.num_text_tokens for p in micro), len(micro) + 1
            assert any(all(n <= most for n, most in zip(used, size, strict=True)) for size in plan.fill_to)


def test_a_file_says_each_groups_task(data, tmp_path):
    folder, index, _, _ = data
    file = tmp_path / "m.json"
    groups = [{"task": "reconstruction", "language": "zh", "share": 1}, {"share": 3}]
    file.write_text(json.dumps({"sources": {"all": str(folder / "*.tar")}, "groups": groups}))
    mixture = load_mixture(str(file)).for_task("mixed")
    assert mixture.group_names == ("reconstruction-zh", "")
    order = MixtureOrder(index, mixture, ["all"] * 2, 8, seed=0)
    refs = [ref for step in range(10) for ref in order.batch(step)]
    assert Counter(ref.reconstructs for ref in refs) == {True: 20, False: 60}
    assert all(ref.languages == ("zh",) for ref in refs if ref.reconstructs)
    with pytest.raises(ValueError, match="--task edit, but the mixture's group 'reconstruction-zh' is of another"):
        load_mixture(str(file), "edit")
    with pytest.raises(ValueError, match="--task_shares is for --task mixed"):
        load_mixture(str(file), "mixed", ["edit=1"])


@pytest.mark.parametrize(
    ("task", "shares", "message"),
    [
        ("both", None, "--task must be t2i, edit or mixed, got 'both'"),
        ("edit", {"edit": 1.0}, "--task_shares is for --task mixed"),
        ("mixed", {"t2i": 1.0, "remove": 1.0}, "--task_shares takes t2i, edit, reconstruction, got 'remove'"),
        ("mixed", {"t2i": 0.0}, "all shares are zero"),
    ],
)
def test_tasks_that_do_not_go(data, task, shares, message):
    with pytest.raises(ValueError, match=message):
        data[2].for_task(task, shares)


def test_only_a_group_that_takes_all_edits_is_balanced_by_category(tmp_path):
    """Else what the file says of groups would be ignored in silence."""
    file = tmp_path / "mixture.json"
    for group, balanced in (
        ({}, True),
        ({"task": "edit"}, True),
        ({"category": "add"}, False),
        ({"language": "zh"}, False),
    ):
        file.write_text(json.dumps({"sources": {"a": "a.tar"}, "groups": [{"share": 2} | group]}))
        mixture = load_mixture(str(file), "edit")
        assert mixture.by_category == balanced
        if balanced:
            assert mixture.balanced() is mixture
        else:
            with pytest.raises(ValueError, match="balances edits by category .* one group without"):
                mixture.balanced()
    assert load_mixture("a.tar", "edit").by_category


def test_samples_that_are_no_edits_are_counted_or_refused(data, tmp_path, caplog):
    folder, index, mixture, text = data
    with caplog.at_level(logging.WARNING):
        sampler = CategoryBalancedSampler(index, None, 1, 0, 0, BATCH, edits_only=True)
    assert '9 of 20 samples are no edits: their .json has no "references"; never visited' in caplog.text
    visited = {ref.index for step in range(3 * sampler.steps_per_epoch) for ref in sampler.batch(step)}
    assert visited == {i for i in range(20) if index[i].references is not None}
    counts = Counter(index[ref.index].group for step in range(7) for ref in sampler.batch(step))
    assert sampler.counts(7) == counts
    plain = build_index([str(folder / "plain.tar")], text.count_tokens, "t", tmp_path, condition_pixels=9216)
    told = '9 of 9 samples are no edits: their .json has no "references"; give --data emoji-edits'
    with pytest.raises(ValueError, match=told):
        CategoryBalancedSampler(plain, None, 1, 0, 0, BATCH, edits_only=True)
    with pytest.raises(ValueError, match="the mixture's group 'edit' has no sample"):
        MixtureOrder(plain, mixture.for_task("mixed", SHARES), [""], BATCH, 0)


@pytest.mark.parametrize("size", [(16, 2000), (2000, 16), (64, 64), (100, 900)])
def test_a_picture_of_any_shape_can_be_its_own_reference(size):
    height, width = clipped_area_size(*size, 8192)
    assert min(height, width) >= 32 and (height > width) == (size[0] > size[1])
    if min(size) > 16:
        assert (height, width) == area_size(*size, 8192)
