"""Captions: bytes of any origin to text, by language."""

import codecs
import json
import re

LANGUAGES = ("zh", "en", "other")
_HAN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_LATIN = re.compile(r"[A-Za-z\u00c0-\u024f]")
_PRIVATE = re.compile(r"[\ue000-\uf8ff]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # half a character, from a cut JSON escape; no tokenizer takes it
_EDGES = re.compile(r"^[\s\0\ufeff\u200b]+|[\s\0\ufeff\u200b]+$")  # also what str.strip leaves but nobody sees
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def decode_text(data: bytes) -> str:
    """Decode by the first rule that holds; never fails.

    1. A byte-order mark decides.  2. UTF-8.  3. UTF-8 with damage, if it has more sound characters of three or four
    bytes (Chinese, emoji, curly quotes) than damaged ones: Chinese in GB18030 often reads as sound ones of two bytes.
    4. GB18030, if it gives plausible Chinese.  5. Windows-1252.  What does not decode becomes U+FFFD.
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


def language_of(text: str) -> str:
    """Return zh for text with Han characters, else en for text with Latin letters, else other."""
    if _HAN.search(text):
        return "zh"
    return "en" if _LATIN.search(text) else "other"


def parse_captions(extension: str, data: bytes) -> tuple[dict[str, list[str]], str]:
    """Return ({language: wordings}, group) of a sample's .json or .txt member; languages are of LANGUAGES, sorted.

    json: {"captions": {"en": ..., "zh-CN": ...}}, {"captions": ...} or {"caption": ...}, each ... a wording or a list;
    without a label the script decides the language.  "category" names the group.  Empty wordings are dropped.
    Raises: ValueError if the member cannot be read or no wording is left.
    """
    text = decode_text(data)
    if extension == "json":
        labelled, group = _json_wordings(text)
    else:
        labelled, group = [(None, text)], ""
    captions: dict[str, list[str]] = {}
    for label, wording in labelled:
        wording = _EDGES.sub("", _SURROGATE.sub("\ufffd", wording))
        if wording:
            captions.setdefault(_language(label) if label else language_of(wording), []).append(wording)
    if not captions:
        raise ValueError("it has no caption, or only empty ones")
    return dict(sorted(captions.items())), group


def _json_wordings(text: str) -> tuple[list[tuple[str | None, str]], str]:
    """Return [(language label or None, wording)] and the group; what is not text counts as no caption."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its json cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("its json is not an object")
    captions = content.get("captions") or content.get("caption")
    by_label = captions if isinstance(captions, dict) else {None: captions}
    labelled = []
    for label, wordings in by_label.items():
        wordings = wordings if isinstance(wordings, list) else [wordings]
        labelled += [(label, wording) for wording in wordings if isinstance(wording, str)]
    group = content.get("category")
    return labelled, _SURROGATE.sub("\ufffd", group) if isinstance(group, str) else ""


def _language(label: str) -> str:
    """Return which of LANGUAGES a label such as en, zh-CN or zh_Hant means."""
    primary = re.split("[-_]", label.lower())[0]
    return primary if primary in LANGUAGES else "other"
