"""Where things lie in the tokens of a picture, for the recipe of the tiny vision tower."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny_scenes import Scene

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels
FAR_OFF = 0.2  # of a picture's side: a box is read wrongly if one of its edges is further off


def covered(box: Box, height: int, width: int, rows: int, columns: int) -> Tensor:
    """Return how much of each token of a picture a box covers, (rows, columns) in 0 to 1."""

    def cover(low: float, high: float, size: int, count: int) -> Tensor:
        edges = torch.linspace(0, size, count + 1)
        return (edges[1:].clamp(max=high) - edges[:-1].clamp(min=low)).clamp(min=0) * count / size

    left, top, right, bottom = box
    return cover(top, bottom, height, rows)[:, None] * cover(left, right, width, columns)


def state_at(states: Tensor, box: Box, height: int, width: int) -> Tensor:
    """Return the unit-norm mean of a grid of states (rows, columns, width), weighted by how much a box covers each."""
    weights = covered(box, height, width, *states.shape[:2])
    return F.normalize((states * weights[..., None]).sum((0, 1)), dim=-1)


def box_errors(reader: nn.Linear, tokens: Sequence[Tensor], scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """Return how far off the boxes are that a linear layer reads from the tokens where things lie.

    As the mean squared error of an edge, in the picture's sides, and as the share of boxes that are far off.
    """
    errors, weights = [], []
    for own, scene in zip(tokens, scenes, strict=True):
        height, width = scene.pixels.shape[1:]
        told = reader(F.rms_norm(own, own.shape[-1:]))  # (rows, columns, 4)
        for _, box in scene.things:
            errors.append((told - torch.tensor(box) / torch.tensor([width, height] * 2)).flatten(0, 1))
            weights.append(covered(box, height, width, *own.shape[:2]).flatten())
    error, weight = torch.cat(errors), torch.cat(weights)
    is_far = (error.abs().amax(-1) > FAR_OFF).float()
    return error.square().mean(-1) @ weight / weight.sum(), is_far @ weight / weight.sum()
