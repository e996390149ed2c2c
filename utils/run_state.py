"""Where the checkpoints of a run are, and what they hold: trained parameters, average and optimizer state, by name."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.ema import EMA
from utils.optimizer import Together, optimizer_tensors


def checkpoint_folder(run: Path | str) -> Path | str:
    """Return where a run's checkpoints lie: its own folder, if its config.json names no other.

    run: the run's folder; an s3:// URL can only be one with checkpoints/ in it.
    """
    if isinstance(run, str) and "://" in run:
        return f"{run.rstrip('/')}/checkpoints"
    config = Path(run) / "config.json"
    named = json.loads(config.read_text(encoding="utf-8")).get("checkpoint_folder") if config.is_file() else None
    return named or Path(run) / "checkpoints"


def run_tensors(
    trained: Mapping[str, nn.Parameter], ema: EMA, optimizer: torch.optim.Optimizer | Together
) -> dict[str, Tensor]:
    """Return all tensors that a step changes, as "model.…", "ema.…" and "optimizer.…"; filling these restores a run.

    trained: the parameters by their names in the checkpoint, which `ema` and `optimizer` are of.
    """
    tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in trained.items()}
    tensors |= {f"ema.{name}": average for name, average in ema.tensors().items()}
    return tensors | {f"optimizer.{name}": value for name, value in optimizer_tensors(optimizer, trained).items()}


def networks_tensors(
    trained: Mapping[str, Mapping[str, nn.Parameter]],
    ema: EMA | None,
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> dict[str, Tensor]:
    """Return the same of several networks, as "<network>.…", "ema.…" (of one of them) and "optimizer.<network>.…".

    Of a ZeRO optimizer it is this rank's part.
    """
    tensors: dict[str, Tensor] = {f"ema.{name}": average for name, average in (ema.tensors() if ema else {}).items()}
    for network, parameters in trained.items():
        tensors |= {f"{network}.{name}": parameter for name, parameter in parameters.items()}
        state = optimizer_tensors(optimizers[network], parameters)
        tensors |= {f"optimizer.{network}.{name}": value for name, value in state.items()}
    return tensors
