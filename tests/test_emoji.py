"""The default data sets: curated, split by family, drawn where the captions say, built once by many processes."""

import io
import json
import multiprocessing
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import emoji as emoji_sets
from data.emoji import build_emoji, category_of, small_list
from data.emoji_captions import COLOURS, PLACES, emoji_captions, scene_captions, with_article
from data.emoji_table import base_of, load_emoji, picture_rgba


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_emoji("emoji-small", tmp_path_factory.mktemp("emoji"))


def read_all(shards: list[str]) -> dict[str, tuple[Image.Image, dict]]:
    samples = {}
    for shard in shards:
        with tarfile.open(shard) as archive:
            for name in archive.getnames():
                if name.endswith(".json"):
                    meta = json.loads(archive.extractfile(name).read())
                    png = archive.extractfile(name.replace(".json", ".png")).read()
                    samples[name.removesuffix(".json")] = (Image.open(io.BytesIO(png)).convert("RGB"), meta)
    return samples


def test_every_emoji_has_a_picture_and_two_names():
    table = load_emoji()
    assert len(table) == 3952  # counted independently in the packages' data
    for emoji in table.values():
        assert emoji.en and emoji.zh and picture_rgba(emoji.key).size == (72, 72)


def test_families_do_not_straddle_the_split():
    families = {}
    for emoji in load_emoji().values():
        families.setdefault(emoji.base, set()).add(emoji.split)
    assert all(len(splits) == 1 for splits in families.values())
    assert base_of("👩🏽‍🚀") == base_of("👨‍🚀") == base_of("🧑🏿‍🚀")
    assert base_of("🏃🏽‍♀️") == base_of("🏃")


def test_small_set_is_about_400_known_things(built):
    train, validation = read_all(built.train_shards), read_all(built.validation_shards)
    single = [key for key in train if not key.startswith("scene")]
    assert 380 <= len(single) <= 420 and 30 <= len(validation) <= 70
    assert set(small_list()) == {m["chars"][0] for key, (_, m) in (train | validation).items() if "scene" not in key}
    chars = [{c for _, m in part.values() for c in m["chars"]} for part in (train, validation)]
    assert not {load_emoji()[c].base for c in chars[0]} & {load_emoji()[c].base for c in chars[1]}
    for picture, meta in train.values():
        assert picture.width % 16 == 0 and picture.height % 16 == 0
        assert all(text.strip() for texts in meta["captions"].values() for text in texts)
        assert set(meta["captions"]) == {"en", "zh"} and "CC-BY" in meta["license"] and meta["category"]
    assert len({picture.size for picture, _ in train.values()}) >= 5  # mixed aspect ratios are the normal case


def test_scenes_show_what_their_captions_say(built):
    """Every object is looked for, by its own picture, in the third or half of the canvas that the caption names."""
    checked = 0
    for key, (picture, meta) in read_all(built.train_shards).items():
        if not key.startswith("scene"):
            continue
        caption = meta["captions"]["en"][0]
        colour = next(name for name in COLOURS if f"on a {name} background" in caption)
        assert picture.getpixel((0, 0)) == Image.new("RGB", (1, 1), COLOURS[colour][0]).getpixel((0, 0))
        pixels = np.asarray(picture, np.float32)
        height, width = pixels.shape[:2]
        for char in meta["chars"]:
            emoji = load_emoji()[char]
            named = with_article(emoji.en)
            place = next(p for p, (words, _) in PLACES.items() if f"{named} {words}" in caption)
            x = {
                "left": 0.25 if len(meta["chars"]) == 2 else 1 / 6,
                "right": 0.75 if len(meta["chars"]) == 2 else 5 / 6,
            }
            centre = (x.get(place, 0.5) * width, {"top": 0.25, "bottom": 0.75}.get(place, 0.5) * height)
            # The mean colour around the object's centre is that of the object over the background.
            side = 20
            drawn = pixels[int(centre[1]) - side // 2 :, int(centre[0]) - side // 2 :][:side, :side].mean((0, 1))
            rgba = np.asarray(picture_rgba(emoji.key), np.float32)[20:52, 20:52]
            alpha = rgba[..., 3:] / 255
            over = rgba[..., :3] * alpha + np.array(picture.getpixel((0, 0)), np.float32) * (1 - alpha)
            assert np.abs(drawn - over.mean((0, 1))).max() < 60, (caption, char)
            checked += 1
    assert checked > 100


def test_captions_in_both_languages():
    assert emoji_captions("orange", "橙子")["en"] == ["orange", "an emoji of an orange", "a picture of an orange"]
    assert [with_article(n) for n in ("unicorn", "hourglass", "grapes", "bus", "glass")] == [
        "a unicorn", "an hourglass", "grapes", "a bus", "a glass",
    ]  # fmt: skip
    assert scene_captions([("dog face", "狗脸", "left"), ("red apple", "红苹果", "right")], "light blue") == {
        "en": ["a dog face on the left and a red apple on the right, on a light blue background"],
        "zh": ["浅蓝色背景上，左边是狗脸，右边是红苹果"],
    }


def test_every_emoji_has_a_category():
    categories = {category_of(emoji) for emoji in load_emoji().values()}
    assert {"animals", "food", "faces", "people", "flags", "vehicles", "objects", "signs"} <= categories


def _build(folder: str) -> str:
    return str(build_emoji("emoji-small", Path(folder)).folder)


def test_eight_processes_at_once_agree(tmp_path):
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        folders = set(pool.map(_build, [str(tmp_path)] * 8))
    assert len(folders) == 1 and [p.name for p in tmp_path.iterdir()] == [Path(folders.pop()).name]


def test_a_crash_leaves_nothing_behind_and_bytes_are_reproducible(built, tmp_path, monkeypatch):
    def crash(*_):
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(emoji_sets, "_write_shard", crash)
        with pytest.raises(RuntimeError):
            build_emoji("emoji-small", tmp_path)
    assert not list(tmp_path.iterdir())
    again = build_emoji("emoji-small", tmp_path)
    for one, two in zip(built.train_shards, again.train_shards, strict=True):
        assert Path(one).read_bytes() == Path(two).read_bytes()


def test_unknown_set_is_named():
    with pytest.raises(ValueError, match="emoji-big"):
        build_emoji("emoji-big", Path("."))
