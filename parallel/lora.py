"""Low-rank adapters in a model that is otherwise frozen (LoRA, arXiv 2106.09685), through `peft`.

An adapted layer computes base(x) + alpha / rank · B A x, with A (rank, in) and B (out, rank).  `peft` puts the layer
one level down, which this module hides: to the rest, base and adapter have the names that they have in a file,
`….to_q.weight`, `….to_q.lora_A.weight` and `….to_q.lora_B.weight`.
"""

import re
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.fingerprint import fingerprint
from parallel.module_patterns import matching_modules
from parallel.tensor_parallel import cut_low_rank

_ADAPTER = "default"  # `peft` can hold several, by name; we need one
_IN_ADAPTER = re.compile(rf"\.(lora_[AB])\.{_ADAPTER}\.")


class _Dropout(nn.Module):
    """Dropout where gradients are recorded, so that validation and sampling need no switch.

    Its numbers come from torch's global stream, which activation checkpointing puts back when it computes again.
    """

    def __init__(self, share: float):
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.share, training=torch.is_grad_enabled())


def apply_lora(
    model: nn.Module,
    targets: Sequence[str],
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    base_dtype: torch.dtype | None = None,
    skip: Iterable[nn.Parameter] = (),
) -> None:
    """Give linear layers of `model`, which is on the meta device, an adapter each, and freeze all else.

    targets: name patterns of the layers.  skip: parameters; a layer whose weight is one of them gets no adapter.
    dropout: share of an adapter's inputs that is set to zero in training, by torch's global random stream: seed it
    before each micro-batch, alike on tensor-parallel ranks, which must drop the same.
    base_dtype: of all that is frozen; None leaves it.  Adapters are float32, in a float64 model float64.
    To be called after tensor parallelism, which cuts the adapters too (`parallel.tensor_parallel.cut_low_rank`), and
    before activation checkpointing, compilation and FSDP.  `parallel.init_weights.materialize` loads released weights
    into the base and draws the adapters, whose B is zero: the first step sees the base.
    Raises: ValueError for settings out of range and for a pattern that matches no linear layer.
    """
    from peft import LoraConfig, inject_adapter_in_model  # slow to import, and only needed here
    from peft.tuners.lora import Linear

    if rank < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise ValueError(
            f"--lora_rank must be at least 1 to have adapters, --lora_alpha above 0 and --lora_dropout in [0, 1), "
            f"got {rank}, {alpha} and {dropout}"
        )
    assert all(parameter.is_meta for parameter in model.parameters()), "adapters are for a model without memory"
    skipped, names = {id(parameter) for parameter in skip}, []
    for pattern in targets:
        found = [(name, x) for name, x in matching_modules(model, pattern) if isinstance(x, nn.Linear)]
        if not found:
            raise ValueError(f"--lora_targets {pattern!r} matches no linear layer; `*` stands for one part of a name")
        names += [name for name, layer in found if id(layer.weight) not in skipped]
    if not names:
        raise ValueError(f"--lora_targets {' '.join(targets)}: no layer of them has an effect on the loss; name others")
    if base_dtype is not None:
        model.to(base_dtype)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="|".join(map(re.escape, names)),
        init_lora_weights=False,
    )
    inject_adapter_in_model(config, model, _ADAPTER, low_cpu_mem_usage=True)
    adapted = [layer for layer in model.modules() if isinstance(layer, Linear)]
    assert len(adapted) == len(set(names))
    for layer in adapted:
        base = layer.base_layer
        # Ours, as `peft` would make them of the size of what tensor parallelism left of the base, and in its dtype.
        options = {"bias": False, "device": "meta", "dtype": torch.promote_types(base.weight.dtype, torch.float32)}
        down, up = nn.Linear(base.in_features, rank, **options), nn.Linear(rank, base.out_features, **options)
        if isinstance(base.weight, DTensor):
            cut_low_rank(base, down, up)
        layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER] = down, up
        if dropout:
            layer.lora_dropout[_ADAPTER] = _Dropout(dropout)


def released_name(name: str) -> str:
    """Return a parameter's name in files and checkpoints, without what `peft` puts into it."""
    return _IN_ADAPTER.sub(r".\1.", name).replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name, in a model or a file, belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters but the adapters', by released name; without adapters, all there are."""
    return {released_name(name): p for name, p in model.named_parameters() if not is_adapter(name)}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen, by released name: with adapters, these alone."""
    return {released_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def stored_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what a checkpoint holds: of a model with adapters these alone, of another one all, frozen or not."""
    trained = trained_parameters(model)
    if any(is_adapter(name) for name in trained):
        return trained
    return {released_name(name): parameter for name, parameter in model.named_parameters()}


def init_adapter(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Fill one full parameter of an adapter in place: B with zeros, A as `peft` does, uniform within 1 / √in."""
    if ".lora_B." in name:
        parameter.zero_()
    else:
        bound = parameter.shape[1] ** -0.5
        parameter.uniform_(-bound, bound, generator=generator)


def base_record(model: nn.Module) -> dict[str, dict]:
    """Return what a checkpoint says of the frozen base beside the adapters, {} without them; every rank takes part.

    The base itself is not in it: `{"base": {"dtype": …, "fingerprint": …}}` tells whether another one is the same.
    """
    if not any(is_adapter(name) for name, _ in model.named_parameters()):
        return {}
    base = base_parameters(model)
    dtype = str(next(iter(base.values())).dtype).removeprefix("torch.")
    return {"base": {"dtype": dtype, "fingerprint": fingerprint(base.items())}}


def check_base(stored: dict, base: dict, where: str) -> None:
    """Compare what two `base_record`s say.

    stored: a checkpoint's state; base: the record of the base that is here; where: it came from.
    Raises: ValueError if they differ.
    """
    if stored.get("base") != base.get("base"):
        raise ValueError(
            f"the adapters were trained on another base than the weights in {where}: {stored.get('base')} there, "
            f"{base.get('base')} here; name the folder that the run began with, with its weights as they were"
        )
