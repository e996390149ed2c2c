"""Picture files and ICC profiles put together byte by byte, for kinds that Pillow cannot write."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

# CIE XYZ of the primaries adapted to D50, as columns, and of D50 itself: the numbers of the profiles in use.
DISPLAY_P3 = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
SRGB = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])
D50 = np.array([0.96420, 1.0, 0.82491])


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    """Return what Pillow writes."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    """Return a PNG chunk."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(samples: np.ndarray, colour_type: int, depth: int = 8, before: bytes = b"", after: bytes = b"") -> bytes:
    """Return a PNG of samples (H, W) or (H, W, channels); before and after: whole chunks around the pixels."""
    height, width = samples.shape[:2]
    if depth == 16:
        rows = [row.astype(">u2").tobytes() for row in samples]
    elif depth == 8:
        rows = [row.astype(np.uint8).tobytes() for row in samples]
    else:
        bits = (samples[..., None] >> np.arange(depth)[::-1]) & 1  # the leftmost sample in the highest bits
        rows = [np.packbits(row.ravel()).tobytes() for row in bits]
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + before + chunk(b"IDAT", pixels) + after + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def tiff(samples: np.ndarray, photometric: int, depth: int, order: str = "<", tags: dict | None = None) -> bytes:
    """Return an uncompressed TIFF of samples (H, W) or (H, W, channels) of 8 or 16 bits; tags: {number: short}."""
    height, width = samples.shape[:2]
    channels = samples.shape[2] if samples.ndim == 3 else 1
    pixels = samples.astype(order + "u2" if depth == 16 else np.uint8).tobytes()
    bits = struct.pack(f"{order}{channels}H", *[depth] * channels)
    bits_offset, pixels_offset = 8, 8 + len(bits) + len(bits) % 2
    entries = {
        256: width, 257: height, 258: bits if channels > 2 else depth, 259: 1, 262: photometric, 273: pixels_offset,
        277: channels, 278: height, 279: len(pixels), **(tags or {}),
    }  # fmt: skip
    if channels == 2:
        entries[258] = (depth, depth)
    directory = struct.pack(order + "H", len(entries))
    for tag, value in sorted(entries.items()):
        if isinstance(value, bytes):
            directory += struct.pack(order + "HHII", tag, 3, channels, bits_offset)
        elif isinstance(value, tuple):
            directory += struct.pack(order + "HHIHH", tag, 3, 2, *value)
        else:
            directory += struct.pack(order + "HHII", tag, 4, 1, value)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", pixels_offset + len(pixels))
    return head + bits.ljust(pixels_offset - 8, b"\0") + pixels + directory + b"\0\0\0\0"


def gif_of_a_part(canvas: tuple[int, int], box: tuple[int, int, int, int], transparent: bool) -> bytes:
    """Return a GIF whose one frame, all of colour 1 of (white, 200-0-0), covers box = (left, top, width, height)."""
    out = b"GIF89a" + struct.pack("<HHBBB", *canvas, 0x80, 0, 0) + bytes([255, 255, 255, 200, 0, 0])
    if transparent:
        out += b"\x21\xf9\x04\x01\0\0\0\0"
    out += b"\x2c" + struct.pack("<HHHHB", *box, 0)
    # LZW of 2-bit codes without compression: a clear code before every pixel keeps all codes 3 bits wide.
    codes = [code for _ in range(box[2] * box[3]) for code in (4, 1)] + [5]
    bits = np.array([code >> i & 1 for code in codes for i in range(3)], np.uint8)
    data = np.packbits(bits, bitorder="little").tobytes()
    blocks = b"".join(bytes([len(part)]) + part for part in (data[i : i + 255] for i in range(0, len(data), 255)))
    return out + b"\x02" + blocks + b"\0;"


def bmp_565(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> bytes:
    """Return a BMP of 16-bit pixels: 5 bits of red, 6 of green, 5 of blue, each (H, W); W even."""
    height, width = red.shape
    words = (red.astype(np.uint16) << 11 | green.astype(np.uint16) << 5 | blue).astype("<u2")[::-1].tobytes()
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 16, 3, len(words), 2835, 2835, 0, 0)
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    return b"BM" + struct.pack("<IHHI", 66 + len(words), 0, 0, 66) + info + masks + words


