"""Edits between whole emoji: pairs that differ in one thing that can be said."""

import itertools
import random
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from data.edit_plan import BOX_SIDE
from data.edit_scenes import COLOURED, COLOURS_ZH, TEXTS, EditPair, find_emoji
from data.emoji_captions import with_article
from data.emoji_table import draw_emoji, load_emoji, picture_rgba

SIDE = 96  # pixels
_HELD_OUT = 10  # one pair in so many is for validation
_JOINER = "\u200d"
_TONES = {
    "\U0001f3fb": ("light", "浅"), "\U0001f3fc": ("medium-light", "中浅"), "\U0001f3fd": ("medium", "中等"),
    "\U0001f3fe": ("medium-dark", "中深"), "\U0001f3ff": ("dark", "深"),
}  # fmt: skip
_PEOPLE = {"\U0001f468": ("man", "男人"), "\U0001f469": ("woman", "女人"), "\U0001f9d1": ("person", "人")}
_JOBS = "⚕🎓🏫⚖🌾🍳🔧🏭💼🔬💻🎤🎨✈🚀🚒"
_GROUPS = (
    "🐶🐱🦁🐯🐴🦄🐮🐷🐭🐹🐰🐻🐼🐨🐸🐵🐔🐺🦊🦝🐲🐗", "🐕🐈🐅🐎🐄🐖🐏🐐🐪🦒🐘🦏🐇🦔🦆🦅🦉🐧🐢🐍🐊🐳🐬🐟🦈🐙🐌🦋🐝🐞",
    "🍇🍈🍉🍊🍋🍌🍍🥭🍎🍐🍑🍒🍓🥝🍅🥥🥑🍆🥔🥕🌽🥒🍄", "🍞🥐🥖🥨🥞🧇🧀🍖🍗🥩🥓🍔🍟🍕🌭🌮🥚🍚🍜🍝🍦🍩🍪🎂🍰🧁🍫🍬🍭",
    "🚂🚌🚑🚒🚓🚕🚗🚚🚜🏍🛵🚲✈🚁🚀🛸⛵🚤🚢", "⚽⚾🏀🏐🏈🏉🎾🎳", "🎷🎸🎹🎺🎻🥁",
    "👔👕👖🧣🧤🧥👗👞👟👠👒🎩🎓🧢", "🌸🌹🌺🌻🌼🌷",
)  # fmt: skip
_FACES = "😀😁😂🙂😉😊😇🥰😍🤩😘😋😛🤪🤑🤗🤔🤐😐😶😏🙄😴😷🤒🤕🤢🥵🥶😵🥳😎🤓🧐😕🙁😮😳🥺😢😭😱😡"
_CLOCKS = "🕛🕐🕑🕒🕓🕔🕕🕖🕗🕘🕙🕚"
_HOURS_ZH = "十二 一 两 三 四 五 六 七 八 九 十 十一".split()
_ARROWS = {
    "⬆": ("up", "上"), "↗": ("up-right", "右上"), "➡": ("right", "右"), "↘": ("down-right", "右下"),
    "⬇": ("down", "下"), "↙": ("down-left", "左下"), "⬅": ("left", "左"), "↖": ("up-left", "左上"),
}  # fmt: skip
Found = tuple[str, str, str, str]  # before, after, instruction in English, in Chinese


def whole_emoji_edits(cap: int, split: str) -> list[EditPair]:
    """Return up to `cap` pairs of each category and rule, on white, without masks: the rules' own names are the plans.

    split: "train" or "validation", which has pairs that training has not, of rules whose wordings training has.
    """
    pairs = []
    for category, rule in _RULES:
        found = sorted(set(rule()))
        random.Random(f"{split} {rule.__name__} {category}").shuffle(found)
        chosen = (pair for pair in found if _split_of(*pair[:2]) == split)
        for before, after, en, zh in itertools.islice(chosen, cap):
            first, second = find_emoji(before), find_emoji(after)
            pictures = [draw_emoji(emoji.key, SIDE) for emoji in (first, second)]
            actions = [_action(category, first.en, second.en, en)]
            pairs.append(EditPair(pictures[:1], pictures[1], {"en": [en], "zh": [zh]}, category, actions))
    return pairs


def _pictures(before: str, after: str) -> tuple[bytes, bytes]:
    first, second = (picture_rgba(find_emoji(char).key).tobytes() for char in (before, after))
    return first, second


@cache
def _of_tables() -> frozenset[tuple[bytes, bytes]]:
    pairs = [*_additions(), *_removals(), *((before, after) for before, after, *_ in _table("emoji_changes.txt"))]
    return frozenset(_pictures(*pair[:2]) for pair in pairs)


def _split_of(before: str, after: str) -> str | None:
    """Return a pair's split, by its pictures; None if both are the same one, as of some variants they are.

    The wordings of the tables are each of one pair alone, so those are all for training.
    """
    first, second = pictures = _pictures(before, after)
    if first == second:
        return None
    is_held_out = zlib.crc32(first + second) % _HELD_OUT == 0 and pictures not in _of_tables()
    return "validation" if is_held_out else "train"


