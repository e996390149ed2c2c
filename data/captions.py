"""Captions: bytes of any origin to text, with its language and weight."""

import codecs
import json
import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

LANGUAGES = ("zh", "en", "other", "none")
LANGUAGE_ROWS = LANGUAGES[:3]  # the rows of a model's language embedding; none takes the last
_HAN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_KANA_HANGUL = re.compile(r"[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")
_LATIN = re.compile(
    r"[A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a]"
)
_LATIN_WORD = re.compile(rf"{_LATIN.pattern}(?:{_LATIN.pattern}|['’\u0300-\u036f])*")
_CAPTION_NAMES, _INSTRUCTION_NAMES = ("captions", "caption"), ("instructions", "instruction")  # in a .json
_PRIVATE = re.compile(r"[\ue000-\uf8ff]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # half a character, from a cut JSON escape; no tokenizer takes it
_LINE_END = re.compile(r"\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_UNSEEN = re.compile(r"[\0-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")  # control characters, byte-order marks
_EDGES = re.compile(r"^[\s\u200b]+|[\s\u200b]+$")  # also what str.strip leaves but nobody sees
# The mark of UTF-16 is how that of UTF-32 begins.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip


@dataclass(frozen=True)
class Wording:
    """One way to describe a picture."""

    text: str
    language: str  # of LANGUAGES
    weight: float = 1.0  # how often it is chosen, against the other wordings in its language


def decode_text(data: bytes) -> str:
    """Decode by the first rule that holds; never fails.

    1. A byte-order mark decides: UTF-8, UTF-16, UTF-32.  2. UTF-8, which other encodings do not read as by chance.
    3. UTF-8 with damage, if it has more sound characters of three or four bytes (Chinese, emoji, curly quotes) than
    damaged ones: Chinese in GB18030 often reads as sound ones of two bytes.  4. GB18030, if it gives plausible Chinese:
    it takes almost any bytes, so it is asked before the encoding that takes all of them, and must prove itself.
    5. Windows-1252.  What does not decode becomes U+FFFD.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    text = data.decode("utf-8", errors="replace")
    damaged = text.count("\ufffd")
    if not damaged or damaged < sum("\u0800" <= c != "\ufffd" for c in text):
        return text
    return _decode_gb18030(data) or data.decode("cp1252", errors="replace")


def _decode_gb18030(data: bytes) -> str | None:
    """Return the text if it is plausible Chinese, else None."""
    try:
        text = data.decode("gb18030")
    except UnicodeDecodeError:
        return None
    if not _HAN.search(text) or _PRIVATE.search(text):
        return None
    # An accented letter and the letter after it ("Zürich" in Windows-1252) read as one Chinese character too.
    seconds = [c.encode("gb18030")[1:2] for c in text if c > "\x7f"]
    return text if 2 * sum(byte.isalpha() for byte in seconds) <= len(seconds) else None


def clean(text: str) -> str:
    """Return the text as a reader sees it.

    Unicode's composed form (NFC), as Qwen's tokenizer composes anyway; not NFKC, which would make Chinese punctuation
    ASCII.  Every line end is a line feed; other control characters, byte-order marks and space at the ends are dropped;
    half a surrogate pair becomes U+FFFD.  Joiners, directions and white space inside stay.
    """
    text = _UNSEEN.sub("", _LINE_END.sub("\n", _SURROGATE.sub("\ufffd", text)))
    return _EDGES.sub("", unicodedata.normalize("NFC", text))


def language_of(text: str) -> str:
    """Return a text's language by its script, one of LANGUAGES.

    none: it has no letter, like an emoji or a number.  other: most letters are of no script below, or kana and Hangul
    are half as many as Han characters or more, which makes it Japanese or Korean.  zh: at least as many Han characters
    as words in Latin letters ("穿 Nike 的人" is, "a sign that says 茶" is not).  en: the rest, any language in Latin
    letters.
    """
    letters = sum(map(str.isalpha, text))
    if not letters:
        return "none"
    han, latin = len(_HAN.findall(text)), len(_LATIN.findall(text))
    if 2 * (han + latin) < letters or 2 * len(_KANA_HANGUL.findall(text)) >= max(1, han):
        return "other"
    return "zh" if han and han >= len(_LATIN_WORD.findall(text)) else "en"


def language_row(language: str) -> int:
    """Return the row of the language embedding for one of LANGUAGES."""
    return min(LANGUAGES.index(language), len(LANGUAGE_ROWS) - 1)


def parse_captions(extension: str, data: bytes) -> tuple[dict[str, list[str]], str]:
    """Return ({language: texts}, group) as `parse_wordings` finds them, languages sorted, without weights."""
    wordings, group = parse_wordings(extension, data)
    captions: dict[str, list[str]] = {}
    for wording in wordings:
        captions.setdefault(wording.language, []).append(wording.text)
    return captions, group


def parse_wordings(extension: str, data: bytes) -> tuple[list[Wording], str]:
    """Return a sample's wordings, sorted by language, and its group, from its .json or .txt member.

    json: {"captions": {"en": ..., "zh-CN": ...}}, {"captions": ...} or {"caption": ...}, of an edit, which has
    "references", also {"instructions": ...} or {"instruction": ...}, each ... a wording or a list of them; a wording is
    a text or {"text": ..., "weight": 2.0, "language": "en"}, the last two optional.  Without a label the script decides
    the language.  "category" names the group.  Empty wordings and those of weight 0 are dropped.
    Raises: ValueError if the member cannot be read, no wording is left, or a weight is no number of at least 0.
    """
    text = decode_text(data)
    if extension == "json":
        labelled, group = _json_wordings(text)
    else:
        labelled, group = [(None, text, 1.0)], ""
    wordings = []
    for label, text, weight in labelled:
        if (text := clean(text)) and weight:
            wordings.append(Wording(text, _language(label) if label else language_of(text), weight))
    if not wordings:
        raise ValueError("it has no caption, or only empty ones")
    return sorted(wordings, key=lambda wording: wording.language), clean(group)


def _json_wordings(text: str) -> tuple[list[tuple[str | None, str, float]], str]:
    """Return [(language label or None, text, weight)] and the group; what is not text counts as no caption."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its json cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("its json is not an object")
    names = (*_CAPTION_NAMES, *_INSTRUCTION_NAMES) if "references" in content else _CAPTION_NAMES
    captions = next((value for name in names if (value := content.get(name))), None)
    single = isinstance(captions, dict) and isinstance(captions.get("text"), str)
    by_label = captions if isinstance(captions, dict) and not single else {None: captions}
    group = content.get("category")
    return [*_labelled(by_label)], group if isinstance(group, str) else ""


def _labelled(by_label: dict) -> Iterator[tuple[str | None, str, float]]:
    for label, wordings in by_label.items():
        for wording in wordings if isinstance(wordings, list) else [wordings]:
            own, weight = label, 1.0
            if isinstance(wording, dict):
                wording, own, weight = wording.get("text"), wording.get("language", label), wording.get("weight", 1.0)
                if type(weight) not in (int, float) or not 0 <= weight < math.inf:
                    raise ValueError(f"a caption's weight must be a number of at least 0, got {weight!r}")
            if isinstance(wording, str):
                yield own if isinstance(own, str) else None, wording, float(weight)


def _language(label: str) -> str:
    """Return which of LANGUAGES a label such as en, zh-CN or zh_Hant means."""
    primary = re.split("[-_]", label.lower())[0]
    return primary if primary in LANGUAGES else "other"
