"""Names, values and times as the page of tools.report writes them, however long or odd they are."""

import json
from html import escape

MOST_TEXT = 2000  # characters of a value
_MOST_NAME = 120


def short(text: str, most: int = _MOST_NAME) -> str:
    """Return the text, or its beginning and how long it is."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def shown(value: object) -> str:
    """Return a value out of a file as text, as JSON writes it."""
    try:
        return short(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), MOST_TEXT)
    except RecursionError:  # it could be read, at less depth
        return "…"


def milliseconds(seconds: float) -> str:
    """Return a time of a step in words."""
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def duration(seconds: float) -> str:
    """Return a time of a run in words."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 60 else f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def card(title: str, body: str, note: str = "") -> str:
    """Return a box with a title; body: HTML; title and note: text."""
    return f"<div class=card><h3>{escape(title)} <span class=soft>{escape(note)}</span></h3>{body}</div>"
