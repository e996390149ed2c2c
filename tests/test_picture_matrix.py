"""Every kind of picture file that collections hold: it shows what was put into it, at the size that the index says.

The right values come from the pixels that a file was made of, or from the formulas of the standards, never from Pillow.
"""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from data.images import decode_image, shown_size
from tests.picture_files import (
    DISPLAY_P3,
    bmp_565,
    chunk,
    cmyk_profile,
    encoded,
    gif_of_a_part,
    grey_profile,
    png,
    rgb_profile,
    srgb_of_lab,
    srgb_of_linear,
    srgb_of_profile,
    tiff,
)

HEIGHT, WIDTH = 24, 40
WHITE = np.array([255, 255, 255])


def parts(*values) -> np.ndarray:
    """Return (HEIGHT, WIDTH, ...) in four flat parts: top left, top right, bottom left, bottom right."""
    a, b, c, d = (np.broadcast_to(np.array(v), (HEIGHT // 2, WIDTH // 2, *np.shape(v))) for v in values)
    return np.concatenate([np.concatenate([a, b], 1), np.concatenate([c, d], 1)])


def over_white(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Return colours (H, W, 3) with alpha (H, W) in [0, 1] over white, 8 bits."""
    return np.round(rgb * alpha[..., None] + 255 * (1 - alpha[..., None]))


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(np.asarray(values)[..., None], 3, -1)


RGB = parts((200, 30, 40), (20, 180, 60), (10, 20, 220), (250, 240, 20)).astype(np.uint8)
ALPHA = parts(0, 64, 200, 255).astype(np.uint8)
GREY = parts(0, 77, 150, 255).astype(np.uint8)
DEEP = parts(0, 0x4D12, 0x96FE, 0xFFFF).astype(np.uint16)  # 16 bits
DEEP_RGB = (RGB.astype(np.uint16) << 8) + 37
INDEX = parts(0, 1, 2, 3).astype(np.uint8)
COLOURS = np.stack([RGB[0, 0], RGB[0, -1], RGB[-1, 0], RGB[-1, -1]])
INKS = parts((255, 0, 0, 0), (0, 128, 0, 0), (0, 0, 200, 51), (100, 50, 25, 127)).astype(np.uint8)
NAIVE = np.round(
    (255.0 - INKS[..., :3]) * (255.0 - INKS[..., 3:]) / 255
)  # each ink lets through what it does not cover
PALETTE = chunk(b"PLTE", COLOURS.tobytes())
P3 = rgb_profile(DISPLAY_P3, 2.2)
P3_RGB = srgb_of_profile(RGB, DISPLAY_P3, round(2.2 * 256) / 256)
LINEAR = np.round(255 * (np.arange(256) / 255) ** (1 / 2.2))[RGB]  # what gAMA 1 means on a screen of gamma 2.2
LAB = np.random.default_rng(1).uniform((20, -30, -30), (90, 30, 30), (2, 2, 2, 2, 3)).round()
LAB[0, 0, 0, 0], LAB[1, 1, 1, 1] = (100, 0, 0), 0  # paper is white and all inks black: nothing is left to adapt
CORNERS = parts((0, 0, 0, 0), (255, 0, 0, 0), (0, 255, 255, 0), (255, 255, 255, 255)).astype(np.uint8)
CORNER_LAB = np.round(LAB[tuple(np.moveaxis(CORNERS // 255, -1, 0))] * (2.55, 1, 1)) / (2.55, 1, 1)


def image(array: np.ndarray, mode: str | None = None) -> Image.Image:
    made = Image.fromarray(np.ascontiguousarray(array), mode) if mode == "CMYK" else Image.fromarray(array)
    return made if mode in (None, "CMYK") else made.convert(mode)


def palette_image() -> Image.Image:
    made = Image.fromarray(INDEX).convert("L")
    made.putpalette(COLOURS.tobytes())
    return made


def jpeg(picture: Image.Image, **options) -> bytes:
    return encoded(picture, "JPEG", **{"quality": 100, "subsampling": 0, **options})


def ycck() -> tuple[bytes, np.ndarray]:
    """Return a JPEG whose four components are to be read as Y, Cb, Cr and K, and what it shows.

    Stored as CMYK without a transform, as Adobe does, inverted; then its Adobe marker is made to say YCCK.
    """
    stored = parts((200, 90, 170, 255), (120, 128, 128, 200), (80, 150, 100, 255), (30, 128, 128, 90)).astype(int)
    data = bytearray(jpeg(image(255 - stored.astype(np.uint8), "CMYK")))
    at = data.index(b"Adobe")
    assert data[at + 11] in (0, 2)
    data[at + 11] = 2
    y, cb, cr, k = np.moveaxis(stored, -1, 0)
    cb, cr = cb - 128, cr - 128
    rgb = np.clip(np.stack([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb], -1), 0, 255)
    # YCCK → CMY inverts, Adobe's inversion inverts again: what is stored is (255 - ink) for all four.
    return bytes(data), np.round((255 - rgb) * k[..., None] / 255)


def with_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def animation(kind: str, **options) -> bytes:
    second = Image.new("RGB", (WIDTH, HEIGHT), "black")
    return encoded(image(RGB), kind, save_all=True, append_images=[second], duration=100, **options)


def turned(pixels: np.ndarray) -> np.ndarray:
    """Return what orientation 6 shows: a quarter turn clockwise."""
    return np.rot90(pixels, -1)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
KEY_16 = struct.pack(">H", 0x96FE)
PART = over_white(np.full((8, 8, 3), (200, 0, 0)), np.pad(np.ones((4, 4)), ((2, 2), (3, 1))))
_565 = tuple(parts(*values) for values in ((31, 0, 0, 16), (0, 63, 0, 32), (0, 0, 31, 8)))
SHOWN_565 = np.stack([v * 255 // top for v, top in zip(_565, (31, 63, 31), strict=True)], -1)
TRUE, PALE, DARK = 2, 3, 0  # PNG colour types: RGB, palette, grey; 4 and 6 add alpha

# name: (file, what it shows (H, W, 3), how far off a value may be)
CASES = {
    "png rgb": (png(RGB, 2), RGB, 0),
    "png rgb from Pillow": (encoded(image(RGB), "PNG"), RGB, 0),
    "png rgb 16": (png(DEEP_RGB, 2, 16), RGB, 0),
    "png rgb, one colour transparent": (
        png(RGB, 2, before=chunk(b"tRNS", struct.pack(">3H", *RGB[0, 0]))),
        over_white(RGB, parts(0, 1, 1, 1)), 0,
    ),
    "png rgb 16, one colour transparent": (
        png(DEEP_RGB, 2, 16, before=chunk(b"tRNS", struct.pack(">3H", *DEEP_RGB[0, 0]))),
        over_white(RGB, parts(0, 1, 1, 1)), 0,
    ),
    "png rgba": (png(np.dstack([RGB, ALPHA]), 6), over_white(RGB, ALPHA / 255), 1),
    "png rgba 16": (png(np.dstack([DEEP_RGB, ALPHA.astype(int) * 257]), 6, 16), over_white(RGB, ALPHA / 255), 1),
    "png grey": (png(GREY, 0), grey(GREY), 0),
    "png grey 1": (png(parts(0, 1, 1, 0), 0, 1), grey(parts(0, 255, 255, 0)), 0),
    "png grey 2": (png(INDEX, 0, 2), grey(INDEX * 85), 0),
    "png grey 4": (png(INDEX * 5, 0, 4), grey(INDEX * 85), 0),
    "png grey 16": (png(DEEP, 0, 16), grey(DEEP >> 8), 0),
    "png grey 1, black transparent": (
        png(parts(0, 1, 1, 0), 0, 1, chunk(b"tRNS", b"\0\0")), grey(parts(255, 255, 255, 255)), 0,
    ),
    "png grey 2, one value transparent": (
        png(INDEX, 0, 2, chunk(b"tRNS", b"\0\2")), grey(parts(0, 85, 255, 255)), 0,
    ),
    "png grey 16, one value transparent": (
        png(DEEP, 0, 16, chunk(b"tRNS", KEY_16)), grey(parts(0, 0x4D, 255, 255)), 0,
    ),
    "png grey and alpha": (png(np.dstack([GREY, ALPHA]), 4), over_white(grey(GREY), ALPHA / 255), 1),
    "png grey and alpha 16": (
        png(np.dstack([DEEP, ALPHA.astype(int) * 257]), 4, 16), over_white(grey(DEEP >> 8), ALPHA / 255), 1,
    ),
    "png palette": (png(INDEX, 3, before=PALETTE), RGB, 0),
    "png palette 2": (png(INDEX, 3, 2, PALETTE), RGB, 0),
    "png palette 4": (png(INDEX, 3, 4, PALETTE), RGB, 0),
    "png palette, one entry clear": (
        png(INDEX, 3, before=PALETTE + chunk(b"tRNS", b"\xff\xff\0")), over_white(RGB, parts(1, 1, 0, 1)), 0,
    ),
    "png palette, an alpha for each entry": (
        png(INDEX, 3, before=PALETTE + chunk(b"tRNS", bytes([0, 64, 200, 255]))), over_white(RGB, ALPHA / 255), 1,
    ),
    "png gamma 1": (png(RGB, 2, before=chunk(b"gAMA", struct.pack(">I", 100_000))), LINEAR, 1),
    "png gamma 1/2.2": (png(RGB, 2, before=chunk(b"gAMA", struct.pack(">I", 45_455))), RGB, 0),
    "png gamma 1 overruled by sRGB": (
        png(RGB, 2, before=chunk(b"sRGB", b"\0") + chunk(b"gAMA", struct.pack(">I", 100_000))), RGB, 0,
    ),
    "png profile": (encoded(image(RGB), "PNG", icc_profile=P3), P3_RGB, 1),
    "png profile and alpha": (
        encoded(image(np.dstack([RGB, ALPHA])), "PNG", icc_profile=P3), over_white(P3_RGB, ALPHA / 255), 2,
    ),
    "png palette and profile": (encoded(palette_image(), "PNG", icc_profile=P3), P3_RGB, 1),
    "png grey profile": (
        encoded(image(GREY), "PNG", icc_profile=grey_profile(1.0)), grey(srgb_of_linear(GREY / 255)), 1,
    ),
    "png grey 16 with a profile": (
        png(DEEP, 0, 16, chunk(b"iCCP", b"x\0\0" + zlib.compress(grey_profile(1.0)))),
        grey(srgb_of_linear((DEEP >> 8) / 255)), 1,
    ),
    "png xmp orientation": (
        png(RGB, 2, before=chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)), turned(RGB), 0,
    ),
    "apng": (animation("PNG"), RGB, 0),
    "jpeg": (jpeg(image(RGB)), RGB, 3),
    "jpeg progressive": (jpeg(image(RGB), progressive=True), RGB, 3),
    "jpeg grey": (jpeg(image(GREY)), grey(GREY), 2),
    "jpeg rgb, not ycc": (jpeg(image(RGB), keep_rgb=True), RGB, 2),
    "jpeg adobe cmyk, inverted": (jpeg(image(INKS, "CMYK")), NAIVE, 3),
    "jpeg ycck": (*ycck(), 4),
    "jpeg profile": (jpeg(image(RGB), icc_profile=P3), P3_RGB, 4),
    "jpeg profile in two segments": (jpeg(image(RGB), icc_profile=rgb_profile(DISPLAY_P3, 2.2, 80_000)), P3_RGB, 4),
    "jpeg cmyk profile": (
        jpeg(image(CORNERS, "CMYK"), icc_profile=cmyk_profile(LAB)), srgb_of_lab(CORNER_LAB), 6,
    ),
    "jpeg damaged profile": (jpeg(image(RGB), icc_profile=P3[:200]), RGB, 3),
    "jpeg profile for other channels": (jpeg(image(RGB), icc_profile=grey_profile(1.0)), RGB, 3),
    "jpeg exif": (jpeg(image(RGB), exif=with_exif(6)), turned(RGB), 3),
    "jpeg exif of no meaning": (jpeg(image(RGB), exif=with_exif(9)), RGB, 3),
    "jpeg damaged exif": (jpeg(image(RGB), exif=b"Exif\0\0II*\0\xff\xff\xff\x7f"), RGB, 3),
    "jpeg of a camera, with a preview behind": (
        encoded(image(RGB), "MPO", save_all=True, append_images=[image(GREY)], quality=100, subsampling=0), RGB, 3,
    ),
    "gif": (encoded(palette_image(), "GIF"), RGB, 0),
    "gif interlaced": (encoded(palette_image(), "GIF", interlace=1), RGB, 0),
    "gif transparent": (encoded(palette_image(), "GIF", transparency=2), over_white(RGB, parts(1, 1, 0, 1)), 0),
    "gif animation": (animation("GIF"), RGB, 0),
    "gif smaller than its canvas": (gif_of_a_part((8, 8), (3, 2, 4, 4), transparent=False), PART, 0),
    "gif smaller than its canvas, transparent": (gif_of_a_part((8, 8), (3, 2, 4, 4), transparent=True), PART, 0),
    "webp lossless": (encoded(image(RGB), "WEBP", lossless=True), RGB, 0),
    "webp": (encoded(Image.new("RGB", (WIDTH, HEIGHT), (90, 120, 150)), "WEBP", quality=100), (90, 120, 150), 3),
    "webp alpha": (
        encoded(image(np.dstack([RGB, ALPHA])), "WEBP", lossless=True, exact=True), over_white(RGB, ALPHA / 255), 1,
    ),
    "webp animation": (animation("WEBP", lossless=True), RGB, 0),
    "webp profile": (encoded(image(RGB), "WEBP", lossless=True, icc_profile=P3), P3_RGB, 1),
    "webp exif": (encoded(image(RGB), "WEBP", lossless=True, exif=with_exif(6)), turned(RGB), 0),
    "bmp": (encoded(image(RGB), "BMP"), RGB, 0),
    "bmp palette": (encoded(palette_image(), "BMP"), RGB, 0),
    "bmp 1": (encoded(image(grey(parts(0, 255, 255, 0)).astype(np.uint8), "1"), "BMP"), grey(parts(0, 255, 255, 0)), 0),
    "bmp 5-6-5": (bmp_565(*_565), SHOWN_565, 1),
    "tiff": (encoded(image(RGB), "TIFF"), RGB, 0),
    "tiff lzw": (encoded(image(RGB), "TIFF", compression="tiff_lzw"), RGB, 0),
    "tiff deflate": (encoded(image(RGB), "TIFF", compression="tiff_adobe_deflate"), RGB, 0),
    "tiff jpeg": (encoded(Image.new("RGB", (WIDTH, HEIGHT), "gray"), "TIFF", compression="jpeg"), (128, 128, 128), 3),
    "tiff fax": (
        encoded(image(grey(parts(0, 255, 255, 0)).astype(np.uint8), "1"), "TIFF", compression="group4"),
        grey(parts(0, 255, 255, 0)), 0,
    ),
    "tiff grey 16": (tiff(DEEP, 1, 16), grey(DEEP >> 8), 0),
    "tiff grey 16, big-endian": (tiff(DEEP, 1, 16, ">"), grey(DEEP >> 8), 0),
    "tiff grey 16, white is 0": (tiff(DEEP, 0, 16), grey((65535 - DEEP) >> 8), 0),
    "tiff grey 8, white is 0": (tiff(GREY, 0, 8), grey(255 - GREY), 0),
    "tiff rgb 16": (tiff(DEEP_RGB, 2, 16), RGB, 0),
    "tiff rgb 16, big-endian": (tiff(DEEP_RGB, 2, 16, ">"), RGB, 0),
    "tiff rgba": (tiff(np.dstack([RGB, ALPHA]), 2, 8, tags={338: 2}), over_white(RGB, ALPHA / 255), 1),
    "tiff rgba, colours times alpha": (
        tiff(np.dstack([np.round(RGB * (ALPHA[..., None] / 255)), ALPHA]), 2, 8, tags={338: 1}),
        over_white(RGB, ALPHA / 255), 3,
    ),
    "tiff grey and alpha": (
        tiff(np.dstack([GREY, ALPHA]), 1, 8, tags={338: 2}), over_white(grey(GREY), ALPHA / 255), 1,
    ),
    "tiff cmyk": (tiff(INKS, 5, 8), NAIVE, 1),
    "tiff lab": (
        tiff((parts((60, 20, 30), (70, 236, 20), (40, 10, 236), (90, 0, 0)) * (2.55, 1, 1)).round(), 8, 8),
        srgb_of_lab(parts((60, 20, 30), (70, -20, 20), (40, 10, -20), (90, 0, 0)).astype(float)), 4,
    ),
    "tiff exif": (encoded(image(RGB), "TIFF", exif=with_exif(6)), turned(RGB), 0),
    "tiff of two pages": (
        encoded(image(RGB), "TIFF", save_all=True, append_images=[image(GREY)]), RGB, 0,
    ),
    "tiff profile": (encoded(image(RGB), "TIFF", icc_profile=P3), P3_RGB, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_shows_what_was_put_into_it(name):
    data, expected, off = CASES[name]
    decoded = decode_image(data)
    assert decoded.mode == "RGB" and shown_size(data) == (decoded.height, decoded.width)
    # Flat parts: only the two pixels beside an edge may ring in a lossy format.
    pixels = np.asarray(decoded, int)
    expected = np.broadcast_to(expected, (pixels.shape if np.ndim(expected) == 1 else np.shape(expected)))
    assert pixels.shape == expected.shape
    assert np.abs(pixels - expected)[2:-2, 2:-2].max() <= off, (pixels[3, 3], expected[3, 3], pixels[-4, -4])


def test_the_matrix_is_large_enough():
    assert len(CASES) >= 40
    with Image.open(io.BytesIO(CASES["jpeg ycck"][0])) as opened:
        assert opened.mode == "CMYK" and opened.info["adobe_transform"] == 2
    with Image.open(io.BytesIO(CASES["jpeg of a camera, with a preview behind"][0])) as opened:
        assert opened.format == "MPO" and opened.n_frames == 2


@pytest.mark.parametrize("background", [(0, 0, 0), (10, 200, 30)])
def test_another_background(background):
    shown = np.asarray(decode_image(CASES["png rgba"][0], background), int)
    alpha = ALPHA[..., None] / 255
    assert np.abs(shown - np.round(RGB * alpha + np.array(background) * (1 - alpha))).max() <= 1


def test_a_profile_that_is_srgb_costs_no_value():
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.array_equal(decode_image(encoded(image(RGB), "PNG", icc_profile=srgb)), RGB)


def claiming(width: int, height: int) -> bytes:
    """Return a sound PNG of one pixel whose header claims another size."""
    header, content = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0), png(np.zeros((1, 1), np.uint8), 0)
    return content.replace(chunk(b"IHDR", header), chunk(b"IHDR", struct.pack(">II", width, height) + header[8:]))


# name: (file, a word of the reason)
REFUSED = {
    "nothing": (b"", "empty"),
    "text": (b"a photo of a dog\n", "text"),
    "web page": (b"\n<!DOCTYPE html><html>404</html>", "web page"),
    "svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "XML"),
    "svg without a head": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    "eps": (encoded(image(RGB), "EPS"), "PostScript"),
    "pdf": (b"%PDF-1.7\n", "PDF"),
    "avif": (encoded(image(RGB), "AVIF"), "AVIF"),
    "jpeg 2000": (encoded(image(RGB), "JPEG2000"), "JPEG 2000"),
    "photoshop": (b"8BPS\0\1" + b"\0" * 40, "Photoshop"),
    "icon": (encoded(image(RGB), "ICO"), "icon"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
    "unknown": (bytes(range(128, 256)), "unknown"),
    "png cut": (CASES["png rgb"][0][:-40], "truncated"),
    "jpeg cut": (encoded(Image.effect_noise((200, 200), 90), "JPEG")[:3000], "truncated"),
    "jpeg without its end mark": (jpeg(image(RGB))[:-2], "truncated"),
    "gif cut": (encoded(Image.effect_noise((200, 200), 90), "GIF")[:3000], "truncated"),
    "webp cut": (encoded(Image.effect_noise((200, 200), 90).convert("RGB"), "WEBP")[:3000], ""),
    "bmp cut": (CASES["bmp"][0][:300], "truncated"),
    "tiff cut": (encoded(image(RGB), "TIFF")[:300], ""),
    "png flipped": (CASES["png rgb"][0].replace(b"IDAT\x78", b"IDAT\x79"), ""),
    "huge": (claiming(65536, 65536), "pixels"),
    "large": (claiming(10_000, 10_001), "10000 x 10001 pixels"),
    "no width": (claiming(0, 4), ""),
    "float": (encoded(Image.new("F", (8, 8), 0.5), "TIFF"), "32-bit"),
    "int": (encoded(Image.new("I", (8, 8), 70000), "TIFF"), "32-bit"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused_with_the_reason(name):
    data, word = REFUSED[name]
    with pytest.raises(ValueError, match=r"^[^<]*$") as caught:  # no address of an object in it
        decode_image(data)
    assert word in str(caught.value) and len(str(caught.value)) > 15
