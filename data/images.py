"""Picture files to RGB as a viewer shows them, and to sizes that the model can take."""

import io

from PIL import Image, ImageOps

Image.MAX_IMAGE_PIXELS = 200_000_000  # beyond it Pillow warns of, and at twice it refuses, a decompression bomb


def open_image(data: bytes) -> Image.Image:
    """Open a picture without decoding its pixels.  Raises: ValueError if it is none that Pillow reads."""
    try:
        return Image.open(io.BytesIO(data))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"not a readable picture: {error}") from error


def shown_size(image: Image.Image) -> tuple[int, int]:
    """Return (height, width) after the EXIF orientation is applied."""
    sideways = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    return (image.width, image.height) if sideways else (image.height, image.width)


def decode_image(data: bytes) -> Image.Image:
    """Decode to RGB: EXIF orientation applied, transparency over white, any mode that Pillow reads.

    Raises: ValueError for a truncated, damaged or unknown file and for a decompression bomb.
    """
    image = open_image(data)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode in ("I;16", "I;16B", "I;16L", "I"):
            image = image.point(lambda value: value / 256).convert("L")  # 16-bit grey
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"the picture cannot be decoded: {error}") from error


def fitted_size(height: int, width: int, multiple: int, max_pixels: int) -> tuple[int, int]:
    """Return the (height, width) at which a picture is trained: multiples of `multiple`, at most `max_pixels`.

    Scaled down if it is too large, aspect kept; then each side loses less than `multiple` pixels.  A picture with a
    side under `multiple` is scaled up to it.
    """
    scale = min(1.0, (max_pixels / (height * width)) ** 0.5)
    scale = max(scale, multiple / min(height, width))
    sides = (max(multiple, int(side * scale + 1e-6) // multiple * multiple) for side in (height, width))
    height, width = sides
    return height, width


def fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale a picture to cover `size` = (height, width), aspect kept, and crop the rest evenly from both sides."""
    height, width = size
    if (image.height, image.width) == size:
        return image
    # A picture that is only cropped keeps its pixels.
    if not (0 <= image.height - height < 16 and 0 <= image.width - width < 16):
        scale = max(height / image.height, width / image.width)
        scaled = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
        image = image.resize(scaled, Image.Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
