"""How tools.prepare stores a picture: as the file that it came in where that shows the same, else encoded anew."""

import io

import numpy as np
from PIL import Image

FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
_EXTENSIONS = {name: extension for extension, name in FORMATS.items()}


def original(content: bytes, shown: Image.Image) -> tuple[str, bytes] | None:
    """Return the file as (extension, content) if any reader sees in it what is `shown`."""
    file = Image.open(io.BytesIO(content))
    extension = _EXTENSIONS.get(file.format)
    if extension is None or file.mode not in ("RGB", "L") or "transparency" in file.info:
        return None
    if getattr(file, "n_frames", 1) != 1 or file.size != shown.size:
        return None
    same = np.array_equal(np.asarray(file.convert("RGB")), np.asarray(shown))
    return (extension, content) if same else None


def encode(image: Image.Image, kind: str, quality: int) -> bytes:
    """Return a picture as a file of one of FORMATS."""
    options = {} if kind == "png" else {"quality": quality}
    if kind == "jpg":
        options["subsampling"] = 0  # colours at full resolution
    buffer = io.BytesIO()
    image.save(buffer, FORMATS[kind], **options)
    return buffer.getvalue()
