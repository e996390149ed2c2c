"""AdamW over named, possibly sharded parameters, with state that a checkpoint can hold."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def build_adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Return AdamW with weight decay on everything but one-dimensional parameters (biases, norms).

    Its state is there at once, also for parameters that never get a gradient, so that every checkpoint of a model has
    the same keys.
    """
    parameters = [p for _, p in named_parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    for parameter in parameters:
        # What AdamW itself would make at a parameter's first gradient.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state as one flat dict, "parameter name.state name" → tensor."""
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }
