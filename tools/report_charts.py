"""Line charts and stacked strips as inline SVG and HTML, without a script: they take the page's colours and font."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

_WIDTH, _HEIGHT = 560, 200  # of the plot, pixels
_LEFT, _TOP, _FOOT, _RIGHT = 58, 8, 24, 14
_MOST_POINTS = 500
_LARGE, _SMALL = 1e290, 1e-290  # beyond them sums and margins leave the range of floats
COLOURS = 8  # classes c0 to c7 of the style sheet


@dataclass(frozen=True)
class Line:
    """One line of a chart.  xs: increasing; ys: finite; colour: its class's number; faint: thin, behind others."""

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
    least, most = min(min(line.ys) for line in lines), max(max(line.ys) for line in lines)
    log = log and least > 0
    low_x, high_x = min(line.xs[0] for line in lines), max(line.xs[-1] for line in lines)
    scale = 1.0 if log else _scale(max(abs(least), abs(most)))
    low, high, ticks = _log_axis(least, most) if log else _axis(least * scale, most * scale)
    ticks = [tick for tick in (tick / scale for tick in ticks) if math.isfinite(tick)]

    def x_of(x: float) -> float:
        return _LEFT + _WIDTH * ((x - low_x) / (high_x - low_x) if high_x > low_x else 0.5)

    def y_of(y: float) -> float:
        return _TOP + _HEIGHT * (1 - ((math.log10(y) if log else y * scale) - low) / (high - low))

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
    for place in sorted({round(x_of(x)) for x in marks if low_x < x <= high_x}):  # one a pixel
        parts.append(f'<line class="mark" x1="{place}" x2="{place}" y1="{_TOP}" y2="{bottom}"/>')
    for line in sorted(lines, key=lambda line: not line.faint):
        places = [(x_of(x), y_of(y)) for x, y in zip(*_thinned(line.xs, line.ys), strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        kind = f"c{line.colour % COLOURS}" + (" faint" if line.faint else "")
        title = f"<title>{escape(line.name)}: {number(line.ys[-1])} at {x_unit} {line.xs[-1]:,.15g}</title>"
        parts.append(f'<g class="line {kind}">{title}<polyline points="{points}"/>')
        if len(places) <= 30 and not line.faint:
            for (x, y), value_x, value in zip(places, line.xs, line.ys, strict=True):
                shown = f"{escape(line.name)}, {x_unit} {value_x:,.15g}: {number(value)}"
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
    """Return the mean of each value and up to span - 1 before it; values: finite.

    Nothing is subtracted: after a spike a difference of running sums would lack what the spike's size has rounded off.
    """
    if not values:
        return []
    least, most = min(values), max(values)
    scale = min(1.0, _scale(max(abs(least), abs(most))))
    found: list[float] = []
    before: list[float] = []  # sums of the block of `span` before, from each place to its end
    for first in range(0, len(values), span):
        block = [value * scale for value in values[first : first + span]]
        for i, total in enumerate(accumulate(block)):
            total += before[i + 1] if i + 1 < len(before) else 0.0
            found.append(min(max(total / min(first + i + 1, span) / scale, least), most))
        before = [*accumulate(reversed(block))][::-1]
    return found


def number(value: float) -> str:
    """Return a number with about three digits that say something."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
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


def _scale(largest: float) -> float:
    """Return the power of two that numbers of this size are multiplied by to be counted with; mostly 1."""
    return 2.0**-100 if largest > _LARGE else 2.0**200 if 0 < largest < _SMALL else 1.0


def _log_axis(least: float, most: float) -> tuple[float, float, list[float]]:
    """Return the logarithms of a y axis' ends and what is written along it."""
    margin = math.log10(1.1)
    low, high = math.log10(least) - margin, math.log10(most) + margin
    powers = range(max(math.floor(low), -323), min(math.ceil(high), sys.float_info.max_10_exp) + 1)
    ticks = [t for p in powers for m in (1, 2, 5) if low <= math.log10(t := float(f"{m}e{p}")) <= high]
    if len(ticks) > 6:
        whole = [t for p in powers if low <= math.log10(t := float(f"1e{p}")) <= high]
        ticks = whole[:: math.ceil(len(whole) / 8)] if len(whole) > 1 else ticks[::3]
    if len(ticks) < 2:
        top = sys.float_info.max
        ticks = _ticks(min(10**low, least), min(most * 1.1, top), 4)
    return low, high, ticks


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Return the ends of a y axis and what is written along it."""
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
    rough = (high - low) / most
    if not rough > sys.float_info.min:
        return [high]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step)
    return [float(f"{i * step:.15g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]
