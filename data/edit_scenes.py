"""Edits of scenes of emoji: what changes, where, and what is to be done are known exactly.

Every pixel outside the edited places is the same before and after, because nothing else is drawn differently.
"""

import random
import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from data.edit_plan import BOX_SIDE
from data.emoji_captions import COLOURS, PLACES, with_article
from data.emoji_table import Emoji, draw_scene, load_emoji, scaled_rgba

# Things that people know at sight, by themselves and small.
THINGS = "🐶🐱🦁🐯🐴🐮🐷🐭🐰🐻🐼🐸🐵🦊🍎🍌🍇🍓🍉🍊🍋🥕🌽🍞🍕🍔🎂🍩⚽🏀🎸🎺🚗🚌🚲⛵🚀🏠🌲🌻🌹🍄⭐🔑📕☂🎩👑🔔💎"
# The same thing in several colours: (English, Chinese) → colour → emoji.
COLOURED = {
    ("heart", "爱心"): dict(red="❤", orange="🧡", yellow="💛", green="💚", blue="💙", purple="💜", brown="🤎"),
    ("circle", "圆形"): dict(red="🔴", orange="🟠", yellow="🟡", green="🟢", blue="🔵", purple="🟣", brown="🟤"),
    ("square", "方块"): dict(red="🟥", orange="🟧", yellow="🟨", green="🟩", blue="🟦", purple="🟪", brown="🟫"),
    ("book", "书"): dict(red="📕", green="📗", blue="📘", orange="📙"),
    ("apple", "苹果"): dict(red="🍎", green="🍏"),
}  # fmt: skip
COLOURS_ZH = {
    "red": "红色", "orange": "橙色", "yellow": "黄色", "green": "绿色", "blue": "蓝色", "purple": "紫色",
    "brown": "棕色",
}  # fmt: skip
TEXTS = {
    **{str(digit): f"{digit}\ufe0f\u20e3" for digit in range(10)},
    "OK": "🆗", "NEW": "🆕", "FREE": "🆓", "COOL": "🆒", "SOS": "🆘", "abc": "🔤", "A": "🅰", "B": "🅱",
}  # fmt: skip
POSITIONS_ZH = {"left": "左边", "right": "右边", "top": "上边", "bottom": "下边"}
KINDS = ("remove", "add", "replace", "background", "swap", "move", "recolor", "text")
CATEGORY = {kind: kind for kind in KINDS} | {"swap": "move", "combine": "add", "combine_both": "add", "draw": "add"}
_HELD_OUT = 10  # one scene in so many is for validation, by what is in it


@dataclass(frozen=True)
class Canvas:
    """Width and height, and the places of two things: name → (centre x, centre y, side), all in pixels."""

    size: tuple[int, int]
    places: dict[str, tuple[float, float, float]]

    def box(self, place: str) -> tuple[int, int, int, int]:
        """Return the pixels of a place as (left, top, right, bottom)."""
        x, y, side = self.places[place]
        return tuple(round(v) for v in (x - side / 2, y - side / 2, x + side / 2, y + side / 2))

    def bbox(self, place: str) -> list[int]:
        """Return a place as a plan's box."""
        return [round(v * BOX_SIDE / self.size[i % 2]) for i, v in enumerate(self.box(place))]


CANVASES = (
    Canvas((128, 64), {"left": (32, 32, 56), "right": (96, 32, 56)}),
    Canvas((64, 128), {"top": (32, 32, 56), "bottom": (32, 96, 56)}),
    Canvas((96, 96), {"left": (24, 48, 44), "right": (72, 48, 44)}),
)


@dataclass(frozen=True)
class Thing:
    """What stands at a place; `key` names its picture."""

    key: str
    en: str
    zh: str


@dataclass(frozen=True, eq=False)
class EditPair:
    """One edit: pictures before and after, wordings by language, and where known its region and plan."""

    references: list[Image.Image]
    target: Image.Image
    captions: dict[str, list[str]]
    category: str
    actions: list[dict] | None = None
    mask: Image.Image | None = None
    held_out: bool = False


