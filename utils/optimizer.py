"""AdamW over the master weights, with all its state in place from the start."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def build_adamw(
    named_parameters: Iterable[tuple[str, Tensor]],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> torch.optim.AdamW:
    """Build AdamW with decay on matrices only, not on biases and norms.

    State exists at once, also for parameters that never get a gradient, so that a checkpoint always holds, and always
    expects, the same tensors.
    """
    parameters = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state as {"<parameter name>.<slot>": tensor}, the live tensors, for a checkpoint."""
    return {
        f"{name}.{slot}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }
