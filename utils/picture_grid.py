"""A labelled grid of pictures of any sizes, with Chinese and English labels."""

from collections.abc import Sequence
from functools import cache
from importlib import resources

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_MARGIN = 8  # pixels
_LABEL_SIZE = 13  # pixels


@cache
def label_font(size: int = _LABEL_SIZE) -> ImageFont.FreeTypeFont:
    """Return WenQuanYi Micro Hei (package `paperang-p2-fonts-cjk`), which draws both scripts."""
    font = resources.files("paperang_p2_fonts_cjk") / "fonts" / "wqy-microhei.ttc"
    with font.open("rb") as file:
        return ImageFont.truetype(file, size)


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int, max_lines: int = 3) -> list[str]:
    """Break `text` into lines of at most `width` pixels, at spaces where it has them; the last one ends in … if cut."""
    lines, line = [], ""
    for piece in text.replace(" ", " \0").split("\0") if " " in text else text:
        if line and font.getlength((line + piece).rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece
    lines.append(line.rstrip())
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], lines[max_lines - 1] + "…"]
    return lines


def labelled_grid(pictures: Sequence[np.ndarray], labels: Sequence[str], columns: int, scale: int = 1) -> np.ndarray:
    """Lay pictures out in rows, each with its label below.

    pictures: uint8 (H, W, 3), sizes may differ; labels: one each; scale: whole-number magnification.
    Returns uint8 (H, W, 3).
    """
    font = label_font()
    drawn = [Image.fromarray(p).resize((p.shape[1] * scale, p.shape[0] * scale), Image.NEAREST) for p in pictures]
    cell_width = max(max(p.width for p in drawn), 88)
    texts = [_wrap(label, font, cell_width) for label in labels]
    rows = [range(i, min(i + columns, len(drawn))) for i in range(0, len(drawn), columns)]
    line_height = _LABEL_SIZE + 3
    heights = [(max(drawn[i].height for i in row), max(len(texts[i]) for i in row) * line_height) for row in rows]
    width = min(columns, len(drawn)) * (cell_width + _MARGIN) + _MARGIN
    canvas = Image.new("RGB", (width, sum(a + b + _MARGIN for a, b in heights) + _MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    top = _MARGIN
    for row, (picture_height, text_height) in zip(rows, heights, strict=True):
        for column, i in enumerate(row):
            left = _MARGIN + column * (cell_width + _MARGIN)
            x = left + (cell_width - drawn[i].width) // 2
            canvas.paste(drawn[i], (x, top + (picture_height - drawn[i].height) // 2))
            for number, line in enumerate(texts[i]):
                draw.text((left + cell_width / 2, top + picture_height + 2 + number * line_height), line,
                          fill="#333333", font=font, anchor="ma")  # fmt: skip
        top += picture_height + text_height + _MARGIN
    return np.asarray(canvas)
