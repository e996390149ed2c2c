"""Questions after the places of things in a picture, with their answers, for the recipe of the tiny text encoder.

The answers have the form in which Qwen2.5-VL points at things, a list of labels and boxes, but for the label that
comes first and for boxes in thousandths of the picture's sides, as in the plans of edits, in steps of fifty.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from data.edit_plan import BOX_SIDE
from data.edit_scenes import COLOURED, TEXTS, find_emoji
from data.emoji_table import Emoji
from tools.tiny_scenes import Scene, random_scene

# {names}: one name, or two.
_WORDINGS = {
    "en": ["Where is the {names}?", "Find the {names}.", "the {names}", "{names}", "{names}: where?"],
    "zh": ["{names}在哪里？", "请找到{names}。", "{names}", "图里的{names}在哪", "指出{names}"],
}  # fmt: skip
_AND = {"en": " and the ", "zh": "和"}
_STEP = 50  # of a box's numbers: finer ones are noise to a tower of so few tokens, in which a thing's place drowns
_TWO_ASKED = 0.3  # of the questions to pictures of two things


@dataclass(frozen=True)
class Question:
    """Text after a picture, its answer, and where in both one has to know the place of which thing.

    looks: (is in the answer, first character, last one or None for the end of the turn, number of the thing in the
    scene): whoever reads the tokens that end on these characters has to know where that thing is.
    """

    text: str
    answer: str
    looks: list[tuple[bool, int, int | None, int]]


@cache
def _other_names() -> dict[str, tuple[str, str]]:
    """Return what else things are called by those who want them edited: key of an emoji → (English, Chinese)."""
    names = {find_emoji(char).key: name for name, colours in COLOURED.items() for char in colours.values()}
    return names | {find_emoji(char).key: (text, text) for text, char in TEXTS.items()}


def _name(rng: random.Random, thing: Emoji) -> tuple[str, str]:
    other = _other_names().get(thing.key)
    return other if other and rng.random() < 0.7 else (thing.en, thing.zh)


def _box(scene: Scene, box: tuple[float, float, float, float]) -> list[int]:
    height, width = scene.pixels.shape[1:]
    steps = [round(v * BOX_SIDE / side / _STEP) for v, side in zip(box, (width, height) * 2, strict=True)]
    return [min(max(step * _STEP, 0), BOX_SIDE) for step in steps]


def ask(
    rng: random.Random, scene: Scene, numbers: Sequence[int] | None = None, language: str | None = None
) -> Question:
    """Ask for one thing of a scene, or for both.

    numbers: of the things to ask for; language: en or zh.  Both are drawn if not given.
    """
    names = [_name(rng, thing) for thing, _ in scene.things]
    if len(set(names)) < len(names):  # two hearts
        names = [(thing.en, thing.zh) for thing, _ in scene.things]
    if numbers is None:
        numbers = rng.sample(range(len(names)), len(names))
        numbers = numbers if rng.random() < _TWO_ASKED else numbers[:1]
    language = language or rng.choice(["en", "zh"])
    before, after = rng.choice(_WORDINGS[language]).split("{names}")
    looks, text, answer = [], before, ""
    for count, number in enumerate(numbers):
        english, chinese = names[number]
        text += (_AND[language] if count else "") + (english if language == "en" else chinese)
        looks.append((False, len(text) - 1, len(text) - 1, number))
        answer += ("," if count else "[") + '{"label":' + json.dumps(english, ensure_ascii=False)
        first = len(answer) - 1
        answer += ',"bbox_2d":' + json.dumps(_box(scene, scene.things[number][1]), separators=(",", ":"))
        looks.append((True, first, len(answer) - 2, number))
        answer += "}"
    if len(numbers) == 1:  # to the end of the turn: whatever reads on may want it
        is_answer, first, _, number = looks[0]
        looks[0] = is_answer, first, None, number
    return Question(text + after, answer + "]", looks)


def asked_scene(rng: random.Random, lists: Sequence[Sequence[Emoji]], shares: Sequence[float]) -> Scene:
    """Draw a scene of the emoji of one list; mostly of two things, since a single one needs no finding."""
    while True:
        scene = random_scene(rng, rng.choices(lists, shares)[0])
        if len(scene.things) == 2 or rng.random() < 0.2:
            return scene
