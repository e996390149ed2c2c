"""Pictures decode to what a viewer shows, and are never squashed."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageDraw

from data.images import decode_image, fit, fitted_size, kept_box, shown_size


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def quadrants() -> Image.Image:
    """Red, green / blue, white, 40 x 24 pixels."""
    image = Image.new("RGB", (40, 24), "white")
    draw = ImageDraw.Draw(image)
    for box, colour in (((0, 0, 19, 11), "red"), ((20, 0, 39, 11), "lime"), ((0, 12, 19, 23), "blue")):
        draw.rectangle(box, fill=colour)
    return image


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation, transpose", [
    (1, None), (2, Image.FLIP_LEFT_RIGHT), (3, Image.ROTATE_180), (4, Image.FLIP_TOP_BOTTOM), (5, Image.TRANSPOSE),
    (6, Image.ROTATE_270), (7, Image.TRANSVERSE), (8, Image.ROTATE_90),
])  # fmt: skip
def test_exif_orientation(kind, orientation, transpose):
    exif = Image.Exif()
    exif[0x0112] = orientation
    quality = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    data = encoded(quadrants(), kind, exif=exif, **quality)
    expected = quadrants() if transpose is None else quadrants().transpose(transpose)
    assert np.abs(np.asarray(decode_image(data), int) - np.asarray(expected, int)).max() <= (
        90 if kind == "JPEG" else 0
    )
    assert np.abs(np.asarray(decode_image(data), int) - np.asarray(expected, int)).mean() < 3
    assert shown_size(data) == (expected.height, expected.width)


def test_orientation_behind_the_pixels_of_a_png():
    plain, exif = encoded(quadrants(), "PNG"), Image.Exif()
    exif[0x0112] = 6
    content = b"eXIf" + exif.tobytes()[6:]  # without the "Exif\0\0" of JPEG
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    data = plain[:-12] + chunk + plain[-12:]  # the last 12 bytes are the IEND chunk
    assert np.array_equal(decode_image(data), quadrants().transpose(Image.ROTATE_270))
    assert shown_size(data) == (40, 24)


def test_sizes_come_from_the_header_alone():
    for kind in ("PNG", "JPEG", "GIF", "WEBP"):
        data = encoded(Image.effect_noise((300, 200), 50).convert("RGB"), kind)
        assert shown_size(data if kind == "WEBP" else data[: len(data) // 2]) == (200, 300)


def test_transparency_lies_over_white():
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    assert decode_image(encoded(image, "PNG")).getpixel((0, 0)) == pytest.approx((255, 127, 127), abs=1)
    clear = Image.new("LA", (8, 8), (0, 0))
    assert decode_image(encoded(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putpixel((3, 3), 1)
    decoded = decode_image(encoded(palette, "PNG", transparency=0))
    assert decoded.getpixel((0, 0)) == (255, 255, 255) and decoded.getpixel((3, 3)) == (10, 20, 30)


def test_cmyk_and_16_bit_and_grey():
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # red ink
    red = decode_image(encoded(cmyk, "JPEG", quality=95)).getpixel((8, 8))
    assert red[0] > 200 and max(red[1:]) < 60
    assert decode_image(encoded(cmyk, "TIFF")).getpixel((8, 8)) == (255, 0, 0)
    deep = Image.fromarray(np.full((8, 8), 0x8000, np.uint16))
    assert decode_image(encoded(deep, "PNG")).getpixel((0, 0)) == (128, 128, 128)
    assert decode_image(encoded(Image.new("L", (8, 8), 77), "PNG")).getpixel((0, 0)) == (77, 77, 77)


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(data).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("data", [
    b"", b"hello", encoded(quadrants(), "PNG")[:60], encoded(quadrants(), "JPEG")[:-300],
    encoded(quadrants(), "EPS"),  # a program for another interpreter
])  # fmt: skip
def test_damaged_files_are_refused(data):
    with pytest.raises(ValueError):
        decode_image(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_any_damage_gives_a_picture_or_a_clear_error(kind):
    rng, whole = random.Random(0), encoded(quadrants(), kind)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for read in (shown_size, decode_image):
            try:
                read(bytes(data))
            except ValueError:
                pass


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    with pytest.raises(ValueError):
        decode_image(encoded(quadrants(), "PNG"))


@pytest.mark.parametrize("height, width, max_pixels, expected", [
    (64, 64, 10**6, (64, 64)), (72, 100, 10**6, (64, 96)), (1080, 1920, 10**7, (1072, 1920)),
    (2000, 1000, 512 * 512, (720, 352)), (8, 40, 10**6, (16, 80)),
])  # fmt: skip
def test_fitted_sizes(height, width, max_pixels, expected):
    assert fitted_size(height, width, 16, max_pixels) == expected


@pytest.mark.parametrize("size", [(300, 300), (200, 420), (517, 331), (1000, 90)])
def test_a_circle_stays_a_circle(size):
    width, height = size
    image = Image.new("L", size, 0)
    radius = min(size) * 0.4
    box = (width / 2 - radius, height / 2 - radius, width / 2 + radius, height / 2 + radius)
    ImageDraw.Draw(image).ellipse(box, fill=255)
    target = fitted_size(height, width, 16, 128 * 128)
    fitted = np.asarray(fit(image.convert("RGB"), target))[..., 0] > 127
    assert fitted.shape == target
    rows, columns = fitted.any(1).sum(), fitted.any(0).sum()
    assert abs(int(rows) - int(columns)) <= 2


@pytest.mark.parametrize("size", [(300, 300), (200, 420), (517, 331), (1000, 90), (100, 70)])
def test_the_box_is_what_is_kept(size):
    """A picture of its own coordinates says, after it was fitted, where its middle and its edges come from."""
    width, height = size
    target = fitted_size(height, width, 16, 128 * 128)
    left, top, right, bottom = kept_box(height, width, target)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    for axis, (begin, end), side in ((1, (left, right), target[1]), (0, (top, bottom), target[0])):
        ramp = np.arange(size[1 - axis]) + 0.5
        own = np.broadcast_to(ramp if axis else ramp[:, None], (height, width)).astype(np.float32)
        seen = np.asarray(fit(Image.fromarray(own), target)).mean(axis=1 - axis)
        expected = begin + (np.arange(side) + 0.5) * (end - begin) / side
        inside = slice(side // 4, -(side // 4))  # at the picture's edges the filter sees one side alone
        assert np.abs(seen - expected)[inside].max() < 0.01 * (end - begin) / side + 1e-3


def test_cropping_alone_keeps_pixels():
    image = quadrants()
    assert np.array_equal(fit(image, (16, 32)), image.crop((4, 4, 36, 20)))
    assert fit(image, (24, 40)) is image
