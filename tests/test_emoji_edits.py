"""The default set of edits: its pictures differ where the masks, and as the plans and instructions, say."""

import io
import json
import multiprocessing
import random
import tarfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import emoji_edits
from data.edit import CATEGORIES
from data.edit_plan import EditPlan
from data.edit_scenes import CANVASES, COLOURED, KINDS, TEXTS, THINGS, _things, composed_edit, find_emoji, scene_edit
from data.emoji_captions import COLOURS
from data.emoji_edits import build_edits
from data.emoji_pairs import whole_emoji_edits
from data.emoji_table import picture_rgba
from data.index import build_index
from data.reference_size import area_size
from data.shards import expand_shards

SLOTS = {canvas.size: canvas for canvas in CANVASES}


@dataclass(frozen=True, eq=False)
class Edit:
    """A sample as its shard has it."""

    key: str
    members: dict[str, bytes]

    @cached_property
    def meta(self) -> dict:
        return json.loads(self.members["json"])

    @property
    def category(self) -> str:
        return self.meta["category"]

    def pixels(self, name: str) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(self.members[name])).convert("RGB"))

    @cached_property
    def region(self) -> np.ndarray | None:
        if "mask.png" not in self.members:
            return None
        mask = Image.open(io.BytesIO(self.members["mask.png"]))
        assert mask.mode == "L" and set(np.unique(mask)) <= {0, 255}
        return np.asarray(mask) == 255


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_edits(tmp_path_factory.mktemp("edits"))


def read_all(shards: list[str]) -> list[Edit]:
    samples: dict[str, dict[str, bytes]] = {}
    for shard in shards:
        with tarfile.open(shard) as archive:
            for member in archive:
                stem, _, extension = member.name.partition(".")
                samples.setdefault(stem, {})[extension] = archive.extractfile(member).read()
    return [Edit(key, members) for key, members in samples.items()]


@pytest.fixture(scope="module")
def edits(built) -> dict[str, list[Edit]]:
    return {"train": read_all(built.train_shards), "validation": read_all(built.validation_shards)}


@pytest.fixture(scope="module")
def everything(edits) -> list[Edit]:
    return [edit for split in edits.values() for edit in split]


def test_sizes_and_categories(edits):
    counts = {split: Counter(edit.category for edit in part) for split, part in edits.items()}
    assert 10_500 <= counts["train"].total() <= 12_000 and 280 <= counts["validation"].total() <= 340
    for of_split in counts.values():
        assert set(of_split) == set(CATEGORIES) - {"other"}
    assert min(counts["train"].values()) >= 400 and min(counts["validation"].values()) >= 10
    for part in edits.values():
        num_references = Counter(edit.meta["references"] for edit in part)
        assert set(num_references) == {0, 1, 2, 3} and min(num_references.values()) >= len(part) // 100
    flags = [e for part in edits.values() for e in part if any("flag" in text for text in e.meta["captions"]["en"])]
    assert len(flags) < 10  # of mailboxes


def test_every_sample_is_as_an_edit_must_be(built):
    shards = [*built.train_shards, *built.validation_shards]
    cache = built.folder.parent
    for number, shard in enumerate(shards):  # of one index no two shards may share a name
        assert Path(shard).name == (f"train-{number:03d}.tar" if number < 8 else "validation-000.tar")
    index = build_index(shards, lambda text, sizes=None: len(text), "characters", cache, condition_pixels=96 * 96)
    assert not index.rejects and len(index) > 5500


def test_pictures_are_of_the_three_sizes_and_none_is_scaled(everything):
    for edit in everything:
        for name in (name for name in edit.members if name != "json"):
            height, width = Image.open(io.BytesIO(edit.members[name])).size[::-1]
            assert (height, width) in ((96, 96), (64, 128), (128, 64)) and area_size(height, width, 96 * 96) == (
                height,
                width,
            )
            if name in ("mask.png", "ref0.png"):
                assert (height, width) == edit.pixels("png").shape[:2]


def test_outside_the_mask_nothing_changes_and_inside_something_does(everything):
    scenes = [edit for edit in everything if edit.region is not None]
    assert len(scenes) > 4500
    for edit in random.Random(0).sample(scenes, 1500):
        changed = (edit.pixels("ref0.png") != edit.pixels("png")).any(axis=2)
        assert changed.any() and not (changed & ~edit.region).any(), edit.key
    for edit in everything:
        if edit.meta["references"] and edit.region is None:
            assert not np.array_equal(edit.pixels("ref0.png"), edit.pixels("png")), edit.key


