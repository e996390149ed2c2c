"""Line charts and stacked strips as inline SVG and HTML, without a script: they take the page's colours and font."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 200  # of the plot, pixels
_LEFT, _TOP, _FOOT, _RIGHT = 58, 8, 24, 14
_MOST_POINTS = 500
COLOURS = 8  # classes c0 to c7 of the style sheet


@dataclass(frozen=True)
class Line:
    """One line of a chart.  xs: in increasing order; colour: its class's number; faint: drawn thin, behind others."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    faint: bool = False


def line_chart(lines: Sequence[Line], marks: Sequence[float] = (), log: bool = False, x_unit: str = "step") -> str:
    """Return a chart; marks: x of vertical lines.  log: a logarithmic y axis, where all values are positive."""
    lines = [line for line in lines if len(line.xs)]
    if not lines:
        return ""
    ys = [y for line in lines for y in line.ys]
    log = log and min(ys) > 0
    low_x, high_x = min(line.xs[0] for line in lines), max(line.xs[-1] for line in lines)
    low, high, ticks = _axis(min(ys), max(ys), log)

    def x_of(x: float) -> float:
        return _LEFT + _WIDTH * ((x - low_x) / (high_x - low_x) if high_x > low_x else 0.5)

    def y_of(y: float) -> float:
        a, b, c = (math.log10(v) for v in (low, high, y)) if log else (low, high, y)
        return _TOP + _HEIGHT * (1 - (c - a) / (b - a))

    parts = []
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="value" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in _ticks(low_x, high_x, 5):
        if tick == int(tick):
            parts.append(
                f'<text class="value" x="{x_of(tick):.1f}" y="{_TOP + _HEIGHT + 17}" text-anchor="middle">'
                f"{tick:,.0f}</text>"
            )
    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for x in marks:
        if low_x < x <= high_x:
            parts.append(f'<line class="mark" x1="{x_of(x):.1f}" x2="{x_of(x):.1f}" y1="{_TOP}" y2="{bottom}"/>')
    for line in sorted(lines, key=lambda line: not line.faint):
        places = [(x_of(x), y_of(y)) for x, y in zip(*_thinned(line.xs, line.ys), strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        kind = f"c{line.colour % COLOURS}" + (" faint" if line.faint else "")
        title = f"<title>{escape(line.name)}: {number(line.ys[-1])} at {x_unit} {line.xs[-1]:,g}</title>"
        parts.append(f'<g class="line {kind}">{title}<polyline points="{points}"/>')
        if len(places) <= 30 and not line.faint:
            for (x, y), value_x, value in zip(places, line.xs, line.ys, strict=True):
                shown = f"{escape(line.name)}, {x_unit} {value_x:,g}: {number(value)}"
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{shown}</title></circle>')
        parts.append("</g>")
    size = f"{_LEFT + _WIDTH + _RIGHT} {_TOP + _HEIGHT + _FOOT}"
    return f'<svg viewBox="0 0 {size}" role="img">{"".join(parts)}</svg>'


def legend(entries: Sequence[tuple[str, int, str]]) -> str:
    """Return the names of lines beside their colours; entries: (name, colour, its last value or "")."""
    items = (
        f'<span class="key"><i class="c{colour % COLOURS}"></i>{escape(name)} <b>{escape(value)}</b></span>'
        for name, colour, value in entries
    )
    return f'<div class="keys">{"".join(items)}</div>'


def strip(parts: Mapping[str, float], whole: float | None = None) -> str:
    """Return a bar made of parts, each as long as its share, with its name and share as a tooltip."""
    total = whole or sum(parts.values())
    drawn = (
        f'<i class="c{i % COLOURS}" style="flex:{value / total:.6f}" '
        f'title="{escape(name)}: {100 * value / total:.1f} %"></i>'
        for i, (name, value) in enumerate(parts.items())
        if total and value > 0
    )
    return f'<div class="strip wide">{"".join(drawn)}</div>'


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Return the mean of each value and up to span - 1 before it."""
    sums, found = [0.0], []
    for i, value in enumerate(values):
        sums.append(sums[-1] + value)
        first = max(0, i + 1 - span)
        found.append((sums[i + 1] - sums[first]) / (i + 1 - first))
    return found


def number(value: float) -> str:
    """Return a number with about three digits that say something."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most about _MOST_POINTS points that keep every peak: of each stretch its lowest and its highest."""
    if len(xs) <= _MOST_POINTS:
        return list(xs), list(ys)
    stretch = math.ceil(2 * len(xs) / _MOST_POINTS)
    kept = []
    for first in range(0, len(xs), stretch):
        places = range(first, min(first + stretch, len(xs)))
        kept += sorted({min(places, key=ys.__getitem__), max(places, key=ys.__getitem__)})
    kept = sorted({0, *kept, len(xs) - 1})
    return [xs[i] for i in kept], [ys[i] for i in kept]


def _axis(low: float, high: float, log: bool) -> tuple[float, float, list[float]]:
    """Return the ends of a y axis and what is written along it."""
    if log:
        low, high = low / 1.1, high * 1.1
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
        if len(ticks) > 6:
            ticks = [t for t in ticks if math.log10(t).is_integer()] or ticks[::3]
        return low, high, ticks if len(ticks) > 1 else _ticks(low, high, 4)
    if high == low:
        margin = abs(high) / 10 or 1.0
        low, high = low - margin, high + margin
    elif low >= 0 and low < 0.5 * high:
        low, high = 0.0, high + 0.05 * (high - low)
    else:
        low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    return low, high, _ticks(low, high, 5)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers from low to high, at most about `most`."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
