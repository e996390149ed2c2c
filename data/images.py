"""Picture files to RGB as a viewer shows them, and to sizes that the model can take."""

import io

from PIL import Image, ImageOps

MULTIPLE = 16  # pixels a side of one image token: the VAE's factor of 8 times the patch of 2
Image.MAX_IMAGE_PIXELS = 100_000_000  # at twice as many Pillow refuses the file as a decompression bomb
# No vector format: Pillow would start other programs for those.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_ORIENTATION = 0x0112
_PNG_ORIENTATION_MARKS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # on damaged bytes Pillow's plug-ins raise anything from struct.error to KeyError
        raise ValueError(f"not a readable picture: {error}") from error


def shown_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) as shown, that is after the EXIF orientation, from the header alone.

    Raises: ValueError if it is no picture that `decode_image` takes.
    """
    image = _open(data)
    # Of a TIFF Pillow gives the size as shown.  It decodes a whole PNG to look for an orientation behind the pixels.
    unmarked = image.format == "PNG" and not any(mark in data for mark in _PNG_ORIENTATION_MARKS)
    if unmarked or image.format == "TIFF":
        return image.height, image.width
    try:
        sideways = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    except Exception as error:  # as above
        raise ValueError(f"not a readable picture: {error}") from error
    return (image.width, image.height) if sideways else (image.height, image.width)


def decode_image(data: bytes) -> Image.Image:
    """Decode to RGB: EXIF orientation applied, transparency over white, first frame, any mode that Pillow reads.

    Raises: ValueError for a truncated, damaged or unknown file and for a decompression bomb.
    """
    image = _open(data)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion clips at 255
            image = image.point(lambda value: value / 256).convert("L")
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")
    except Exception as error:  # as above
        raise ValueError(f"the picture cannot be decoded: {error}") from error


def fitted_size(height: int, width: int, multiple: int, max_pixels: int) -> tuple[int, int]:
    """Return the (height, width) at which a picture is trained: multiples of `multiple`, at most `max_pixels`.

    Scaled down if it is too large, aspect kept; then each side loses less than `multiple` pixels.  A picture with a
    side under `multiple` is scaled up to it, whatever area that gives.
    """
    scale = min(1.0, (max_pixels / (height * width)) ** 0.5)
    scale = max(scale, multiple / min(height, width))
    height, width = (max(multiple, int(side * scale + 1e-6) // multiple * multiple) for side in (height, width))
    return height, width


def fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale a picture to cover `size` = (height, width), aspect kept, and crop the rest evenly from both sides."""
    height, width = size
    if (image.height, image.width) == size:
        return image
    # A picture that is only cropped keeps its pixels.
    if not (0 <= image.height - height < MULTIPLE and 0 <= image.width - width < MULTIPLE):
        scale = max(height / image.height, width / image.width)
        scaled = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
        image = image.resize(scaled, Image.Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
