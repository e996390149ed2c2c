"""Repeated pictures: the hash on real changes, and the search against comparing every pair."""

import io

import numpy as np
import pytest
from PIL import Image, ImageFilter

from data.duplicates import find_copies, find_duplicates
from data.picture_hash import hash_distance, picture_hash


def picture(seed: int, size: tuple[int, int] = (300, 200)) -> Image.Image:
    """Return a picture of soft coloured patches."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


@pytest.mark.parametrize(
    "change",
    [
        lambda image: as_jpeg(image, 60),
        lambda image: image.resize((150, 100), Image.Resampling.LANCZOS),
        lambda image: image.resize((900, 600), Image.Resampling.BILINEAR),
        lambda image: as_jpeg(image.resize((240, 160)), 80),
        lambda image: image.filter(ImageFilter.GaussianBlur(1)),
    ],
)
def test_a_copy_of_another_size_and_quality_is_near(change):
    distances = [hash_distance(picture_hash(picture(i)), picture_hash(change(picture(i)))) for i in range(12)]
    assert max(distances) <= 4


def test_other_pictures_are_far_also_if_only_their_colour_differs():
    hashes = np.stack([picture_hash(picture(i)) for i in range(60)])
    distances = hash_distance(hashes[:, None], hashes[None])
    assert distances[~np.eye(60, dtype=bool)].min() > 24
    red, green, plain = (picture_hash(Image.new("RGB", (64, 64), c)) for c in ("#c04040", "#40c040", "#808080"))
    assert hash_distance(red, green) > 8 and not plain.any()
    assert hash_distance(picture_hash(picture(0)), picture_hash(picture(0).rotate(180))) > 24


def one_by_one(hashes: np.ndarray, distance: int) -> list[int]:
    """The definition, one picture after another."""
    kept: list[int] = []
    found = []
    for i, value in enumerate(hashes):
        near = next((k for k in kept if hash_distance(hashes[k], value) <= distance), -1)
        found.append(near)
        if near < 0:
            kept.append(i)
    return found


@pytest.mark.parametrize("distance", [0, 1, 2, 4, 7, 12])
def test_the_search_finds_what_comparing_all_pairs_finds(distance):
    rng = np.random.default_rng(distance)
    roots = rng.integers(0, 2**64, (25, 3), dtype=np.uint64)
    hashes = roots[rng.integers(0, 25, 400)]
    for row in hashes:  # up to ten flipped bits, so that chains form
        for bit in rng.integers(0, 192, rng.integers(0, 11)):
            row[bit // 64] ^= np.uint64(1) << np.uint64(bit % 64)
    found = find_duplicates(hashes, distance)
    assert found.tolist() == one_by_one(hashes, distance)
    assert (found >= 0).any() and (found < 0).any()


def test_nothing_and_copies():
    assert find_duplicates(np.zeros((0, 3), np.uint64), 4).shape == (0,)
    assert find_duplicates(np.zeros((5, 3), np.uint64), 4).tolist() == [-1, 0, 0, 0, 0]
    assert find_copies(np.array([[1, 2], [3, 4], [1, 2], [1, 3], [1, 2]], np.uint64)).tolist() == [-1, -1, 0, -1, 0]
    assert find_copies(np.zeros((0, 2), np.uint64)).shape == (0,)
