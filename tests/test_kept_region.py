"""Which cells of latents stay, against pixels that are painted one by one."""

import random

import numpy as np
import torch

from model.kept_region import outside_boxes, outside_mask


def painted(boxes, height, width):
    """Return bool (height, width), True in boxes of pixels (left, top, right, bottom)."""
    inside = np.zeros((height, width), dtype=bool)
    for left, top, right, bottom in boxes:
        inside[top:bottom, left:right] = True
    return inside


def test_a_cell_stays_if_no_pixel_of_it_is_in_a_box():
    rng = random.Random(0)
    for _ in range(200):
        rows, columns = rng.randint(2, 24), rng.randint(2, 24)
        height, width, boxes = 8 * rows, 8 * columns, []
        for _ in range(rng.randint(1, 3)):
            (left, right), (top, bottom) = (sorted(rng.sample(range(n + 1), 2)) for n in (width, height))
            boxes.append((left, top, right, bottom))
        inside = painted(boxes, height, width)
        expected = ~torch.from_numpy(inside).view(rows, 8, columns, 8).any(dim=3).any(dim=1)
        assert torch.equal(outside_mask(torch.from_numpy(inside), 8), expected)
        # A plan says boxes in thousandths, rounded, which is a fifth of a pixel at most here.
        said = [[round(1000 * v / (width, height)[i % 2]) for i, v in enumerate(box)] for box in boxes]
        assert torch.equal(outside_boxes(said, rows, columns, 1000), expected), (said, rows, columns)


def test_a_pair_of_places_is_cut_in_the_middle():
    left, whole = [31, 62, 469, 938], [0, 0, 1000, 1000]
    expected = torch.ones(8, 16, dtype=torch.bool)
    expected[:, :8] = False
    assert torch.equal(outside_boxes([left], 8, 16, 1000), expected)
    assert not outside_boxes([left, whole], 8, 16, 1000).any() and outside_boxes([], 8, 16, 1000).all()