def _action(category: str, before: str, after: str, instruction: str) -> dict:
    """Return a plan's action for the whole picture."""
    kind = {"add": "insert", "text": "add_text"}.get(category, category)
    action = {"action": kind, "target": before, "bbox": [0, 0, BOX_SIDE, BOX_SIDE]}
    if category == "replace":
        action["object"] = after
    elif category == "text":
        action["target"], action["content"] = re.findall(r'"([^"]*)"', instruction)
    elif category in ("recolor", "transform"):
        action["style"] = instruction.rpartition(" to ")[2].rstrip(".").strip('"')
    elif category == "remove":
        action["target"] = re.sub("^Remove (the )?", "", instruction).rstrip(".")
    elif category == "add":
        action["object"] = instruction.removeprefix("Add ").rstrip(".")
    return action


def _exists(*chars: str) -> bool:
    known = load_emoji()
    return all(char in known or char.replace("\ufe0f", "") in known or char + "\ufe0f" in known for char in chars)


def _skin_tones() -> Iterator[Found]:
    for char in load_emoji():
        tones = [c for c in char if c in _TONES]
        if len(tones) != 1:
            continue
        for tone, (en, zh) in _TONES.items():
            other = char.replace(tones[0], tone)
            if tone != tones[0] and _exists(other):
                yield char, other, f"Change the skin tone to {en}.", f"请将肤色改为{zh}肤色。"


def _object_colours() -> Iterator[Found]:
    for (en, zh), colours in COLOURED.items():
        for was, now in itertools.permutations(colours, 2):
            yield (
                colours[was], colours[now], f"Change the {en} from {was} to {now}.",
                f"请将{zh}从{COLOURS_ZH[was]}改为{COLOURS_ZH[now]}。",
            )  # fmt: skip


def _things_of_a_kind() -> Iterator[Found]:
    for group in _GROUPS:
        for before, after in itertools.permutations(group, 2):
            first, second = find_emoji(before), find_emoji(after)
            yield (
                before, after, f"Replace the {first.en} with {with_article(second.en)}.",
                f"请将{first.zh}替换为{second.zh}。",
            )  # fmt: skip


def _jobs() -> Iterator[Found]:
    for person, (en, zh) in _PEOPLE.items():
        for tone in ("", *_TONES):
            for job in _JOBS:
                if _exists(person + tone, after := person + tone + _JOINER + job):
                    name = find_emoji("\U0001f9d1" + _JOINER + job)
                    yield (
                        person + tone, find_emoji(after).char, f"Dress this {en} as {with_article(name.en)}.",
                        f"把这个{zh}打扮成{name.zh}。",
                    )  # fmt: skip


def _expressions() -> Iterator[Found]:
    for before, after in itertools.permutations(_FACES, 2):
        name = find_emoji(after)
        yield before, after, f'Change the expression to "{name.en}".', f"请将表情改为“{name.zh}”。"


def _clocks() -> Iterator[Found]:
    for before, after in itertools.permutations(_CLOCKS, 2):
        hour = _CLOCKS.index(after)
        yield before, after, f"Set the clock to {hour or 12}:00.", f"请将时钟调到{_HOURS_ZH[hour]}点整。"


def _arrows() -> Iterator[Found]:
    for before, after in itertools.permutations(_ARROWS, 2):
        en, zh = _ARROWS[after]
        yield before, after, f"Rotate the arrow to point {en}.", f"请将箭头转向{zh}方。"


def _texts() -> Iterator[Found]:
    for was, now in itertools.permutations(TEXTS, 2):
        yield TEXTS[was], TEXTS[now], f'Change the text "{was}" to "{now}".', f"请将文字“{was}”改为“{now}”。"


def _table(name: str) -> Iterator[list[str]]:
    for line in Path(__file__).with_name(name).read_text("utf-8").splitlines():
        if not line.startswith("#"):
            yield line.split("|")


def _additions() -> Iterator[Found]:
    for before, after, en, zh, verb in _table("emoji_additions.txt"):
        yield before, after, f"Add {en}.", f"请{verb}{zh}。"


def _removals() -> Iterator[Found]:
    for before, after, en, zh, _ in _table("emoji_additions.txt"):
        yield after, before, f"Remove {re.sub('^(an?|one) ', 'the ', en)}.", f"请去掉{zh}。"


def _changes(category: str) -> Callable[[], Iterator[Found]]:
    def rule() -> Iterator[Found]:
        return ((b, a, en, zh) for b, a, en, zh, own in _table("emoji_changes.txt") if own == category)

    return rule


_RULES = (
    ("recolor", _skin_tones), ("recolor", _object_colours), ("recolor", _changes("recolor")),
    ("replace", _things_of_a_kind), ("replace", _changes("replace")),
    ("transform", _jobs), ("transform", _expressions), ("transform", _clocks), ("transform", _arrows),
    ("transform", _changes("transform")),
    ("add", _additions), ("add", _changes("add")), ("remove", _removals), ("remove", _changes("remove")),
    ("text", _texts),
)  # fmt: skip
