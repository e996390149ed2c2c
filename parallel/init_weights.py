"""A model's first values: released weights, and for the rest a draw that does not depend on how the model is cut."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.frozen_base import compressed_layers
from parallel.lora import base_parameters, init_adapter, is_adapter, narrow_base, released_name
from parallel.slices import local_slice
from parallel.weights import load_weights
from utils.random_streams import torch_generator


def materialize(
    model: nn.Module,
    device: torch.device,
    init: Callable[[str, Tensor, torch.Generator], None],
    seed: int,
    weights: str | Path | None = None,
    optional: Iterable[str] = (),
) -> None:
    """Give a model built on the meta device its memory, and every parameter its first values.

    init(name, parameter, generator): fills one full parameter, a plain CPU tensor, in place.
    weights: where released weights lie (see `parallel.weights.load_weights`); then only what they lack is drawn.
    optional: names that they may lack.  Names are the released ones, also where layers have adapters (`parallel.lora`),
    which are always drawn, in a way of their own.  Layers to be kept in fewer bits (`parallel.frozen_base`) are filled
    on the CPU and brought to their device one by one.
    Each drawn parameter has a random stream of its own, from (seed, name): values are the same on every mesh.  At any
    time a rank holds one full parameter that is drawn beside its shards.
    Raises: ValueError if the weights do not fit the model or cannot be read.
    """
    assert not list(model.buffers()), "a buffer would be left without values"
    model.to_empty(device=device)
    for layer in compressed_layers(model).values():
        layer.stored = torch.empty_like(layer.stored, device="cpu")
    loaded = load_weights(model, weights, optional) if weights is not None else ()
    with torch.no_grad():
        adapters = {released_name(name): p for name, p in model.named_parameters() if is_adapter(name)}
        for name, parameter in (base_parameters(model) | adapters).items():
            if name in loaded:
                continue
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            draw = init_adapter if is_adapter(name) else init
            draw(name, full, torch_generator(seed, 0, name, "init_weights"))
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(full[local_slice(parameter)])
    narrow_base(model)
