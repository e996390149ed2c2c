"""Optimizers over named, possibly sharded parameters, with state that a checkpoint can hold.

The state is there at once, also for parameters that never get a gradient, so that every checkpoint of a model has the
same keys.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate

from utils.muon import Muon

OPTIMIZERS = ("adamw", "adamw8bit", "muon")
_TORCHAO = "torchao==0.18.0"
_BLOCK = 256  # values of 8-bit state that share a scale

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class Together:
    """Several optimizers, each with parameters of its own, used as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        """The groups of all."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict:
        """The state of all."""
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    def step(self) -> None:
        """Let each take a step."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def build_optimizer(
    name: str,
    named_parameters: NamedParameters,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    hidden: Iterable[str] = (),
    copies: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer | Together:
    """Return an optimizer; weight decay is for all but one-dimensional parameters (biases, norms).

    name:
      "adamw"      torch's, fused
      "adamw8bit"  torchao's: the state of large matrices in 8 bits a value (arXiv 2110.02861); 2 bytes a weight, not 8
      "muon"       for matrices in modules that match a pattern of `hidden`; AdamW for all others: embeddings, the first
                   and last layers, biases and norms
    copies: ranks that hold the same parameters, whole, and get the same gradients: they share Muon's work out.
    To be called when the parameters have their memory.
    Raises: ValueError for another name, if a package is missing, or if there is nothing for Muon.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    parameters = [(n, p) for n, p in named_parameters if p.requires_grad]
    if name == "adamw":
        return build_adamw(parameters, lr, betas, eps, weight_decay)
    if name == "adamw8bit":
        return _build_adamw8bit(parameters, lr, betas, eps, weight_decay)
    patterns = [f"{pattern}.*" for pattern in hidden]
    matrices = {n: p for n, p in parameters if p.ndim == 2 and any(fnmatchcase(n, pattern) for pattern in patterns)}
    if not matrices:
        raise ValueError(f"--optimizer muon is for matrices inside {list(hidden)}, and the model has none there")
    others = [(n, p) for n, p in parameters if n not in matrices]
    return Together(
        Muon(matrices.values(), lr, weight_decay, copies=copies), build_adamw(others, lr, betas, eps, weight_decay)
    )


def build_adamw(
    named_parameters: NamedParameters, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Return torch's AdamW; see `build_optimizer`."""
    groups = _decay_groups(named_parameters, weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    _fill_adamw_state(optimizer)
    return optimizer


def build_zero_adamw(
    named_parameters: NamedParameters, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> ZeroRedundancyOptimizer:
    """Return torch's AdamW with its state shared out over the ranks (ZeRO-1, arXiv 1910.02054), for DDP's copies.

    Each rank keeps the state of whole parameters, about as many numbers as the others, updates these parameters and
    sends them to all.  A step is the same, number by number, as that of `build_adamw`.
    """
    optimizer = ZeroRedundancyOptimizer(
        _decay_groups(named_parameters, weight_decay), torch.optim.AdamW, lr=lr, betas=betas, eps=eps, fused=True
    )
    _fill_adamw_state(optimizer.optim)
    return optimizer


def _fill_adamw_state(optimizer: torch.optim.Optimizer) -> None:
    """Make, for every parameter, the state that AdamW would make at its first gradient."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }


def _build_adamw8bit(
    named_parameters: NamedParameters, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(f"--optimizer adamw8bit needs a package: pip install {_TORCHAO} ({error})") from error
    groups = _decay_groups(named_parameters, weight_decay)
    optimizer = AdamW8bit(groups, lr=lr, betas=betas, eps=eps, block_size=_BLOCK)
    for parameter in (p for group in groups for p in group["params"]):
        state = {"step": torch.tensor(0.0)}
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if _blocks_lie_in_rows(parameter):
                state[key] = optimizer._new_buffer(parameter, signed)  # as its step would; small ones stay 32-bit
            else:
                state[key] = torch.zeros_like(parameter, requires_grad=False)
        optimizer.state[parameter] = state
    return optimizer


def _blocks_lie_in_rows(parameter: Tensor) -> bool:
    """Return whether no block of 8-bit state goes over a row's end, so that state can move to other shards with rows.

    Shards must be even as well: then all ranks decide alike.
    """
    local, num_shards = _local(parameter), 1
    if isinstance(parameter, DTensor):
        axes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        for size, placement in axes:
            num_shards *= 1 if isinstance(placement, Replicate) else size
    is_even = local.numel() * num_shards == parameter.numel()
    return parameter.ndim == 2 and is_even and local.shape[1] % _BLOCK == 0


def _decay_groups(named_parameters: NamedParameters, weight_decay: float) -> list[dict]:
    parameters = [p for _, p in named_parameters if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer | Together, lr: float, adamw_share: float = 1.0) -> None:
    """Let the next steps of all parameters use `lr`; of what Muon leaves to AdamW, so large a share of it."""
    for one in getattr(optimizer, "optimizers", [optimizer]):
        is_left = isinstance(optimizer, Together) and not isinstance(one, Muon)
        own = lr * adamw_share if is_left else lr
        for group in one.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(own)
            else:
                group["lr"] = own


def optimizer_tensors(
    optimizer: torch.optim.Optimizer | Together, model: nn.Module | Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the optimizer's state as one flat dict, "parameter name.state name" → tensor; filling these restores it.

    model: gives the parameters' names; or the parameters under names of the caller's choice.
    Of an optimizer whose state is shared out over the ranks, what lies on this one.

    8-bit state is two tensors: "….codes" uint8, cut as the parameter is, and "….scale" float32, (rows, blocks a row).
    """
    # ZeRO keeps its part in an optimizer of its own.
    state, tensors = getattr(optimizer, "optim", optimizer).state, {}
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else model.items():
        for key, tensor in state.get(parameter, {}).items():
            local = _local(tensor)
            if hasattr(local, "codes"):
                codes, scale = local.codes, local.scale.view(len(local.codes), -1)
                tensors[f"{name}.{key}.codes"] = _cut_like(parameter, codes, parameter.shape[1])
                tensors[f"{name}.{key}.scale"] = _cut_like(parameter, scale, parameter.shape[1] // _BLOCK)
            else:
                tensors[f"{name}.{key}"] = tensor
    return tensors


def _cut_like(parameter: Tensor, local: Tensor, num_columns: int) -> Tensor:
    """Return the (rows, num_columns) tensor that is cut as the matrix `parameter` is and has this part here."""
    if not isinstance(parameter, DTensor):
        return local
    cut = {"shape": (parameter.shape[0], num_columns), "stride": (num_columns, 1), "run_check": False}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, **cut)


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
