"""Sizes by area and ratio: the released ones, never squashed, never enlarged, little cut off."""

import math
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw

from data.aspect import AREAS, RATIOS, TooExtremeError, TooSmallError, closest_size, cut, place, placements, table

RELEASED = {"1:1": (1328, 1328), "16:9": (928, 1664), "4:3": (1104, 1472), "3:2": (1056, 1584)}


def test_the_released_sizes():
    sizes = table(1328)
    assert {name: sizes[name] for name in RELEASED} == RELEASED
    for name, (height, width) in RELEASED.items():
        assert sizes[":".join(reversed(name.split(":")))] == (width, height)


@pytest.mark.parametrize("area", AREAS)
def test_every_ratio_has_a_size_of_about_the_area(area):
    sizes = table(area)
    assert list(sizes) == [f"{w}:{h}" for w, h in RATIOS]
    for (w, h), (height, width) in zip(RATIOS, sizes.values(), strict=True):
        assert height % 16 == width % 16 == 0 and 0.8 * area**2 <= height * width <= area**2
        assert abs(width / height / (w / h) - 1) < 0.02
        assert sizes[f"{h}:{w}"] == (width, height)


@pytest.mark.parametrize("area", [64, 256])
def test_the_closest_size_is_that_of_a_search_over_all(area):
    every = [
        (h, w) for h in range(16, area**2, 16) for w in range(16, area**2 // h + 1, 16) if h * w >= 0.8 * area**2
    ]  # fmt: skip
    for ratio in (1.0, 1.23, 0.41, 2.9, 16 / 9):
        best = min(abs(math.log(w / h / ratio)) for h, w in every)
        tied = [(h, w) for h, w in every if abs(math.log(w / h / ratio)) < best + 1e-12]
        assert closest_size(area, ratio) == max(tied, key=math.prod)


def test_any_picture_is_scaled_evenly_cut_little_and_never_enlarged():
    rng, own = random.Random(0), 0
    for _ in range(2000):
        height, width = rng.randint(260, 3000), rng.randint(260, 3000)
        try:
            found = placements(height, width, AREAS, 0.05)
        except (TooSmallError, TooExtremeError):
            assert not 1 / 2.8 < width / height < 2.8 or min(height, width) < 460
            continue
        assert [p.area for p in found] == sorted((p.area for p in found), reverse=True)
        for p in found:
            assert p.size[0] % 16 == p.size[1] % 16 == 0 and math.prod(p.size) <= p.area**2
            scale = max(p.size[0] / height, p.size[1] / width)
            assert scale <= 1 + 1e-9
            # Within half a pixel of the even scale, on both sides; one side is cut.
            assert abs(p.scaled[0] - height * scale) <= 0.5 and abs(p.scaled[1] - width * scale) <= 0.5
            assert p.scaled[0] >= p.size[0] and p.scaled[1] >= p.size[1]
            assert p.scaled[0] == p.size[0] or p.scaled[1] == p.size[1]
            assert p.cropped <= 0.05 + 1 / min(p.scaled)  # scaled sides are whole pixels
            assert abs(2 * p.corner[0] - (p.scaled[0] - p.size[0])) <= 1
            own += p.ratio == "own"
    assert own > 100


def test_a_picture_at_its_size_is_left_alone_and_the_larger_area_wins():
    placed = placements(1328, 1328, AREAS, 0.05)
    assert [p.size for p in placed] == [(1328, 1328), (640, 640), (256, 256)]
    image = Image.new("RGB", (1328, 1328))
    assert cut(image, placed[0]) is image
    assert placements(1327, 1327, AREAS, 0.05)[0].size == (640, 640)


def test_what_does_not_fit_says_why():
    with pytest.raises(TooSmallError, match="200 x 100 pixels would be enlarged"):
        placements(100, 200, AREAS, 0.05)
    assert placements(100, 200, AREAS, 0.05, max_enlargement=3)[0].area == 256
    with pytest.raises(TooExtremeError, match="3.50:1; the table ends at 3.00:1"):
        place(1000, 3500, 640, 0.05)
    assert place(1000, 3100, 640, 0.05).ratio == "3:1"
    assert place(1000, 1250, 640, 0.05).ratio == "own" and place(1000, 1250, 640, 0.07).ratio == "4:3"
    with pytest.raises(TooExtremeError, match="would be cut off, at most 0 %"):
        place(1000, 1001, 640, 0.0)
    with pytest.raises(ValueError, match="multiple of 16 up to 8192 pixels; got 250"):
        table(250)


@pytest.mark.parametrize("size", [(1000, 700), (701, 999), (1500, 600), (2000, 2000), (900, 877), (640, 1130)])
def test_a_circle_stays_a_circle(size):
    height, width = size
    radius, middle = min(size) * 0.4, (width / 2, height / 2)
    image = Image.new("RGB", (width, height), "white")
    box = [middle[0] - radius, middle[1] - radius, middle[0] + radius, middle[1] + radius]
    ImageDraw.Draw(image).ellipse(box, fill="black")
    for placement in placements(height, width, AREAS, 0.05):
        dark = np.asarray(cut(image, placement).convert("L")) < 128
        down, across = np.flatnonzero(dark.any(axis=1)), np.flatnonzero(dark.any(axis=0))
        tall, wide = down[-1] - down[0] + 1, across[-1] - across[0] + 1
        assert abs(tall - wide) <= 1 and abs(wide - 2 * radius * placement.enlargement) <= 2
        # And it is whole, in the middle.
        assert dark.shape == placement.size
        assert abs(down[0] + down[-1] - placement.size[0]) <= 3 and abs(across[0] + across[-1] - placement.size[1]) <= 3
