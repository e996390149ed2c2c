"""Pixels of any mode to 8-bit sRGB, as a viewer shows them.

* Samples of more than 8 bits keep their 8 highest: what Pillow does for colour, done for grey as well.
* An ICC profile is converted to sRGB, perceptual intent.  One that is damaged, or made for other channels than the
  picture has, is ignored, as viewers do, and logged once.
* Without a profile, a PNG's gAMA is applied where it differs from sRGB's 1/2.2 by more than 5 %, as browsers do; its
  sRGB chunk overrides it.  cHRM and cICP are not read.
* CMYK without a profile becomes red = (1 - cyan) (1 - black), and so on; in JPEG it is taken as inverted, which is
  what Adobe writes and browsers assume.
* What is transparent shows the background.
"""

import functools
import io
import logging

import numpy as np
from PIL import Image, ImageCms

WHITE = (255, 255, 255)
log = logging.getLogger("train")
_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
_SRGB_GAMMA = 1 / 2.2
_GAMMA_THRESHOLD = 0.05
_MAX_PROFILES = 32  # transforms kept; a collection has few
# Mode of our pixels → what a profile for them calls its channels.
_CHANNELS = {"L": "GRAY", "RGB": "RGB ", "CMYK": "CMYK"}


def to_srgb(image: Image.Image, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Convert a loaded picture to RGB; background: red, green, blue in [0, 255] behind what is transparent.

    Raises: ValueError for 32-bit samples, of which no viewer knows the range.
    """
    image, alpha = _split_alpha(image)
    rgb = _in_srgb(image)
    if alpha is None:
        return rgb
    return Image.composite(rgb, Image.new("RGB", rgb.size, background), alpha)


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the picture in a mode of 8 bits without transparency, and its alpha (L), None if it is opaque."""
    if image.mode in ("I", "F"):
        raise ValueError(f"it has 32-bit samples (mode {image.mode}), which have no agreed range; save it with 8 or 16")
    if image.mode.startswith("I;16"):
        return _split_deep_grey(image)
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        return image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"), alpha
    plain = {"1": "L", "P": "RGB", "YCbCr": "RGB"}.get(image.mode, image.mode)
    return image if plain == image.mode else image.convert(plain), None


def _split_deep_grey(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    deep = np.asarray(image).astype(np.uint16)
    alpha = None
    if (key := image.info.get("transparency")) is not None:
        alpha = Image.fromarray(np.where(deep == key, 0, 255).astype(np.uint8))
    bits, tags = 16, getattr(image, "tag_v2", {})
    if tags:
        bits = tags.get(_TIFF_BITS, (16,))[0]
        if tags.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
            deep = (1 << bits) - 1 - deep
    grey = Image.fromarray((deep >> (bits - 8)).astype(np.uint8))
    grey.info = image.info
    return grey, alpha


def _in_srgb(image: Image.Image) -> Image.Image:
    """Convert opaque 8-bit pixels."""
    if image.mode == "LAB":
        return ImageCms.applyTransform(image, _lab_to_srgb())
    profile = image.info.get("icc_profile")
    if profile and image.mode in _CHANNELS:
        if (transform := _transform(profile, image.mode)) is not None:
            return ImageCms.applyTransform(image, transform)
    elif "srgb" not in image.info and (gamma := image.info.get("gamma")):
        exponent = _SRGB_GAMMA / gamma
        if abs(exponent - 1) > _GAMMA_THRESHOLD:
            table = [round(255 * (value / 255) ** exponent) for value in range(256)]
            image = image.point(table * len(image.getbands()))
    return image if image.mode == "RGB" else image.convert("RGB")


@functools.lru_cache(_MAX_PROFILES)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform to sRGB, or None if pixels may stay as they are: the profile is sRGB or unusable."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if (channels := source.profile.xcolor_space) != _CHANNELS[mode]:
            raise ValueError(f"it is for {channels.strip()}, the picture has {mode}")
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
        log.warning("ignored an ICC profile of %d bytes: %s; its pictures are taken as sRGB", len(profile), error)
        return None
    if mode != "RGB":
        return transform
    # Most profiles are sRGB itself, by one of many files; then pixels keep their values, and cost nothing.
    levels = np.linspace(0, 255, 9).astype(np.uint8)
    probe = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(-1, 27, 3)
    shown = np.asarray(ImageCms.applyTransform(Image.fromarray(probe), transform))
    return transform if np.abs(shown.astype(int) - probe).max() > 1 else None


@functools.cache
def _lab_to_srgb() -> ImageCms.ImageCmsTransform:
    return ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")
