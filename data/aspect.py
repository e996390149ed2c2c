"""Sizes at which pictures are stored: a table of areas and aspect ratios, and how a picture is placed into it.

A picture is scaled evenly until it just covers a size of its own shape, then cropped evenly from both sides.  It is
never squashed, and enlarged only if asked.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
from PIL import Image

from data.images import MULTIPLE

AREAS = (256, 640, 1328)  # an area is named by the side of its square, in pixels
RATIOS = ((1, 1), (2, 3), (3, 2), (3, 4), (4, 3), (9, 16), (16, 9), (1, 3), (3, 1))  # width : height
# (area, ratio): (height, width) where the released model was trained at another size than the rule gives.
_RELEASED = {(1328, (16, 9)): (928, 1664), (1328, (9, 16)): (1664, 928)}
_MAX_AREA = 8192  # beyond it listing the sizes takes minutes
_MIN_SHARE = 0.8  # of an area's pixels that a size of it has
_SLACK = 1e-9  # for ratios that are equal but for rounding


class TooSmallError(ValueError):
    """The picture would have to be enlarged."""


class TooExtremeError(ValueError):
    """No size is close enough to the picture's aspect ratio."""


@dataclass(frozen=True)
class Placement:
    """How a picture comes to its size; pixels, all sizes (height, width)."""

    area: int
    ratio: str  # "16:9", or "own" for a picture between the table's ratios
    size: tuple[int, int]  # what is kept, multiples of MULTIPLE
    scaled: tuple[int, int]  # the whole picture after scaling
    corner: tuple[int, int]  # (top, left) of what is kept in it
    enlargement: float  # scaled over original

    @property
    def cropped(self) -> float:
        """The share of the scaled picture's pixels that is cut off."""
        return 1 - math.prod(self.size) / math.prod(self.scaled)


def closest_size(area: int, ratio: float) -> tuple[int, int]:
    """Return the (height, width) of an area whose width / height is closest to `ratio`; of several the largest.

    Both sides are multiples of 16 pixels, and their product is 80 to 100 % of the area.
    """
    sizes, ratios = _sizes(area)
    height, width = sizes[np.abs(np.log(ratios / ratio)).argmin()].tolist()
    return height, width


@cache
def _sizes(area: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an area's sizes (K, 2) and their ratios (K,), of each ratio only the largest."""
    tokens = (area // MULTIPLE) ** 2
    largest: dict[Fraction, tuple[int, int]] = {}
    for height in range(1, tokens + 1):
        for width in range(math.ceil(_MIN_SHARE * tokens / height), tokens // height + 1):
            ratio = Fraction(width, height)
            largest[ratio] = max(largest.get(ratio, (0, 0)), (height * MULTIPLE, width * MULTIPLE))
    return np.array(list(largest.values())), np.array([float(ratio) for ratio in largest])


@cache
def table(area: int) -> dict[str, tuple[int, int]]:
    """Return {"width:height": (height, width) in pixels} of an area, by `closest_size` or as released.

    Raises: ValueError if the area is not a multiple of 16 up to _MAX_AREA.
    """
    if not MULTIPLE <= area <= _MAX_AREA or area % MULTIPLE:
        raise ValueError(
            f"an area is named by the side of its square, a multiple of {MULTIPLE} up to {_MAX_AREA} pixels; got {area}"
        )
    return {
        f"{w}:{h}": _RELEASED.get((area, (w, h))) or _oriented(area, w, h) for w, h in RATIOS
    }  # fmt: skip


def _oriented(area: int, width: int, height: int) -> tuple[int, int]:
    """Return the size for a ratio; that of an upright one is exactly the lying one's, turned."""
    short, long = closest_size(area, max(width, height) / min(width, height))
    return (short, long) if width >= height else (long, short)


def place(height: int, width: int, area: int, max_crop: float) -> Placement:
    """Place a picture of height x width pixels into an area: at the table's nearest ratio, else at its own.

    max_crop: the largest share of the picture that may be cut off.
    Raises: TooExtremeError if more would be cut off the picture at its own ratio, or off one beyond the table's ends.
    """
    ratio = width / height
    sizes = table(area)
    name = min(sizes, key=lambda n: (_cropped(ratio, sizes[n]), n))
    size = sizes[name]
    if _cropped(ratio, size) > max_crop + _SLACK:
        ratios = [w / h for h, w in sizes.values()]
        if not min(ratios) <= ratio <= max(ratios):
            raise TooExtremeError(
                f"{width} x {height} pixels are {_as_text(ratio)}; the table ends at {_as_text(max(ratios))}"
            )
        name, size = "own", closest_size(area, ratio)
        if (lost := _cropped(ratio, size)) > max_crop + _SLACK:
            raise TooExtremeError(
                f"of {width} x {height} pixels {100 * lost:.1f} % would be cut off, at most {100 * max_crop:g} % may be"
            )
    enlargement = max(size[0] / height, size[1] / width)
    scaled = max(size[0], round(height * enlargement)), max(size[1], round(width * enlargement))
    corner = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    return Placement(area, name, size, scaled, corner, enlargement)


def placements(
    height: int, width: int, areas: tuple[int, ...], max_crop: float, max_enlargement: float = 1.0
) -> list[Placement]:
    """Return the placements of a picture into all areas that it fills, the largest first.

    Raises: TooSmallError, TooExtremeError if there is none.
    """
    found, problem = [], None
    for area in sorted(set(areas), reverse=True):
        try:
            placement = place(height, width, area, max_crop)
        except TooExtremeError as error:
            problem = error
            continue
        if placement.enlargement <= max_enlargement + _SLACK:
            found.append(placement)
        else:
            problem = TooSmallError(
                f"{width} x {height} pixels would be enlarged {placement.enlargement:.2f} times for the area {area}²"
            )
    if not found:
        raise problem
    return found


def cut(image: Image.Image, placement: Placement) -> Image.Image:
    """Return the picture scaled and cropped as placed; one that is at its size already is returned as it is."""
    height, width = placement.scaled
    if (image.width, image.height) != (width, height):
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    if placement.scaled == placement.size:
        return image
    top, left = placement.corner
    return image.crop((left, top, left + placement.size[1], top + placement.size[0]))


def _cropped(ratio: float, size: tuple[int, int]) -> float:
    """Return the share of a picture that is lost when it is cropped to a size's ratio."""
    other = size[1] / size[0]
    return 1 - min(ratio / other, other / ratio)


def _as_text(ratio: float) -> str:
    return f"{ratio:.2f}:1" if ratio >= 1 else f"1:{1 / ratio:.2f}"
