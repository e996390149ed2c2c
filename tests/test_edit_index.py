"""Edits in index, plan and reader, against what was written and the classes of diffusers; what is bad is named."""

import io
import json
import tarfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
from PIL import Image

from data.captions import parse_captions
from data.edit import CATEGORIES, category_row, decode_mask, parse_shares, token_weights
from data.index import build_index
from data.instructions import choose_wording
from data.known_plans import check_plans
from data.loader import Loader
from data.order import GlobalOrder
from data.plan import BatchPlan, every_language, spread_micro_batches
from data.reader import BadDataError, Reader
from data.reference_size import area_size
from tests.shards import picture_bytes, simple_samples, write_shard

AREA, CONDITION_AREA = 96 * 96, 64 * 64
ACTIONS = [{"style": "red", "action": "recolor", "bbox": [0, 10, 500, 1000], "target": "苹果"}]
PLAN = '[{"action":"recolor","target":"苹果","bbox":[0,10,500,1000],"style":"red"}]'


def count_tokens(text: str, sizes=None) -> int:
    """Words, and of an edit 10 for its template and one for each 32 x 32 pixels of its references as conditions."""
    return len(text.split()) + (5 if sizes is None else 10 + sum(h // 32 * w // 32 for h, w in sizes))


def mask_bytes(height: int, width: int, box: tuple[int, int, int, int], kind: str = "PNG") -> bytes:
    mask = Image.new("L", (width, height))
    mask.paste(255, box)
    buffer = io.BytesIO()
    mask.save(buffer, kind)
    return buffer.getvalue()


def edit(key: str, sizes: list[tuple[int, int]], target=(64, 96), mask=None, seed=0, **meta) -> dict:
    """A sample as raw members; sizes of references and target are (height, width)."""
    meta = {"captions": {"en": [f"change {key} so"], "zh": [f"改{key}"]}, "references": len(sizes)} | meta
    members = {"png": picture_bytes(*target, seed=seed), "json": json.dumps(meta).encode()}
    for i, size in enumerate(sizes):
        members[f"ref{i}.png"] = picture_bytes(*size, seed=seed + i + 1)
    return {"key": key, "members": members | ({} if mask is None else {"mask.png": mask})}


def mixed_samples() -> list[dict]:
    """Samples of 0 to 3 references between text-to-image ones."""
    t2i = simple_samples(2)
    return [
        t2i[0],
        edit("none", [], seed=10, category="add"),
        edit("one", [(64, 96)], mask=mask_bytes(64, 96, (16, 0, 40, 20)), seed=20, category="recolor", actions=ACTIONS),
        edit("two", [(50, 70), (200, 90)], seed=30),
        t2i[1],
        edit("three", [(96, 96), (64, 128), (128, 64)], seed=40, mask=mask_bytes(64, 96, (0, 0, 96, 64))),
    ]


def index_of(folder, samples: list[dict], condition_pixels: int | None = CONDITION_AREA, count=count_tokens):
    shard = write_shard(folder / "a.tar", samples)
    return build_index([str(shard)], count, "t", folder / "cache", condition_pixels=condition_pixels)


def reader_of(index, **options) -> Reader:
    return Reader(index, reference_pixels=AREA, condition_pixels=CONDITION_AREA, **options)


def first(index, i: int):
    return every_language(index, i, reference_pixels=AREA)[0]


@pytest.mark.parametrize("area", [1024 * 1024, 384 * 384, 96 * 96])
def test_area_size_is_that_of_the_pipeline(area):
    sizes = [(h, w) for h in (64, 96, 333, 1000, 1328, 4000) for w in (64, 96, 128, 517, 1000, 1664, 4000)]
    for height, width in [*sizes, (128, 64), (64, 128)]:
        expected_width, expected_height = calculate_dimensions(area, width / height)[:2]
        if min(expected_width, expected_height) > 0:
            assert area_size(height, width, area) == (expected_height, expected_width)
    with pytest.raises(ValueError, match="1 x 10000 pixels is too thin"):
        area_size(1, 10_000, area)


def test_the_default_pictures_keep_their_size():
    for size in ((96, 96), (64, 128), (128, 64)):
        assert area_size(*size, AREA) == size


def test_records_point_at_references_and_masks(tmp_path):
    index = index_of(tmp_path, mixed_samples())
    assert not index.rejects and [index.key(i) for i in range(6)] == [
        f"a.tar/{name}" for name in ("s000", "none", "one", "two", "s001", "three")
    ]
    data = (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as archive:
        contents = {member.name: archive.extractfile(member).read() for member in archive}
    for i, count in enumerate((None, 0, 1, 2, None, 3)):
        record = index[i]
        assert (record.references is None) == (count is None) and len(record.references or ()) == (count or 0)
        pictures = {f"ref{n}.png": reference for n, reference in enumerate(record.references or ())}
        pictures |= {"mask.png": record.mask} if record.mask else {}
        for name, member in pictures.items():
            content = contents[f"{record.key.split('/')[1]}.{name}"]
            assert data[member.offset : member.offset + member.size] == content
            assert member.crc32 == zlib.crc32(content)
            assert Image.open(io.BytesIO(content)).size == (member.width, member.height)
    assert [index[i].mask is not None for i in range(6)] == [False, False, True, False, False, True]
    assert [index[i].group for i in range(3)] == ["a", "add", "recolor"]


def test_tokens_count_the_references_as_they_are_shown(tmp_path):
    index = index_of(tmp_path, mixed_samples())
    for i, sizes in ((1, []), (2, [(64, 96)]), (3, [(50, 70), (200, 90)]), (5, [(96, 96), (64, 128), (128, 64)])):
        shown = [calculate_dimensions(CONDITION_AREA, w / h)[1::-1] for h, w in sizes]
        name = index.key(i).split("/")[1]
        assert index[i].caption_tokens["en"] == (count_tokens(f"change {name} so", shown),)
        planned = first(index, i)
        seen = [calculate_dimensions(AREA, w / h)[1::-1] for h, w in sizes]
        assert planned.reference_sizes == tuple(seen)
        assert planned.num_image_tokens == sum(h // 16 * w // 16 for h, w in [(64, 96), *seen])
        assert planned.num_text_tokens == index[i].caption_tokens["en"][0]
    assert first(index, 0).reference_sizes is None and index[0].caption_tokens["en"] == (7, 10)


def test_another_condition_area_counts_anew(tmp_path):
    counts = []

    def count(text, sizes=None):
        counts.append(text)
        return count_tokens(text, sizes)

    shard = str(write_shard(tmp_path / "a.tar", mixed_samples()))

    def index(area):
        return build_index([shard], count, "t", tmp_path / "cache", condition_pixels=area)

    fine, coarse = index(AREA), index(CONDITION_AREA)
    assert fine[5].caption_tokens != coarse[5].caption_tokens
    num_counted = len(counts)
    assert index(AREA).fingerprint == fine.fingerprint and index(CONDITION_AREA).fingerprint == coarse.fingerprint
    assert len(counts) == num_counted


def test_edits_change_nothing_for_text_to_image(tmp_path):
    """Records, fingerprint, plan and order of shards without edits are as if there were no edits in the world."""
    (tmp_path / "with").mkdir(), (tmp_path / "without").mkdir()
    indices = [index_of(tmp_path / "with", simple_samples(9)), index_of(tmp_path / "without", simple_samples(9), None)]
    assert indices[0].fingerprint == indices[1].fingerprint
    assert [indices[0][i] for i in range(9)] == [indices[1][i] for i in range(9)]
    plans = [
        BatchPlan(index, GlobalOrder(9, 4, seed=1), num_ranks=1, rank=0, max_tokens=60, seed=1, num_empty_tokens=5)
        for index in indices
    ]
    assert all(plans[0].micro_batches(step) == plans[1].micro_batches(step) for step in range(5))


def test_a_run_without_edits_leaves_them_out_and_says_so(tmp_path):
    index = index_of(tmp_path, mixed_samples(), condition_pixels=None)
    assert [index.key(i) for i in range(len(index))] == ["a.tar/s000", "a.tar/s001"]
    assert len(index.rejects) == 4 and all("it is an edit, and this run trains no edits" in r for _, r in index.rejects)


def test_what_is_read_is_what_was_written(tmp_path):
    """References as diffusers' own image processor scales them; the mask and the plan as given."""
    samples = mixed_samples()
    index = index_of(tmp_path, samples)
    reader, processor = reader_of(index), VaeImageProcessor()
    for i, sample in enumerate(samples):
        read = reader.read(first(index, i))
        if "members" not in sample:
            assert read.references is None and read.mask is None and read.plan_text is None
            continue
        pictures = [
            sample["members"][f"ref{n}.png"] for n in range(json.loads(sample["members"]["json"])["references"])
        ]
        assert len(read.references) == len(pictures)
        for picture, reference in zip(pictures, read.references, strict=True):
            image = Image.open(io.BytesIO(picture))
            for area, tensor in ((AREA, reference.vae), (CONDITION_AREA, reference.condition)):
                width, height = calculate_dimensions(area, image.width / image.height)[:2]
                expected = np.asarray(processor.resize(image, height, width))
                assert tensor.dtype == torch.uint8 and np.array_equal(tensor.permute(1, 2, 0), expected)
    one, three = reader.read(first(index, 2)), reader.read(first(index, 5))
    expected = torch.zeros(64, 96, dtype=torch.bool)
    expected[:20, 16:40] = True
    assert torch.equal(one.mask, expected) and three.mask.all() and one.plan_text == PLAN and three.plan_text is None
    assert one.caption == "change one so" and one.pixels.shape == (3, 64, 96)


def dots_bytes(height: int, width: int, places: list[tuple[float, float]]) -> bytes:
    """A black picture with soft white dots at (x, y), in pixels from its upper left corner."""
    y, x = np.mgrid[:height, :width] + 0.5
    light = sum(np.exp(-((x - at_x) ** 2 + (y - at_y) ** 2) / 18) for at_x, at_y in places)
    buffer = io.BytesIO()
    Image.fromarray((255 * light).round().astype(np.uint8)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def dots_of(picture: torch.Tensor) -> np.ndarray:
    """Return where the dots of the four quarters of a picture are, (4, 2) x and y as shares of its sides."""
    light = picture[0].double().numpy()
    height, width = light.shape
    y, x = (np.mgrid[:height, :width] + 0.5) / np.array([height, width])[:, None, None]
    quarters = [(slice(*rows), slice(*columns)) for rows in ((0, height // 2), (height // 2, None))
                for columns in ((0, width // 2), (width // 2, None))]  # fmt: skip
    return np.array([[np.average(axis[q], weights=light[q]) for axis in (x, y)] for q in quarters])


@pytest.mark.parametrize("target", [(111, 159), (96, 127), (300, 217)])  # the last is scaled down, and then cut
def test_a_reference_of_the_target_s_size_lies_on_it_when_both_are_trained(tmp_path, target):
    """A picture that is edited nowhere is, to the VAE, at the same places in target and reference."""
    height, width = target
    places = [(x * width, y * height) for y in (0.2, 0.8) for x in (0.2, 0.8)]
    samples = [edit("a", [target, (64, 96)], target), edit("b", [target], target, mask_bytes(*target, (0, 0, 9, 9)))]
    for sample in samples:
        sample["members"] |= {"png": dots_bytes(*target, places), "ref0.png": dots_bytes(*target, places)}
    index = index_of(tmp_path, samples)
    reader = reader_of(index, max_pixels=160 * 160)
    for i in range(len(samples)):
        planned = every_language(index, i, 160 * 160, AREA)[0]
        read = reader.read(planned)
        assert read.pixels.shape[1:] == (planned.height, planned.width) != target
        assert tuple(read.references[0].vae.shape[1:]) == planned.reference_sizes[0] == area_size(*target, AREA)
        apart = np.abs(dots_of(read.pixels) - dots_of(read.references[0].vae))
        assert apart.max() < 0.003, apart  # of a side: a third of a pixel of 96
        # What the plan's boxes are about stays whole.
        whole = np.abs(dots_of(read.references[0].condition) - np.array(places) / (width, height))
        assert whole.max() < 0.01, whole


def test_a_mask_is_cut_as_its_target_is(tmp_path):
    target, box = (70, 100), (10, 5, 60, 30)
    index = index_of(tmp_path, [edit("a", [(64, 64)], target, mask_bytes(*target, box))])
    read = reader_of(index).read(first(index, 0))
    assert read.mask.shape == read.pixels.shape[1:] == (64, 96)
    expected = torch.zeros(70, 100, dtype=torch.bool)
    expected[5:30, 10:60] = True
    assert torch.equal(read.mask, expected[3:67, 2:98])
    with pytest.raises(ValueError, match="its mask is 100 pixels wide and 70 high, its target 101 and 70"):
        decode_mask(mask_bytes(*target, box), (70, 101), (64, 96))


def test_a_mask_that_shows_nothing_is_refused():
    """As masks of zeros and ones, and those whose shape is in their alpha, would be read."""
    ones, buffer = Image.fromarray(np.ones((64, 96), np.uint8)), io.BytesIO()
    ones.save(buffer, "PNG")
    with pytest.raises(ValueError, match="nowhere white: its lightest pixel is 1 of 255"):
        decode_mask(buffer.getvalue(), (64, 96), (64, 96))
    shape = Image.open(io.BytesIO(mask_bytes(64, 96, (0, 0, 9, 9))))
    for alpha, refused in ((shape, True), (Image.new("L", (96, 64), 255), False)):
        buffer = io.BytesIO()
        Image.merge("LA", (Image.new("L", (96, 64), 255), alpha)).save(buffer, "PNG")
        if refused:
            with pytest.raises(ValueError, match="transparent in part"):
                decode_mask(buffer.getvalue(), (64, 96), (64, 96))
        else:
            assert decode_mask(buffer.getvalue(), (64, 96), (64, 96)).all()


def test_a_dropped_instruction_keeps_references_and_their_tokens(tmp_path):
    index = index_of(tmp_path, mixed_samples())
    order = GlobalOrder(len(index), 6, seed=1)
    plan = BatchPlan(
        index, order, num_ranks=1, rank=0, max_tokens=200, seed=1, num_empty_tokens=5, caption_dropout=1.0,
        reference_pixels=AREA,
    )  # fmt: skip
    for planned in (p for micro in plan.micro_batches(0) for p in micro):
        read = reader_of(index).read(planned)
        tokens = index[planned.index].caption_tokens[planned.language][planned.wording]
        assert read.caption == "" and planned.num_text_tokens == (5 if planned.reference_sizes is None else tokens)
        assert len(read.references or ()) == len(planned.reference_sizes or ())


def damaged(index, path, i: int, member) -> None:
    data = bytearray(path.read_bytes())
    data[member(index[i]).offset + 40] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("member", [lambda r: r.references[0], lambda r: r.mask], ids=["reference", "mask"])
def test_a_damaged_picture_is_named_and_an_alike_edit_takes_its_place(tmp_path, member):
    box = (0, 0, 16, 16)
    samples = [
        edit("bad", [(64, 96)], mask=mask_bytes(64, 96, box)),
        edit("two", [(64, 96), (64, 96)], seed=3),
        *simple_samples(3),
        edit("alike", [(64, 96)], seed=6),
    ]
    index = index_of(tmp_path, samples)
    damaged(index, tmp_path / "a.tar", 0, member)
    results = []
    for workers in (0, 2):
        reader = reader_of(index)
        order = GlobalOrder(len(index), 6, seed=1)
        plan = BatchPlan(
            index, order, num_ranks=1, rank=0, max_tokens=200, seed=1, num_empty_tokens=5, reference_pixels=AREA
        )
        loader = Loader(reader, plan, 0, workers)
        read = [sample for micro in loader.next_step() for sample in micro]
        loader.close()
        assert list(reader.bad_samples) == ["a.tar/bad"] and "changed since" in reader.bad_samples["a.tar/bad"]
        results.append([(s.key, s.caption, [r.vae.tolist() for r in s.references or ()]) for s in read])
        assert sorted(s.key for s in read).count("a.tar/alike") == 2
    assert results[0] == results[1]


def test_no_text_to_image_sample_stands_in_for_an_edit(tmp_path):
    index = index_of(tmp_path, [edit("bad", [(64, 96)]), *simple_samples(3)])
    damaged(index, tmp_path / "a.tar", 0, lambda r: r.references[0])
    with pytest.raises(BadDataError, match="no other of at most"):
        reader_of(index).read(first(index, 0))
    too_large = index_of(tmp_path, [edit("bad", [(64, 96)]), edit("larger", [(64, 96), (64, 96)])])
    damaged(too_large, tmp_path / "a.tar", 0, lambda r: r.references[0])
    with pytest.raises(BadDataError, match="no other of at most"):
        reader_of(too_large).read(first(too_large, 0))


def test_a_refused_instruction_is_a_bad_sample(tmp_path):
    index = index_of(tmp_path, [edit("one", [(64, 96)]), edit("two", [(64, 96)])])

    def check(text: str) -> None:
        if "one" in text:
            raise ValueError("refused")

    reader = reader_of(index, check_caption=check)
    assert reader.read(first(index, 0)).key == "a.tar/two" and reader.bad_samples == {"a.tar/one": "refused"}
    dropped = replace(first(index, 0), drop_caption=True)
    assert reader_of(index, check_caption=check).read(dropped).key == "a.tar/two"


def without(sample: dict, name: str) -> dict:
    return sample | {"members": {n: content for n, content in sample["members"].items() if n != name}}


def with_member(sample: dict, name: str, content: bytes) -> dict:
    return sample | {"members": sample["members"] | {name: content}}


PICTURE = picture_bytes(64, 96)
BAD = {
    "missing": (without(edit("x", [(64, 96), (64, 96)]), "ref1.png"), "says 2 references, but there is no ref1"),
    "first missing": (without(edit("x", [(64, 96), (64, 96)]), "ref0.png"), "2 references, but there is no ref0"),
    "one too many": (with_member(edit("x", [(64, 96)]), "ref1.png", PICTURE), "1 references, .* is ref1.png as well"),
    "twice": (with_member(edit("x", [(64, 96)]), "ref0.webp", PICTURE), "there is ref0.png and ref0.webp"),
    "four": (edit("x", [(64, 96)] * 4), "its .json says 4 references; an edit has 0 to 3"),
    "no number": (edit("x", [(64, 96)], references="1"), "its .json says '1' references"),
    "true": (edit("x", [(64, 96)], references=True), "its .json says True references"),
    "mask of another size": (
        edit("x", [(64, 96)], mask=mask_bytes(64, 95, (0, 0, 9, 9))),
        "64 x 95 pixels, .* 64 x 96",
    ),
    "mask of another kind": (with_member(edit("x", []), "mask.svg", b"<svg/>"), "one picture, there is mask.svg"),
    "reference is text": (with_member(edit("x", [(64, 96)]), "ref0.png", b"nothing"), "not a readable picture"),
    "reference too thin": (edit("x", [(4, 400)]), "reference 1, 4 x 400 pixels, is thinner than 16:1"),
    "mark in the plan": (
        edit("x", [(64, 96)], actions=[{"action": "remove", "target": "<|image_pad|>"}]),
        "must not hold '<|'",
    ),
    "endless plan": (
        edit("x", [(64, 96)], actions=[{"action": "remove", "target": "dog " * 2000}]),
        "characters of at most 4000",
    ),
    "no instruction": (edit("x", [(64, 96)], captions={"en": [" "]}), "no caption"),
    "actions are no list": (edit("x", [], actions={"action": "remove"}), "must be a list, got dict"),
    "unknown action": (edit("x", [], actions=[{"action": "explode"}]), "action 1, action: .*'explode'"),
    "unknown field": (edit("x", [], actions=[{"action": "remove", "where": "left"}]), "action 1, where"),
    "box": (edit("x", [], actions=[{"action": "remove", "bbox": [500, 0, 100, 1000]}]), "x1 < x2"),
}


@pytest.mark.parametrize("sample, message", BAD.values(), ids=BAD)
def test_what_is_wrong_with_an_edit_is_named(tmp_path, sample, message):
    index = index_of(tmp_path, [edit("fine", [(64, 96)]), sample, *simple_samples(1)])
    assert [index.key(i) for i in range(len(index))] == ["a.tar/fine", "a.tar/s000"]
    [(key, reason)] = index.rejects
    assert key == "a.tar/x"
    with pytest.raises(ValueError, match=message):
        raise ValueError(reason)


@pytest.mark.parametrize("name", ["captions", "caption", "instructions", "instruction"])
def test_an_instruction_has_several_names(tmp_path, name):
    sample = edit("x", [], captions=None) | {}
    meta = json.loads(sample["members"]["json"]) | {name: {"en": "make it red", "zh": ["变红", "改成红色"]}}
    sample["members"]["json"] = json.dumps(meta).encode()
    index = index_of(tmp_path, [sample])
    assert reader_of(index).read_captions(0) == {"en": ["make it red"], "zh": ["变红", "改成红色"]}


def test_a_canonical_wording_has_room_in_what_was_planned(tmp_path):
    """It is often longer than the loose one: "red" becomes "Change the colour of it to red."."""
    colours = ["red", "blue", "green", "pink"]
    samples = [
        edit(colour, [(64, 96)], captions={"en": [colour, "a very long way of saying it"]}) for colour in colours
    ]
    samples.append({"key": "plain", "height": 64, "width": 96, "captions": {"en": ["red"]}})
    index = index_of(tmp_path, samples)
    seen = [area_size(64, 96, CONDITION_AREA)]
    longer = count_tokens("Change the colour of it to red.", seen)
    assert [index[i].caption_tokens for i in (0, 4)] == [{"en": (longer, longer)}, {"en": (count_tokens("red"),)}]
    order = GlobalOrder(4, 12, seed=1)
    settings = {"max_tokens": 250, "seed": 1, "num_empty_tokens": 5, "reference_pixels": AREA, "fill": True}
    plan = BatchPlan(index, order, num_ranks=1, rank=0, **settings)
    for micro in plan.micro_batches(0):
        captions = [reader_of(index).read(planned).caption for planned in micro]
        said = sum(count_tokens(choose_wording(caption, 1.0, 0.0), seen) for caption in captions)
        assert said <= sum(planned.num_text_tokens for planned in micro) <= plan.fill_to[-1][1]


def test_token_weights_cover_every_token_that_the_mask_touches():
    mask = torch.zeros(48, 32, dtype=torch.bool)
    mask[15:17, 31] = True
    expected = torch.ones(3, 2)
    expected[:2, 1] = 3.0
    assert torch.equal(token_weights(mask, (1, 3, 2), 3.0), expected.flatten())
    assert torch.equal(token_weights(None, (1, 3, 2), 3.0), torch.ones(6))


def test_categories_and_shares():
    assert [CATEGORIES[category_row(name)] for name in ("move", "text", "", "things")] == [
        "move",
        "text",
        *["other"] * 2,
    ]
    assert parse_shares(["remove=2", "add=0.5"]) == {"remove": 2.0, "add": 0.5} and parse_shares([]) is None
    for text in ("remove", "remove=", "remove=-1", "remove=inf", "remove=nan"):
        with pytest.raises(ValueError, match="--shares takes name=number"):
            parse_shares([text])
    assert parse_shares([" remove = 2 "]) == {"remove": 2.0}
    with pytest.raises(ValueError, match="--shares names 'remove' twice, with 1 and 2"):
        parse_shares(["remove=1", "add=1", "remove=2"])


def test_validation_of_edits_looks_at_edits_alone(tmp_path):
    index = index_of(tmp_path, mixed_samples())
    batches = spread_micro_batches(index, 99, 1, 0, 10**6, reference_pixels=AREA, edits_only=True)
    assert sorted({p.index for batch in batches for p in batch}) == [1, 2, 3, 5] == index.spread(99, edits_only=True)
    assert index.spread(2, edits_only=True) == [1, 3] and len(index.spread(99)) == len(index) == 6
    none = index_of(tmp_path, simple_samples(3))
    with pytest.raises(ValueError, match="none of the 3 samples for validation is an edit"):
        spread_micro_batches(none, 99, 1, 0, 10**6, edits_only=True)


def test_a_planner_without_plans_to_learn_is_noticed(tmp_path, caplog):
    reader = reader_of(index_of(tmp_path, [edit("a", [(64, 96)]), edit("b", []), *simple_samples(1)]))
    with pytest.raises(ValueError, match="none of 2 edits looked at has a plan .* the planner learns nothing"):
        check_plans(reader, trains_planner=True, learns_otherwise=False)
    check_plans(reader, trains_planner=False, learns_otherwise=False)
    assert not caplog.messages
    check_plans(reader, trains_planner=True, learns_otherwise=True)
    assert "from the renderer's loss alone" in caplog.text
    caplog.clear()
    reader = reader_of(index_of(tmp_path, mixed_samples()))
    check_plans(reader, trains_planner=True, learns_otherwise=False)
    assert not caplog.messages


def test_without_references_an_instruction_is_no_caption():
    with pytest.raises(ValueError, match="no caption"):
        parse_captions("json", b'{"instruction": "make it red"}')
