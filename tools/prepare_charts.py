"""Bar charts as inline SVG, without a script: they take the page's colours and font."""

from collections.abc import Mapping, Sequence
from html import escape

_ROW, _BAR = 26, 18  # pixels
_LABEL, _LENGTH, _VALUE = 205, 275, 110
_WIDTH, _HEIGHT, _FOOT, _HEAD = 560, 150, 22, 18
_CHARACTERS = 28  # of a label


def bars(counts: Mapping[str, int], total: int, most: int = 12) -> str:
    """Return horizontal bars, one a name, with its count and share of `total`; the rest below `most` in one."""
    items = list(counts.items())
    if len(items) > most:
        rest = items[most - 1 :]
        items = [*items[: most - 1], (f"{len(rest)} others", sum(count for _, count in rest))]
    longest = max([1, *(count for _, count in items)])
    parts = []
    for i, (name, count) in enumerate(items):
        y, length = i * _ROW, max(1.5, _LENGTH * count / longest)
        label = name if len(name) <= _CHARACTERS else name[: _CHARACTERS - 1] + "…"
        share = f"{100 * count / total:.1f} %" if total else ""
        parts.append(
            f"<g><title>{escape(name or 'none')}: {count}</title>"
            f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(label or "none")}</text>'
            f'<rect class="bar" x="{_LABEL}" y="{y + 1}" width="{length:.1f}" height="{_BAR}" rx="3"/>'
            f'<text class="value" x="{_LABEL + length + 8:.1f}" y="{y + 14}">{count:,} · {share}</text></g>'
        )
    width, height = _LABEL + _LENGTH + _VALUE, max(1, len(items)) * _ROW
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def histogram(counts: Mapping[str, int], unit: str, marks: Sequence[tuple[str, float]] = (), most: int = 40) -> str:
    """Return a histogram of {whole number: count}, in at most `most` bins of equal width, with lines at `marks`."""
    values = {int(value): count for value, count in counts.items()}
    low, high = min(values), max(values)
    step = max(1, -(-(high - low + 1) // most))
    bins = [0] * -(-(high - low + 1) // step)
    for value, count in values.items():
        bins[(value - low) // step] += count
    tallest, width = max(bins), _WIDTH / len(bins)
    parts = []
    for i, count in enumerate(bins):
        first, last = low + i * step, low + (i + 1) * step - 1
        height = (_HEIGHT - _HEAD) * count / tallest
        named = f"{first}" if step == 1 else f"{first} to {last}"
        parts.append(
            f'<g><title>{named} {unit}: {count}</title><rect class="bar" x="{i * width + 0.5:.1f}" '
            f'y="{_HEIGHT - height:.1f}" width="{max(1, width - 1):.1f}" height="{height:.1f}" rx="1.5"/></g>'
        )
    parts.append(f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}"/>')
    for anchor, x, text in (("start", 0, f"{low}"), ("end", _WIDTH, f"{high} {unit}")):
        parts.append(f'<text class="value" x="{x}" y="{_HEIGHT + 16}" text-anchor="{anchor}">{text}</text>')
    for name, value in marks:
        x = min(_WIDTH - 1.0, (value - low + 0.5) / step * width)
        anchor, shift = ("end", -5) if x > _WIDTH / 2 else ("start", 5)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}"/>'
            f'<text class="value" x="{x + shift:.1f}" y="11" text-anchor="{anchor}">{escape(name)} {value:g}</text>'
        )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _FOOT}" role="img">{"".join(parts)}</svg>'
