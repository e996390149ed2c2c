"""What stays of the first reference in an edit: all outside of boxes, or where a mask is black, as cells of latents."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def outside_boxes(boxes: Sequence[tuple[int, int, int, int]], rows: int, columns: int, side: int) -> Tensor:
    """Return bool (rows, columns), True for cells of latents that no box touches.

    boxes: x1, y1, x2, y2 in whole parts of the picture's width and height, each of which is `side` parts.
    """
    kept = torch.ones(rows, columns, dtype=torch.bool)
    for x1, y1, x2, y2 in boxes:
        # Half a part is what rounding may have added: no reason to open another row of cells.
        left, right = math.floor((x1 + 0.5) * columns / side), math.ceil((x2 - 0.5) * columns / side)
        top, bottom = math.floor((y1 + 0.5) * rows / side), math.ceil((y2 - 0.5) * rows / side)
        kept[top:bottom, left:right] = False
    return kept


def outside_mask(mask: Tensor, factor: int) -> Tensor:
    """Return bool (H / factor, W / factor), True for cells of latents without a pixel that may change.

    mask: bool (H, W), True where the picture may change; factor: pixels of a cell's side.
    """
    return F.max_pool2d(mask[None].float(), factor)[0] == 0
