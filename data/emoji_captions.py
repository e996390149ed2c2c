"""How emoji and scenes of emoji are described in English and Chinese."""

from collections.abc import Sequence

# Words that end in s and are one thing, and words that are not counted: the article goes by a name's last word.
_SINGULAR = set("hippopotamus bus cactus octopus lotus walrus rhinoceros hibiscus abacus claus apatosaurus".split())
_UNCOUNTED = set(
    "bacon bread butter cheese corn fire ginger honey ice money music popcorn rice salt spaghetti sushi tea garlic "
    "lipstick trousers jeans running".split()
)

# English name and CSS colour, Chinese name.
COLOURS = {
    "white": ("#ffffff", "白色"),
    "light blue": ("#bfe3ff", "浅蓝色"),
    "light green": ("#c9f2c7", "浅绿色"),
    "light yellow": ("#fff3b0", "浅黄色"),
    "pink": ("#ffd1dc", "粉色"),
    "grey": ("#d0d0d0", "灰色"),
    "lavender": ("#e6d5ff", "淡紫色"),
    "peach": ("#ffe0b8", "桃色"),
}
PLACES = {
    "left": ("on the left", "左边"),
    "right": ("on the right", "右边"),
    "top": ("at the top", "上面"),
    "bottom": ("at the bottom", "下面"),
    "centre": ("in the centre", "中间"),
}


def with_article(name: str) -> str:
    """Return an English name with a or an, where it takes one."""
    first, last = name.split()[0].lower(), name.split()[-1].lower().strip('"')
    plural = last.endswith("s") and not last.endswith("ss") and last not in _SINGULAR
    if first in ("a", "an", "the", "people", "men", "women") or plural or last in _UNCOUNTED:
        return name
    # By sound: "a unicorn", "a one-piece", "an hourglass".
    vowel = (
        first[0] in "aeiou" and not first.startswith(("uni", "one", "euro", "ut")) or first.startswith(("hour", "x-"))
    )
    return f"{'an' if vowel else 'a'} {name}"


def emoji_captions(en: str, zh: str) -> dict[str, list[str]]:
    """Return the wordings for one emoji, plain name first."""
    return {
        "en": [en, f"an emoji of {with_article(en)}", f"a picture of {with_article(en)}"],
        "zh": [zh, f"{zh}的表情符号", f"一张{zh}的图片"],
    }


def scene_captions(placed: Sequence[tuple[str, str, str]], colour: str) -> dict[str, list[str]]:
    """Return the wordings for a scene.

    placed: (English name, Chinese name, key of PLACES) of each object; colour: key of COLOURS.
    """
    en = " and ".join(f"{with_article(name)} {PLACES[place][0]}" for name, _, place in placed)
    zh = "，".join(f"{PLACES[place][1]}是{name}" for _, name, place in placed)
    colour_zh = COLOURS[colour][1]
    return {"en": [f"{en}, on a {colour} background"], "zh": [f"{colour_zh}背景上，{zh}"]}
