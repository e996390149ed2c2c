"""Plans as one picture: a stacked bar of memory each, and the device's limit as a line."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from tools.plan_report import Report, mesh_name
from utils.picture_grid import label_font

# Colour-blind safe (Okabe and Ito), one for each kind of memory.
_COLOURS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "EMA": "#a6d96a",
    "gathered": "#f0e442",
    "activations": "#e69f00",
    "backward": "#d55e00",
    "batch": "#555555",
    "other": "#999999",
    "encoders": "#cc79a7",
}
_BAR, _GAP, _LEFT, _RIGHT, _TOP, _HEIGHT = 64, 34, 84, 190, 60, 360  # pixels
_SCALE = 2  # drawn larger, then reduced: smooth edges


def draw_plans(path: str | Path, reports: Sequence[Report], title: str) -> None:
    """Write a PNG with one bar a plan, all on the first one's device."""
    limit = reports[0].around.device.memory_gib
    reserve = reports[0].around.reserve_bytes / 2**30
    top = max(limit, *(sum(r.bars().values()) for r in reports)) * 1.08
    width, height = max(480, _LEFT + len(reports) * (_BAR + _GAP) + _RIGHT), _TOP + _HEIGHT + 118
    canvas = Image.new("RGB", (width * _SCALE, height * _SCALE), "white")
    draw = ImageDraw.Draw(canvas)

    def text(x: float, y: float, words: str, size: int = 13, anchor: str = "mm", colour: str = "#222222") -> None:
        draw.text((x * _SCALE, y * _SCALE), words, fill=colour, font=label_font(size * _SCALE), anchor=anchor)

    def box(x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
        draw.rectangle([round(v * _SCALE) for v in (x0, y0, x1, y1)], fill=colour)

    def y_of(gib: float) -> float:
        return _TOP + _HEIGHT * (1 - gib / top)

    text(_LEFT, 24, title, 16, "lm")
    right = _LEFT + len(reports) * (_BAR + _GAP) + 10
    step = next(s for s in (1, 2, 5, 10, 20, 50) if top / s <= 12)
    for gib in range(0, int(top) + 1, step):
        box(_LEFT - 4, y_of(gib), right, y_of(gib) + 0.5, "#dddddd")
        text(_LEFT - 10, y_of(gib), str(gib), 12, "rm", "#555555")
    text(_LEFT - 10, _TOP - 16, "GiB", 12, "rm", "#555555")
    for i, report in enumerate(reports):
        x, filled = _LEFT + _GAP / 2 + i * (_BAR + _GAP), 0.0
        bars = report.bars()
        for name, colour in _COLOURS.items():
            box(x, y_of(filled + bars[name]), x + _BAR, y_of(filled), colour)
            filled += bars[name]
        middle, s = x + _BAR / 2, report.settings
        text(middle, y_of(filled) - 10, f"{filled:.0f}", 13, colour="#222222" if report.fits else "#cc0000")
        labels = (
            mesh_name(s).replace(" ", ""),
            str(sum(s.attention_lens)),
            s.activation_checkpointing,
            "yes" if s.reshard_after_forward else "no",
        )
        for line, label in enumerate((*labels, f"{report.expected.mfu:.0%}")):
            text(middle, _TOP + _HEIGHT + 14 + 17 * line, label, 12)
    for line, label in enumerate(("mesh", "tokens", "recompute", "reshard", "MFU")):
        text(_LEFT - 10, _TOP + _HEIGHT + 14 + 17 * line, label, 12, "rm", "#555555")
    for gib, words, colour in ((limit, f"{limit:.0f} GiB device", "#cc0000"), (limit - reserve, "usable", "#777777")):
        box(_LEFT - 4, y_of(gib) - 0.75, right, y_of(gib) + 0.75, colour)
        text(right + 6, y_of(gib), words, 12, "lm", colour)
    for line, (name, colour) in enumerate(reversed(_COLOURS.items())):
        y = y_of(limit) + 44 + 22 * line
        box(right + 6, y - 7, right + 20, y + 7, colour)
        text(right + 28, y, name, 13, "lm")
    text(
        _LEFT,
        height - 12,
        "mesh: dp_replicate × dp_shard × cp × tp; one rank at its peak; expected MFU",
        11,
        "lm",
        "#555555",
    )
    canvas.resize((width, height), Image.LANCZOS).save(path, optimize=True)
