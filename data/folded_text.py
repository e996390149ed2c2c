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

# Latin letters in other shapes, which no decomposition takes back to them: small capitals, white on black, a stroke.
_SHAPES = {
    **dict(zip("ᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘꞯʀꜱᴛᴜᴠᴡʏᴢ", "abcdefghijklmnopqrstuvwyz", strict=True)),
    **dict(zip("ıȷƒɑɡłøđħŧƀ", "ijfaglodhtb", strict=True)),
    **{chr(first + n): chr(ord("a") + n) for first in (0x1F150, 0x1F170) for n in range(26)},
}
# Small Cyrillic and Greek letters → the Latin ones that they, or their capitals, look like.
_TWINS = dict(zip("авсԁеһіјкӏмнорԛѕтуѵԝх" + "αβεηικνορτυχω", "abcdehijklmhopqstyvwx" + "abehikvoptyxw", strict=True))
_TWIN, _ASCII = re.compile(f"[{''.join(_TWINS)}]"), re.compile("[a-z]")


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
            folded = base if base.isascii() else _SHAPES.get(char, char)
        self[code] = folded
        return folded


_FOLD = _Fold()


def _all_latin(run: re.Match) -> str:
    """Return a run of letters, in which Cyrillic or Greek ones beside Latin ones are the Latin ones they look like."""
    letters = run.group()
    return "".join(_TWINS.get(char, char) for char in letters) if _ASCII.search(letters) else letters


def fold(text: str) -> str:
    """Return the text in one form for all its looks.

    Half and full width, ligatures, circled and mathematical letters are the plain ones (NFKC), capitals are small,
    Latin letters have no accents, and what has no width is gone: joiners, soft hyphens, directions, combining marks but
    those that are a script's vowels.  Small capitals and the like are plain letters, and so are the Cyrillic and Greek
    ones that look like Latin ones, in a word that has a Latin one as well.
    Not made alike: traditional and simplified Chinese, digits that look like letters, or a word that is wholly of
    another script; those need a dictionary.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).translate(_FOLD)
    return LETTERS.sub(_all_latin, text) if _TWIN.search(text) else text
