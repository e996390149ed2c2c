"""The size at which a reference picture is shown to an encoder."""

import math

SIDE_MULTIPLE = 32  # pixels
Size = tuple[int, int]  # height, width


def clipped_area_size(height: int, width: int, area: int) -> Size:
    """Return what `area_size` does; of a picture that is too thin for the area the thinnest size that is not."""
    longest = area / SIDE_MULTIPLE**2
    ratio = min(max(width / height, 1 / longest), longest)
    return tuple(max(side, SIDE_MULTIPLE) for side in _rounded(area, ratio))


def area_size(height: int, width: int, area: int) -> Size:
    """Return the (height, width) of about `area` pixels with the picture's ratio, both multiples of 32.

    Rounding may change the ratio: the picture is scaled to this size, not cropped, as in inference.
    Source: `diffusers` calculate_dimensions of the edit pipelines.
    Raises: ValueError if a side would be less than 32 pixels.
    """
    size = _rounded(area, width / height)
    if not min(size):
        raise ValueError(f"a reference of {height} x {width} pixels is too thin for an area of {area}")
    return size


def _rounded(area: int, ratio: float) -> Size:
    exact_width = math.sqrt(area * ratio)
    return tuple(round(side / SIDE_MULTIPLE) * SIDE_MULTIPLE for side in (exact_width / ratio, exact_width))
