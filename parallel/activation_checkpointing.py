"""Activation checkpointing: keep a unit's inputs alone and compute its inside again in the backward pass."""

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel.module_patterns import matching_modules

MODES = ("none", "full")


def apply_activation_checkpointing(model: nn.Module, units: Iterable[str], mode: str) -> None:
    """Checkpoint every module that matches one of the name patterns; parameter names stay as they are.

    mode: "none" changes nothing; "full" recomputes the whole unit.  To be called before FSDP is applied, so that the
    gathered weights are there when the unit is computed again.
    Raises: ValueError for another mode.
    """
    if mode not in MODES:
        raise ValueError(f"--activation_checkpointing must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "none":
        return
    for pattern in units:
        for _, module in matching_modules(model, pattern):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
