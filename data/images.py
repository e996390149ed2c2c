"""Picture files to RGB as a viewer shows them, and to sizes that the model can take."""

import io
import warnings

from PIL import Image

from data.colour import WHITE, to_srgb

MULTIPLE = 16  # pixels a side of one image token: the VAE's factor of 8 times the patch of 2
MAX_FILE_PIXELS = 100_000_000  # of a file; more is taken as a decompression bomb
Image.MAX_IMAGE_PIXELS = MAX_FILE_PIXELS  # at twice as many Pillow refuses the file before we see its size
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # between the two, we refuse it
# No vector format: Pillow would start other programs for those.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_SIDEWAYS = (5, 6, 7, 8)
_PNG_ORIENTATION_MARKS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
_PNG_DEPTH_BYTE = 24
# What else lies under a picture's name: how it starts, after white space, → what to call it.
_OTHER_KINDS = (
    (b"<svg", "an SVG drawing"), (b"<?xml", "XML"), (b"<!doctype html", "a web page"), (b"<html", "a web page"),
    (b"%!ps", "a PostScript drawing"), (b"\xc5\xd0\xd3\xc6", "an EPS drawing"), (b"%pdf", "a PDF document"),
    (b"8bps", "a Photoshop file"), (b"\0\0\0\x0cjp  ", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cjxl ", "JPEG XL"), (b"\xff\x0a", "JPEG XL"), (b"\0\0\1\0", "an icon"), (b"qoif", "QOI"),
    (b"pk\3\4", "a zip archive"), (b"\x1f\x8b", "a gzip file"), (b"version https://git-lfs", "a Git LFS pointer"),
)  # fmt: skip


def _open(data: bytes) -> Image.Image:
    """Read the header.  Raises: ValueError with the reason if the file is not taken."""
    if not data:
        raise ValueError("the file is empty")
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.UnidentifiedImageError as error:
        raise ValueError(f"not a readable picture: {_kind(data)}; PNG, JPEG, WebP, GIF, BMP and TIFF are") from error
    except Exception as error:  # on damaged bytes Pillow's plug-ins raise anything from struct.error to KeyError
        raise ValueError(f"not a readable picture: {error}") from error
    if image.width * image.height > MAX_FILE_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels are too many; a file may have {MAX_FILE_PIXELS}")
    return image


def _kind(data: bytes) -> str:
    """Name what a file of no known picture format is."""
    start = data[:64].removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").lower()
    for mark, name in _OTHER_KINDS:
        if start.startswith(mark):
            return f"it is {name}"
    if data[4:8] == b"ftyp":
        return f"it is AVIF, HEIC or a film ({data[8:12].decode('ascii', 'replace')})"
    if start.startswith((b"\x89png", b"\xff\xd8", b"riff", b"gif8", b"bm", b"ii", b"mm")):
        return "its header is damaged"
    return "it is text" if data[:512].isascii() and b"\0" not in data[:512] else "its format is unknown"


def _orientation(image: Image.Image) -> int:
    """Return the EXIF (or XMP) orientation, 1 to 8; of damaged metadata 1, as shown by a viewer."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # as in _open
        return 1
    return orientation if orientation in _TRANSPOSE else 1


def shown_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) as shown, that is after the EXIF orientation, from the header alone.

    Raises: ValueError if it is no picture that `decode_image` takes.
    """
    image = _open(data)
    # Of a TIFF Pillow gives the size as shown.  It decodes a whole PNG to look for an orientation behind the pixels.
    unmarked = image.format == "PNG" and not any(mark in data for mark in _PNG_ORIENTATION_MARKS)
    if unmarked or image.format == "TIFF":
        return image.height, image.width
    return (image.width, image.height) if _orientation(image) in _SIDEWAYS else (image.height, image.width)


def upright(image: Image.Image) -> Image.Image:
    """Return an opened picture as a viewer shows it, with its EXIF orientation applied."""
    # Pillow has turned a TIFF already.
    transpose = None if image.format == "TIFF" else _TRANSPOSE.get(_orientation(image))
    return image if transpose is None else image.transpose(transpose)


def has_transparency(data: bytes) -> bool:
    """Return whether a picture may be transparent somewhere, from the header.  Raises: ValueError as `shown_size`."""
    return _open(data).has_transparency_data


def decode_image(data: bytes, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Decode to sRGB: EXIF orientation applied, transparency over `background`, of an animation the first frame.

    An APNG's first frame is the one that viewers of still pictures show.  How colours are converted: data/colour.py.
    Raises: ValueError with the reason for an empty, truncated, damaged or unknown file and for a decompression bomb.
    """
    image = _open(data)
    try:
        if image.format == "PNG":
            _scale_transparent_colour(image, data[_PNG_DEPTH_BYTE])
        image.load()
        # Pillow has turned a TIFF already.
        transpose = None if image.format == "TIFF" else _TRANSPOSE.get(_orientation(image))
        rgb = to_srgb(image, background)
        return rgb if transpose is None else rgb.transpose(transpose)
    except Exception as error:  # as in _open
        raise ValueError(f"the picture cannot be decoded: {error}") from error


def _scale_transparent_colour(image: Image.Image, depth: int) -> None:
    """Scale a PNG's transparent colour as Pillow scales its pixels, which it forgets for 2, 4 and 16 bits."""
    if (colour := image.info.get("transparency")) is None:
        return
    if image.mode == "L" and depth < 8:
        image.info["transparency"] = colour * 255 // ((1 << depth) - 1)
    elif image.mode == "RGB" and depth == 16:
        image.info["transparency"] = tuple(value >> 8 for value in colour)


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
    scaled, (top, left) = _placed(image.height, image.width, size)
    if scaled != (image.height, image.width):
        image = image.resize((scaled[1], scaled[0]), Image.Resampling.LANCZOS)
    return image.crop((left, top, left + width, top + height))


def kept_box(height: int, width: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return what `fit` to `size` keeps of a picture: (left, top, right, bottom) in the picture's own pixels."""
    scaled, (top, left) = _placed(height, width, size)
    down, across = height / scaled[0], width / scaled[1]
    right, bottom = min(width, (left + size[1]) * across), min(height, (top + size[0]) * down)  # rounding adds a little
    return left * across, top * down, right, bottom


def _placed(height: int, width: int, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (height, width) to which a picture is scaled, and the (top, left) of what is kept of that."""
    scaled = height, width
    # A picture that is only cropped keeps its pixels.
    if not (0 <= height - size[0] < MULTIPLE and 0 <= width - size[1] < MULTIPLE):
        scale = max(size[0] / height, size[1] / width)
        scaled = max(size[0], round(height * scale)), max(size[1], round(width * scale))
    return scaled, ((scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2)