def box_of(region: np.ndarray) -> list[int]:
    """Return the thousandths of the box around a region, by its first and last pixels; of none an empty list."""
    height, width = region.shape
    if not region.any():
        return []
    (top, bottom), (left, right) = (np.flatnonzero(region.any(axis=axis))[[0, -1]] for axis in (1, 0))
    edges = left / width, top / height, (right + 1) / width, (bottom + 1) / height
    return [round(1000 * float(edge)) for edge in edges]


def halves(edit: Edit) -> dict[str, np.ndarray]:
    """Return the canvas's two halves as regions, by the name of the place in each."""
    height, width = edit.pixels("png").shape[:2]
    rows, columns = np.mgrid[:height, :width]
    if height > width:
        return {"top": rows < height // 2, "bottom": rows >= height // 2}
    return {"left": columns < width // 2, "right": columns >= width // 2}


def test_boxes_are_those_of_the_masks(everything):
    """Each place that an action names is one rectangle of the mask, and the masks have no other."""
    for edit in everything:
        if edit.region is None or edit.category == "background":
            continue
        actions, found = edit.meta["actions"], set()
        for action in actions:
            place = next(name for name, half in halves(edit).items() if box_of(half & edit.region) == action["bbox"])
            found.add(place)
            if action["action"] == "insert":
                assert action["position"] == place
            elif action["action"] == "move":
                found.add(action["position"])
                assert action["position"] != place
        assert found == {name for name, half in halves(edit).items() if (half & edit.region).any()}, edit.key


def test_what_is_at_a_place_is_what_the_plan_says(everything):
    """An emoji is recognised by its own picture, drawn here anew over the background's colour."""
    pictures = {}
    chars = [*THINGS, *TEXTS.values(), *(char for colours in COLOURED.values() for char in colours.values())]
    names = {find_emoji(char).key: find_emoji(char).en for char in chars}
    names |= {find_emoji(char).key: text for text, char in TEXTS.items()}
    coloured = {find_emoji(c).key: (en, colour) for (en, _), cs in COLOURED.items() for colour, c in cs.items()}
    for side in {round(canvas.places[place][2]) for canvas in CANVASES for place in canvas.places}:
        scaled = [picture_rgba(key).convert("RGBa").resize((side, side), Image.Resampling.LANCZOS) for key in names]
        pictures[side] = np.stack([np.asarray(picture.convert("RGBA"), np.float32) for picture in scaled])

    def seen(pixels: np.ndarray, place: str) -> str | None:
        left, top, right, bottom = SLOTS[pixels.shape[1::-1]].box(place)
        background, slot = pixels[0, 0].astype(np.float32), pixels[top:bottom, left:right].astype(np.float32)
        colours, alpha = pictures[right - left][..., :3], pictures[right - left][..., 3:] / 255
        errors = np.abs(slot - (colours * alpha + background * (1 - alpha))).mean(axis=(1, 2, 3))
        if (empty := np.abs(slot - background).mean()) < errors.min():
            assert empty == 0
            return None
        assert errors.min() < 1
        return list(names)[errors.argmin()]

    checked = Counter()
    for edit in random.Random(1).sample([e for e in everything if e.region is not None], 200):
        before, after = edit.pixels("ref0.png"), edit.pixels("png")
        assert "#{:02x}{:02x}{:02x}".format(*after[0, 0]) in [colour for colour, _ in COLOURS.values()]
        for action in edit.meta["actions"]:
            kind = action["action"]
            checked[kind] += 1
            if kind == "background":
                assert "#{:02x}{:02x}{:02x}".format(*after[0, 0]) == COLOURS[action["style"]][0]
                assert [seen(before, p) for p in halves(edit)] == [seen(after, p) for p in halves(edit)]
                continue
            place = next(name for name, half in halves(edit).items() if box_of(half & edit.region) == action["bbox"])
            was, now = seen(before, place), seen(after, place)
            if kind == "recolor":
                assert coloured[was][0] == coloured[now][0] == action["target"] and coloured[now][1] == action["style"]
                other = next(p for p in halves(edit) if p != place)
                assert coloured.get(seen(before, other), ("", ""))[0] != action["target"]  # which would be meant?
            elif kind == "insert":
                assert was is None and names[now] == action["object"]
            elif kind == "remove":
                assert names[was] == action["target"] and now is None
            elif kind == "replace":
                assert (names[was], names[now]) == (action["target"], action["object"])
            elif kind == "add_text":
                assert (names[was], names[now]) == (action["target"], action["content"])
            elif kind == "move":
                assert names[was] == action["target"] and seen(after, action["position"]) == was
    assert set(checked) == {"recolor", "insert", "remove", "replace", "add_text", "move", "background"}


def test_plans_and_instructions_agree(everything):
    kinds = {
        "recolor": {"recolor"}, "replace": {"replace"}, "transform": {"transform"}, "add": {"insert", "background"},
        "remove": {"remove"}, "background": {"background"}, "move": {"move"}, "text": {"add_text"},
    }  # fmt: skip
    for edit in everything:
        plan, captions = EditPlan.from_json(edit.meta["actions"]), edit.meta["captions"]
        assert {action.action for action in plan.actions} <= kinds[edit.category]
        assert set(captions) == {"en", "zh"} and all(
            text.strip() and "{" not in text for t in captions.values() for text in t
        )
        if edit.region is not None:
            assert min(map(len, captions.values())) >= 2
            for action in plan.actions:
                for named in (action.object, action.content, action.style, action.target):
                    if named and not (action.action == "add_text" and named == action.target):
                        assert all(named in text for text in captions["en"]), (named, captions)
        assert "CC-BY" in edit.meta["license"]


def test_held_out_scenes_are_new_and_of_known_things(edits):
    def shown(edit: Edit) -> tuple:
        return tuple(edit.pixels(name).tobytes() for name in sorted(edit.members) if name in ("png", "ref0.png"))

    known = {shown(edit) for edit in edits["train"]}
    assert not [edit.key for edit in edits["validation"] if shown(edit) in known]
    said = {split: defaultdict(set) for split in edits}
    for split, part in edits.items():
        for edit in part:
            for action in edit.meta["actions"]:
                for field in ("target", "object", "content", "style"):
                    if field in action and edit.region is not None:
                        said[split][field].add(action[field])
    for field, names in said["validation"].items():
        assert names <= said["train"][field]


def test_a_swap_from_either_side_is_one_edit(monkeypatch):
    """With few things every scene is drawn many times, from both sides."""
    monkeypatch.setattr("data.edit_scenes.THINGS", THINGS[:6])
    monkeypatch.setattr("data.edit_scenes.COLOURS", dict(list(COLOURS.items())[:4]))
    monkeypatch.setattr("data.edit_scenes._things", _things.__wrapped__)
    for kind in ("swap", "background", "draw", "combine_both"):
        draw, rng, sides = scene_edit if kind in KINDS else composed_edit, random.Random(3), defaultdict(list)
        for _ in range(1000):
            edit = draw(rng, kind)
            shown = edit.references[0] if kind == "background" else edit.target
            sides[shown.tobytes()].append((edit.held_out, edit.captions["en"][0]))
        assert len(sides) < 500 and all(len({held_out for held_out, _ in of_one}) == 1 for of_one in sides.values())
        assert any(len({text for _, text in of_one}) > 1 for of_one in sides.values())  # said in several ways
        assert {held_out for of_one in sides.values() for held_out, _ in of_one} == {True, False}


def test_whole_emoji_are_capped_and_held_out_by_pair():
    train, validation = whole_emoji_edits(20, "train"), whole_emoji_edits(20, "validation")
    assert max(Counter(edit.category for edit in train).values()) <= 20 * 5
    assert {e.category for e in train} == {"recolor", "replace", "transform", "add", "remove", "text"}
    both = [
        {(e.references[0].tobytes(), e.target.tobytes()) for e in whole_emoji_edits(300, split)}
        for split in ("train", "validation")
    ]
    assert not both[0] & both[1] and len(validation) >= 60
    kinds = {(e.category, *(tuple(text.split()[:2]) for text in e.captions["en"])) for e in train}
    assert {(e.category, *(tuple(text.split()[:2]) for text in e.captions["en"])) for e in validation} <= kinds


def test_it_is_reached_by_its_name(built):
    for split, shards in (("train", built.train_shards), ("validation", built.validation_shards)):
        assert expand_shards("emoji-edits", split, built.folder.parent) == shards


def _build(folder: str) -> str:
    emoji_edits._TRAIN, emoji_edits._VALIDATION = (4, 2, 1), (2, 1, 1)
    return str(build_edits(Path(folder)).folder)


def test_processes_at_once_agree_and_bytes_are_reproducible(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        folders = set(pool.map(_build, [str(tmp_path / name) for name in "aab"], chunksize=1))
    assert len(folders) == 2 and all(len(list((tmp_path / name).iterdir())) == 1 for name in "ab")
    one, two = ({p.name: p.read_bytes() for p in Path(folder).iterdir()} for folder in folders)
    assert one == two and len(one) == 11


def test_a_crash_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(emoji_edits, "_TRAIN", (4, 2, 1))

    def crash(pair):
        raise RuntimeError("power cut")

    monkeypatch.setattr(emoji_edits, "pair_members", crash)
    with pytest.raises(RuntimeError):
        build_edits(tmp_path)
    assert not list(tmp_path.iterdir())
