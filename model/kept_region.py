"""What stays of the first reference in an edit: all outside of boxes, as pixels and as cells of latents."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def outside_boxes(boxes: Sequence[tuple[int, int, int, int]], height: int, width: int, side: int) -> Tensor:
    """Return bool (height, width), True for pixels that no box touches.

    boxes: x1, y1, x2, y2 in whole parts of the picture's width and height, each of which is `side` parts.
    """
    kept = torch.ones(height, width, dtype=torch.bool)
    for x1, y1, x2, y2 in boxes:
        kept[_first(y1, height, side) : _end(y2, height, side), _first(x1, width, side) : _end(x2, width, side)] = False
    return kept


# A part is rounded, so an edge may have been half a part to either side.  Where one edge of a pixel lies within that,
# it was meant; where several do, in a picture of more pixels than parts, the outermost; where none does, the pixel that
# the part is in belongs to the box.


def _first(part: int, pixels: int, side: int) -> int:
    low, high, whole = (2 * part - 1) * pixels, (2 * part + 1) * pixels, 2 * side
    return max(0, min(-(-low // whole), high // whole))


def _end(part: int, pixels: int, side: int) -> int:
    low, high, whole = (2 * part - 1) * pixels, (2 * part + 1) * pixels, 2 * side
    return max(-(-low // whole), high // whole)


def kept_cells(kept: Tensor, factor: int) -> Tensor:
    """Return bool (H / factor, W / factor), True for cells of latents all of whose pixels stay.

    kept: bool (H, W), True where the picture stays; factor: pixels of a cell's side.
    """
    return F.max_pool2d((~kept)[None].float(), factor)[0] == 0


def put_back(drawn: np.ndarray, reference: Tensor, kept: Tensor) -> np.ndarray:
    """Return a drawn picture, uint8 (H, W, 3), with the pixels of `reference`, uint8 (3, H, W), where `kept` is True.

    The decoder sees a little beyond a cell, and gives no picture back as it was; what is to stay is the picture itself.
    """
    return np.where(kept[..., None].cpu().numpy(), reference.permute(1, 2, 0).cpu().numpy(), drawn)