@cache
def _by_char() -> dict[str, Emoji]:
    return {char.replace("\ufe0f", ""): emoji for char, emoji in load_emoji().items()}


def find_emoji(char: str) -> Emoji:
    """Return an emoji, with or without its variation selector.  Raises: KeyError if there is none."""
    return _by_char()[char.replace("\ufe0f", "")]


@cache
def _things() -> list[Thing]:
    return [Thing(e.key, e.en, e.zh) for e in map(find_emoji, THINGS)]


@cache
def _wordings() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((Path(__file__).with_name("edit_wordings.toml")).read_text(encoding="utf-8"))


def _captions(kind: str, **names: tuple[str, str]) -> dict[str, list[str]]:
    """Fill a kind's wordings; names: (English, Chinese) of each name in them."""
    return {
        language: [text.format(**{k: v[i] for k, v in names.items()}) for text in _wordings()[kind][language]]
        for i, language in enumerate(("en", "zh"))
    }


def _at(place: str) -> tuple[str, str]:
    return PLACES[place][0], POSITIONS_ZH[place]


def _draw(canvas: Canvas, background: str, things: dict[str, Thing]) -> Image.Image:
    placed = [(thing.key, canvas.places[place]) for place, thing in things.items()]
    return draw_scene(canvas.size, COLOURS[background][0], placed)


def _mask(canvas: Canvas, places: Sequence[str]) -> Image.Image:
    mask = Image.new("L", canvas.size, 0)
    for place in places:
        mask.paste(255, canvas.box(place))
    return mask


def _background_mask(canvas: Canvas, things: dict[str, Thing]) -> Image.Image:
    """Return white wherever the background shows, if only through the edge of a thing."""
    covered = Image.new("RGBA", canvas.size, (0, 0, 0, 0))
    for place, thing in things.items():
        left, top, right, _ = canvas.box(place)
        covered.alpha_composite(scaled_rgba(thing.key, right - left), (left, top))
    return Image.fromarray(np.where(np.asarray(covered)[..., 3] == 255, 0, 255).astype(np.uint8), "L")


def _is_held_out(kind: str, background: str, *scenes: dict[str, Thing]) -> bool:
    """Return whether an edit is for validation: by what stands where before and after, however it was drawn."""
    content = [sorted((place, thing.key) for place, thing in scene.items()) for scene in scenes]
    return zlib.crc32(repr((kind, background, content)).encode()) % _HELD_OUT == 0


