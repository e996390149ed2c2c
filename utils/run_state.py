"""What a checkpoint of a run holds: the trained parameters, their average and the optimizer's state, by name."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from utils.ema import EMA
from utils.optimizer import Together, optimizer_tensors


def run_tensors(
    trained: Mapping[str, nn.Parameter], ema: EMA, optimizer: torch.optim.Optimizer | Together
) -> dict[str, Tensor]:
    """Return all tensors that a step changes, as "model.…", "ema.…" and "optimizer.…"; filling these restores a run.

    trained: the parameters by their names in the checkpoint, which `ema` and `optimizer` are of.
    """
    tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in trained.items()}
    tensors |= {f"ema.{name}": average for name, average in ema.tensors().items()}
    return tensors | {f"optimizer.{name}": value for name, value in optimizer_tensors(optimizer, trained).items()}
