"""The size at which a reference picture is shown to an encoder."""

import math

SIDE_MULTIPLE = 32  # pixels
Size = tuple[int, int]  # height, width


def area_size(height: int, width: int, area: int) -> Size:
    """Return the (height, width) of about `area` pixels with the picture's ratio, both multiples of 32.

    Rounding may change the ratio: the picture is scaled to this size, not cropped, as in inference.
    Source: `diffusers` calculate_dimensions of the edit pipelines.
    Raises: ValueError if a side would be less than 32 pixels.
    """
    ratio = width / height
    exact_width = math.sqrt(area * ratio)
    size = tuple(round(side / SIDE_MULTIPLE) * SIDE_MULTIPLE for side in (exact_width / ratio, exact_width))
    if not min(size):
        raise ValueError(f"a reference of {height} x {width} pixels is too thin for an area of {area}")
    return size
