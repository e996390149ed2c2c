"""Activation checkpointing: keep little of a unit's forward pass and compute the rest again in its backward pass."""

import re
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.nn.attention import varlen as _registers_varlen_attn  # noqa: F401
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from parallel.module_patterns import matching_modules

MODES = ("none", "full", "every_N (every_2, every_3 …)", "selective")
_aten = torch.ops.aten
# What "selective" keeps: the outputs of matrix products and attention.  All else is cheap to compute again.  A device
# has a few of the attention kernels; the names of the others do no harm.
_KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_mm.default,  # float8
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]


def apply_activation_checkpointing(model: nn.Module, units: Iterable[str], mode: str) -> None:
    """Checkpoint modules that match one of the name patterns; parameter names stay as they are.

    mode:
      "none"       changes nothing
      "full"       keeps each unit's inputs alone
      "every_N"    "full" for the N-th, 2 N-th … unit, nothing for the others: a dial between the two
      "selective"  keeps the outputs of matrix products and attention as well, and computes the rest again: norms,
                   modulation, activations, rotary embedding, and tensor parallelism's collectives
    To be called before FSDP is applied, so that the gathered weights are there when a unit is computed again, and
    before the units are compiled.
    Raises: ValueError for another mode.
    """
    match = re.fullmatch(r"none|full|selective|every_([1-9]\d*)", mode)
    if match is None:
        raise ValueError(f"--activation_checkpointing must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "none":
        return
    every = int(match[1] or 1)
    options = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
    modules = [module for pattern in units for _, module in matching_modules(model, pattern)]
    for module in modules[every - 1 :: every]:
        module.forward = partial(checkpoint, module.forward, **options)
