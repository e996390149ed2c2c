"""Matrix products in float8, where the device has units for it."""

from collections.abc import Iterable

import torch
from torch import nn

from parallel.module_patterns import matching_modules

_CAPABILITY = (8, 9)  # CUDA compute capability of the first devices with float8 units
_MULTIPLE = 16  # of which the kernels take features
_TORCHAO = "torchao==0.18.0"


def apply_float8(model: nn.Module, parts: Iterable[str], device: torch.device) -> None:
    """Let the linear layers in modules that match one of the name patterns multiply in float8, forward and backward.

    Every tensor is scaled by its largest value at each use; weights, names and state dict stay as they are.  Tokens
    are padded to what the kernels take.  To be called first of all that changes the model: before activation
    checkpointing, compilation (without which float8 is slower than bfloat16) and FSDP.
    Raises: ValueError on a device without float8, without the package, under tensor parallelism, or if nothing matches.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < _CAPABILITY:
        raise ValueError(
            f"--float8 needs a GPU of compute capability {'.'.join(map(str, _CAPABILITY))} or more (as H100), got "
            f"{device.type if capability is None else '.'.join(map(str, capability))}; leave it out"
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ValueError(f"--float8 needs a package: pip install {_TORCHAO} ({error})") from error
    found = {
        f"{name}.{inner}": layer
        for pattern in parts
        for name, module in matching_modules(model, pattern)
        for inner, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    }
    if cut := [f"{name} is a {type(layer).__name__}" for name, layer in found.items() if type(layer) is not nn.Linear]:
        raise ValueError(f"--float8 is for whole linear layers, and {cut[0]}; use --tp 1")
    fitting = {name for name, x in found.items() if not (x.in_features % _MULTIPLE or x.out_features % _MULTIPLE)}
    if not fitting:
        raise ValueError(f"--float8: no linear layer in {list(parts)} has features that are multiples of {_MULTIPLE}")
    convert_to_float8_training(
        model, config=Float8LinearConfig(pad_inner_dim=True), module_filter_fn=lambda _, name: name in fitting
    )