def scene_edit(rng: random.Random, kind: str) -> EditPair:
    """Draw one random edit of a kind of KINDS."""
    canvas, background = rng.choice(CANVASES), rng.choice(list(COLOURS))
    here, there = rng.sample(list(canvas.places), 2)  # what happens, happens here
    first, second, third = rng.sample(_things(), 3)
    names: dict[str, tuple[str, str]] = {}
    before, after, changed = {here: first, there: second}, {here: first, there: second}, [here]
    new_background = background
    if kind == "recolor":
        (en, zh), colours = rng.choice(list(COLOURED.items()))
        own = {find_emoji(char).key for char in colours.values()}  # which of two books would be meant?
        second = rng.choice([thing for thing in _things() if thing.key not in own])
        before[there] = after[there] = second
        was, style = rng.sample(list(colours), 2)
        first, third = (Thing(find_emoji(colours[c]).key, en, zh) for c in (was, style))
        before[here], after[here] = first, third
        names |= {"was": (was, COLOURS_ZH[was]), "style": (style, COLOURS_ZH[style])}
        actions = [{"action": "recolor", "target": en, "bbox": canvas.bbox(here), "style": style}]
    elif kind == "text":
        was, style = rng.sample(list(TEXTS), 2)
        first, third = (Thing(find_emoji(TEXTS[text]).key, text, text) for text in (was, style))
        before[here], after[here] = first, third
        names |= {"was": (was, was), "style": (style, style)}
        actions = [{"action": "add_text", "target": was, "bbox": canvas.bbox(here), "content": style}]
    elif kind == "remove":
        del after[here]
        actions = [{"action": "remove", "target": first.en, "bbox": canvas.bbox(here)}]
    elif kind == "add":
        del before[here]
        names["object"] = with_article(first.en), first.zh
        actions = [{"action": "insert", "bbox": canvas.bbox(here), "object": first.en, "position": here}]
    elif kind == "replace":
        after[here] = third
        names["object"] = with_article(third.en), third.zh
        actions = [{"action": "replace", "target": first.en, "bbox": canvas.bbox(here), "object": third.en}]
    elif kind == "background":
        new_background = rng.choice([colour for colour in COLOURS if colour != background])
        names["style"] = new_background, COLOURS[new_background][1]
        actions = [{"action": "background", "style": new_background}]
    elif kind == "swap":
        after, changed = {here: second, there: first}, [here, there]
        names["object"] = second.en, second.zh
        actions = [
            {"action": "move", "target": thing.en, "bbox": canvas.bbox(place), "position": to}
            for thing, place, to in ((first, here, there), (second, there, here))
        ]
    elif kind == "move":
        before, after, changed = {here: first}, {there: first}, [here, there]
        actions = [{"action": "move", "target": first.en, "bbox": canvas.bbox(here), "position": there}]
    else:
        raise ValueError(f"no kind of edit {kind!r}; there are {', '.join(KINDS)}")
    position = there if kind == "move" else here
    names |= {"position": (position, POSITIONS_ZH[position]), "at": _at(position)}
    names.setdefault("target", (first.en, first.zh))
    mask = _background_mask(canvas, before) if kind == "background" else _mask(canvas, changed)
    return EditPair(
        [_draw(canvas, background, before)],
        _draw(canvas, new_background, after),
        _captions(kind, **names),
        CATEGORY[kind],
        actions,
        mask,
        held_out=_is_held_out(kind, background, before, after),
    )


def composed_edit(rng: random.Random, kind: str) -> EditPair:
    """Draw a random edit of no reference ("draw"), of two ("combine") or of three ("combine_both")."""
    canvas, background = rng.choice(CANVASES), rng.choice(list(COLOURS))
    here, there = rng.sample(list(canvas.places), 2)
    first, second = rng.sample(_things(), 2)
    after = {there: first, here: second}
    single = Canvas((96, 96), {"centre": (48, 48, 88)})
    alone = {thing.key: _draw(single, "white", {"centre": thing}) for thing in (first, second)}
    names = {"at": _at(here), "other": _at(there)}
    names["style"] = background, COLOURS[background][1]
    names |= {"target": (first.en, first.zh), "object": (second.en, second.zh)}
    inserts = [
        {"action": "insert", "bbox": canvas.bbox(place), "object": thing.en, "position": place}
        for place, thing in ((there, first), (here, second))
    ]
    if kind == "combine":
        references = [_draw(canvas, background, {there: first}), alone[second.key]]
        actions, mask = inserts[1:], _mask(canvas, [here])
    elif kind == "combine_both":
        references = [_draw(canvas, background, {}), alone[first.key], alone[second.key]]
        actions, mask = inserts, _mask(canvas, [here, there])
    else:
        names |= {"at": _at(there)}
        names |= {name: (with_article(en), zh) for name, (en, zh) in names.items() if name in ("target", "object")}
        references, mask = [], None
        actions = [{k: v for k, v in insert.items() if k != "bbox"} for insert in inserts]
        actions.append({"action": "background", "style": background})
    target, captions = _draw(canvas, background, after), _captions(kind, **names)
    return EditPair(
        references, target, captions, CATEGORY[kind], actions, mask, held_out=_is_held_out(kind, background, after)
    )
