"""Captions: bytes of any origin to text, by language."""

import codecs
import json
import re

_HAN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_LATIN = re.compile(r"[A-Za-z\u00c0-\u024f]")


def decode_text(data: bytes) -> str:
    """Decode by rule: a byte-order mark decides; else UTF-8; else GB18030 if that gives Han characters; else cp1252."""
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    try:
        text = data.decode("gb18030")
        if _HAN.search(text) and not re.search(r"[\ue000-\uf8ff]", text):
            return text
    except UnicodeDecodeError:
        pass
    return data.decode("cp1252", errors="replace")


def language_of(text: str) -> str:
    """Return zh for text with Han characters, else en for text with Latin letters, else other."""
    if _HAN.search(text):
        return "zh"
    return "en" if _LATIN.search(text) else "other"


def parse_captions(extension: str, data: bytes) -> tuple[dict[str, list[str]], str]:
    """Return ({language: wordings}, group) of a sample's .json or .txt member.

    json: {"captions": {"en": [...] or "...", "zh": ...}} or {"caption": "..."}; "category" names the group.
    Empty wordings are dropped; languages come in alphabetical order.
    Raises: ValueError if the member cannot be read or no wording is left.
    """
    text, group = decode_text(data), ""
    captions: dict[str, list[str]] = {}
    if extension == "json":
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ValueError(f"its json cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise ValueError("its json is not an object")
        group = str(content.get("category", ""))
        by_language = content.get("captions")
        if not isinstance(by_language, dict):
            single = content.get("caption", by_language) or ""
            wordings = single if isinstance(single, list) else [single]
            by_language = {}
            for wording in wordings:
                by_language.setdefault(language_of(str(wording)), []).append(wording)
        for language, wordings in by_language.items():
            captions[str(language)] = [str(w) for w in (wordings if isinstance(wordings, list) else [wordings])]
    else:
        captions[language_of(text)] = [text]
    cleaned = {language: [w.strip() for w in captions[language] if w and w.strip()] for language in sorted(captions)}
    cleaned = {language: wordings for language, wordings in cleaned.items() if wordings}
    if not cleaned:
        raise ValueError("it has no caption, or only empty ones")
    return cleaned, group
