"""What the tiny vision tower learns from: emoji alone and in pairs, drawn at random, with their captions and places."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.edit_scenes import COLOURED, TEXTS, THINGS, find_emoji
from data.emoji import small_list
from data.emoji_captions import COLOURS, emoji_captions, scene_captions
from data.emoji_table import Emoji, draw_scene, load_emoji

# Width and height in pixels, and each thing's place (key of PLACES), centre and side.
_LAYOUTS = [
    (128, 64, [("left", 32, 32, 56), ("right", 96, 32, 56)]),
    (64, 128, [("top", 32, 32, 56), ("bottom", 32, 96, 56)]),
    (96, 96, [("left", 24, 48, 44), ("right", 72, 48, 44)]),
]


@dataclass(frozen=True)
class Scene:
    """A picture, uint8 (3, H, W), its captions, and its things with their boxes: left, top, right, bottom in pixels."""

    pixels: Tensor
    captions: dict[str, list[str]]
    things: list[tuple[Emoji, tuple[float, float, float, float]]]


def emoji_lists() -> tuple[list[Emoji], list[Emoji], list[Emoji]]:
    """Return the curated list, what stands in the scenes of the default edits, and all without skin tones."""
    table = load_emoji()
    curated = [table[char] for char in small_list()]
    colours = [char for variants in COLOURED.values() for char in variants.values()]
    staged = [find_emoji(char) for char in (*THINGS.replace("\ufe0f", ""), *colours, *TEXTS.values())]
    staged = list({emoji.char: emoji for emoji in staged}.values())
    others = [e for e in table.values() if e.char not in small_list() and "skin tone" not in e.en]
    return curated, staged, curated + others


def draw(
    size: tuple[int, int], things: Sequence[tuple[Emoji, float, float, float]], colour: str
) -> tuple[Tensor, list[tuple[Emoji, tuple[float, float, float, float]]]]:
    """Draw things given with their centre and side; return the picture and the things' boxes."""
    placed = [(emoji.key, (x, y, side)) for emoji, x, y, side in things]
    picture = draw_scene(size, COLOURS[colour][0], placed)
    boxes = [(e, (x - s / 2, y - s / 2, x + s / 2, y + s / 2)) for e, x, y, s in things]
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1), boxes


def random_scene(rng: random.Random, emoji: Sequence[Emoji]) -> Scene:
    """Return one thing that fills a square, or one or two of them in their places."""
    colour = rng.choice(list(COLOURS))
    if rng.random() < 0.5:
        thing, side = rng.choice(emoji), rng.choice([96, 96, 90, 84])
        pixels, boxes = draw((96, 96), [(thing, 48, 48, side)], rng.choice(["white", colour]))
        return Scene(pixels, emoji_captions(thing.en, thing.zh), boxes)
    width, height, places = rng.choice(_LAYOUTS)
    places = rng.sample(places, rng.choice([1, 2, 2, 2]))
    chosen = rng.sample(emoji, len(places))
    things = []
    for thing, (_, x, y, side) in zip(chosen, places, strict=True):
        things.append((thing, x + rng.uniform(-2, 2), y + rng.uniform(-2, 2), rng.uniform(0.93, 1.07) * side))
    pixels, boxes = draw((width, height), things, colour)
    named = [(e.en, e.zh, place) for e, (place, *_) in zip(chosen, places, strict=True)]
    return Scene(pixels, scene_captions(named, colour), boxes)
