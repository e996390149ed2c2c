"""Text as a word filter looks at it: what looks alike is alike, what cannot be seen is gone."""

import re
import unicodedata

_CJK_RANGES = (
    "\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Han
    "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af"  # Hangul
)
CJK = re.compile(f"[{_CJK_RANGES}]")  # of the scripts that do not part words by spaces, or part them elsewhere
# Marks that are vowels of their script, such as Hindi's or Thai's: as much a part of the word as its letters.
_VOWEL_BLOCKS = ((0x0900, 0x109F), (0x1700, 0x1CFF), (0xA800, 0xABFF), (0x11000, 0x11FFF))
_VOWEL_SIGNS = {
    chr(code) for first, last in _VOWEL_BLOCKS for code in range(first, last + 1)
    if unicodedata.category(chr(code)) in ("Mn", "Mc")
}  # fmt: skip
_LETTER = rf"(?:(?![{_CJK_RANGES}])[^\W_]|[{''.join(sorted(_VOWEL_SIGNS))}])"
LETTERS = re.compile(f"{_LETTER}+")  # a run of letters and digits of any other script
WORD_CHARACTERS = re.compile(f"(?:{_LETTER}|{CJK.pattern})+")
_FILLERS = "\u115f\u1160\u3164\uffa0"  # letters by name, of no width
_UNSEEN = ("Mn", "Me", "Cf", "Cc", "Cs")  # marks over letters, joiners and directions, controls, half characters


class _Fold(dict):
    """What becomes of each character, found once."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        base = unicodedata.normalize("NFD", char)[0]
        if char.isspace():
            folded = char
        elif char in _FILLERS or (unicodedata.category(char) in _UNSEEN and char not in _VOWEL_SIGNS):
            folded = ""
        else:
            folded = base if base.isascii() else char
        self[code] = folded
        return folded


_FOLD = _Fold()


def fold(text: str) -> str:
    """Return the text in one form for all its looks.

    Half and full width, ligatures, circled and mathematical letters are the plain ones (NFKC), capitals are small,
    Latin letters have no accents, and what has no width is gone: joiners, soft hyphens, directions, combining marks but
    those that are a script's vowels.
    Not made alike: traditional and simplified Chinese, or Latin letters and the digits and letters of other scripts
    that look like them; those need tables.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return text.translate(_FOLD)
