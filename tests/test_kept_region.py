"""What stays of a picture, against pixels that are painted one by one, and against what `diffusers` pastes."""

import random

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from model.kept_region import kept_cells, outside_boxes, put_back


def painted(boxes, height, width):
    """Return bool (height, width), True in boxes of pixels (left, top, right, bottom)."""
    inside = np.zeros((height, width), dtype=bool)
    for left, top, right, bottom in boxes:
        inside[top:bottom, left:right] = True
    return inside


def test_a_pixel_stays_if_no_box_has_it_and_a_cell_if_all_of_its_pixels_do():
    rng = random.Random(0)
    for _ in range(200):
        rows, columns = rng.randint(2, 24), rng.randint(2, 24)
        height, width, boxes = 8 * rows, 8 * columns, []
        for _ in range(rng.randint(1, 3)):
            (left, right), (top, bottom) = (sorted(rng.sample(range(n + 1), 2)) for n in (width, height))
            boxes.append((left, top, right, bottom))
        inside = torch.from_numpy(painted(boxes, height, width))
        expected = ~inside.view(rows, 8, columns, 8).any(dim=3).any(dim=1)
        assert torch.equal(kept_cells(~inside, 8), expected)
        # A plan says boxes in thousandths, rounded, which is a tenth of a pixel at most here.
        said = [[round(1000 * v / (width, height)[i % 2]) for i, v in enumerate(box)] for box in boxes]
        assert torch.equal(outside_boxes(said, height, width, 1000), ~inside), (said, rows, columns)


@pytest.mark.parametrize("width", [999, 1000, 1001, 1664, 3333])
def test_no_pixel_of_a_box_stays_in_a_picture_of_more_pixels_than_parts(width):
    rng, widest = random.Random(width), 0
    for _ in range(500):
        left, right = sorted(rng.sample(range(width + 1), 2))
        x1, x2 = (round(1000 * x / width) for x in (left, right))
        opened = ~outside_boxes([(x1, 0, x2, 1000)], 1, width, 1000)[0] if x1 < x2 else torch.ones(width).bool()
        assert opened[left:right].all()
        if x1 < x2:
            widest = max(widest, opened.sum().item() - (right - left))
    assert widest <= 2 * (width // 1000)  # what a thousandth may be to either side


def test_the_pixels_in_which_a_box_ends_are_its_own():
    # 96 pixels: 5 parts are 0.48 of a pixel, 21 are 2.02.
    assert (~outside_boxes([(5, 0, 21, 1000)], 1, 96, 1000)[0]).nonzero().flatten().tolist() == [0, 1]
    assert (~outside_boxes([(5, 0, 25, 1000)], 1, 96, 1000)[0]).nonzero().flatten().tolist() == [0, 1, 2]


def test_a_pair_of_places_is_cut_in_the_middle():
    left, whole = [31, 62, 469, 938], [0, 0, 1000, 1000]
    expected = torch.ones(64, 128, dtype=torch.bool)
    expected[4:60, 4:60] = False
    assert torch.equal(outside_boxes([left], 64, 128, 1000), expected)
    assert torch.equal(kept_cells(expected, 8).nonzero()[:, 1].unique(), torch.arange(8, 16))
    assert not outside_boxes([left, whole], 64, 128, 1000).any() and outside_boxes([], 64, 128, 1000).all()


def test_what_is_put_back_is_what_diffusers_pastes():
    drawn, reference = np.random.default_rng(0).integers(0, 256, (2, 64, 96, 3), dtype=np.uint8)
    kept = torch.from_numpy(~painted([(8, 3, 50, 40), (60, 0, 96, 9)], 64, 96))
    mask = Image.fromarray(np.where(kept, 0, 255).astype(np.uint8))
    pasted = VaeImageProcessor().apply_overlay(mask, *map(Image.fromarray, (reference, drawn)))
    ours = put_back(drawn, torch.from_numpy(reference).permute(2, 0, 1), kept)
    assert ours.dtype == np.uint8 and np.array_equal(ours, np.asarray(pasted.convert("RGB")))
