"""Weights from scratch that do not depend on how the model is cut."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.slices import local_slice
from utils.random_streams import torch_generator


def materialize(
    model: nn.Module, device: torch.device, init: Callable[[str, Tensor, torch.Generator], None], seed: int
) -> None:
    """Give a model built on the meta device its memory, and every parameter its first values.

    init(name, parameter, generator): fills one full parameter, a plain CPU tensor, in place.
    Each parameter has a random stream of its own, from (seed, name): values are the same on every mesh.  At any time a
    rank holds one full parameter beside its shards.
    """
    assert not list(model.buffers()), "a buffer would be left without values"
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            init(name, full, torch_generator(seed, 0, name, "init_weights"))
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(full[local_slice(parameter)])