def _tag(kind: bytes, content: bytes) -> bytes:
    content = kind + b"\0\0\0\0" + content
    return content + b"\0" * (-len(content) % 4)


def _fixed(*values: float) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def _profile(channels: bytes, connection: bytes, device: bytes, tags: dict[bytes, bytes], pad: int = 0) -> bytes:
    tags = {b"desc": _tag(b"desc", struct.pack(">I", 5) + b"made\0" + b"\0" * (78 + pad)), **tags}
    tags |= {b"wtpt": _tag(b"XYZ ", _fixed(*D50)), b"cprt": _tag(b"text", b"none\0")}
    offset, table, body = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        table += name + struct.pack(">II", offset + len(body), len(content))
        body += content
    header = struct.pack(">I", offset + len(body)) + b"none" + b"\x02\x20\0\0" + device + channels + connection
    header += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + b"\0" * 28 + _fixed(*D50)
    return header.ljust(128, b"\0") + table + body


def _gamma(gamma: float) -> bytes:
    return _tag(b"curv", struct.pack(">IH", 1, round(gamma * 256)))


def rgb_profile(primaries: np.ndarray, gamma: float, pad: int = 0) -> bytes:
    """Return a profile of three primaries and one gamma; pad: useless bytes in it."""
    names = (b"rXYZ", b"gXYZ", b"bXYZ")
    tags = {name: _tag(b"XYZ ", _fixed(*column)) for name, column in zip(names, primaries.T, strict=True)}
    tags |= {name: _gamma(gamma) for name in (b"rTRC", b"gTRC", b"bTRC")}
    return _profile(b"RGB ", b"XYZ ", b"mntr", tags, pad)


def grey_profile(gamma: float) -> bytes:
    """Return a profile of one channel."""
    return _profile(b"GRAY", b"XYZ ", b"mntr", {b"kTRC": _gamma(gamma)})


def cmyk_profile(lab: np.ndarray) -> bytes:
    """Return a printer's profile; lab (2, 2, 2, 2, 3): the colour of no or full cyan, magenta, yellow, black."""
    table = np.empty(lab.shape, np.uint8)
    table[..., 0] = np.round(lab[..., 0] * 2.55)
    table[..., 1:] = np.round(lab[..., 1:] + 128)
    ramp = bytes(range(256))
    content = bytes([4, 3, 2, 0]) + _fixed(1, 0, 0, 0, 1, 0, 0, 0, 1) + ramp * 4 + table.tobytes() + ramp * 3
    return _profile(b"CMYK", b"Lab ", b"prtr", {b"A2B0": _tag(b"mft1", content)})


def srgb_of_linear(linear: np.ndarray) -> np.ndarray:
    """Return 8-bit sRGB of linear light in [0, 1], IEC 61966-2-1."""
    linear = np.clip(linear, 0, 1)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.round(255 * curved).astype(int)


def srgb_of_profile(rgb: np.ndarray, primaries: np.ndarray, gamma: float) -> np.ndarray:
    """Return 8-bit sRGB of 8-bit values under `rgb_profile(primaries, gamma)`, by the definition."""
    return srgb_of_linear((rgb / 255.0) ** gamma @ primaries.T @ np.linalg.inv(SRGB).T)


def srgb_of_lab(lab: np.ndarray) -> np.ndarray:
    """Return 8-bit sRGB of CIE L*a*b* under D50."""
    f_y = (lab[..., 0] + 16) / 116
    f = np.stack([f_y + lab[..., 1] / 500, f_y, f_y - lab[..., 2] / 200], -1)
    xyz = np.where(f > 6 / 29, f**3, (f - 4 / 29) * 3 * (6 / 29) ** 2) * D50
    return srgb_of_linear(xyz @ np.linalg.inv(SRGB).T)
