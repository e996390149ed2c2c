"""A perceptual hash: pictures that look alike differ in few bits of it, whatever their size, format and quality."""

import numpy as np
from PIL import Image

NUM_BITS = 192
_SIDE = 72  # pixels of the reduced picture: divides into 9, 8 and 4 cells
_STEP = (
    2.0  # of 255, by which a cell must be brighter than its neighbour: more than what compression adds to a plain area
)
_TINT = 12.0  # of 255, from where on a cell has a colour


def picture_hash(image: Image.Image) -> np.ndarray:
    """Return the hash of an RGB picture, (3,) uint64.

    64 bits: is a cell of a 9 x 8 grid clearly brighter than its right neighbour; 64 the same downwards; 64: is a cell
    of a 4 x 4 grid clearly bluish, yellowish, reddish, greenish.  A plain grey picture has no bit set.
    """
    pixels = np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX), np.float32)  # (72, 72, 3)
    luma = pixels @ np.array([0.299, 0.587, 0.114], np.float32)
    across, down = _cells(luma, 8, 9), _cells(luma, 9, 8)
    colour = _cells(pixels, 4, 4)
    grey = _cells(luma, 4, 4)
    blue, red = 0.564 * (colour[..., 2] - grey), 0.713 * (colour[..., 0] - grey)  # Cb and Cr of JPEG, without offset
    bits = [
        across[:, :-1] - across[:, 1:] > _STEP, down[:-1] - down[1:] > _STEP,
        blue > _TINT, blue < -_TINT, red > _TINT, red < -_TINT,
    ]  # fmt: skip
    return np.packbits(np.concatenate([part.ravel() for part in bits])).view(np.uint64)


def _cells(pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return the means of a grid's cells: (72, 72, ...) → (rows, columns, ...)."""
    return pixels.reshape(rows, _SIDE // rows, columns, _SIDE // columns, *pixels.shape[2:]).mean(axis=(1, 3))


def hash_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the number of bits in which hashes differ: (..., 3), (..., 3) uint64 → (...) int64."""
    return np.bitwise_count(a ^ b).sum(axis=-1, dtype=np.int64)
