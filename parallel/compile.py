"""Compilation, one unit at a time: blocks that are alike share what was compiled for the first of them."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from parallel.module_patterns import matching_modules

_MAX_GRAPHS = 32  # of one forward: eight, torch's own limit, are four sizes of two kinds of blocks


def compile_units(model: nn.Module, units: Iterable[str], backend: str | Callable = "inductor") -> None:
    """Compile the forward, and so the backward, of every module that matches one of the name patterns, as one graph.

    To be called after tensor parallelism and activation checkpointing are applied, and before FSDP, whose hooks stay
    outside.  Parameter names stay as they are.
    Sizes are fixed: micro-batches are to be filled to one of few sizes, since each compiles again every kind of unit
    (the last block is one of its own), and torch raises after _MAX_GRAPHS.  Without gradients (validation, sampling)
    the units run uncompiled, at any size.
    """
    for pattern in units:
        for _, module in matching_modules(model, pattern):
            module.forward = _compiled(module.forward, backend)


def _compiled(forward: Callable, backend: str | Callable) -> Callable:
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend=backend, recompile_limit=_MAX_GRAPHS)

    def run(*args, **kwargs):
        return (compiled if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return run
