"""Low-rank adapters in a model that is otherwise frozen (LoRA, arXiv 2106.09685), through `peft`.

An adapted layer computes base(x) + alpha / rank · B A x, with A (rank, in) and B (out, rank).  `peft` puts the layer
one level down, which this module hides: to the rest, base and adapter have the names that they have in a file,
`….to_q.weight`, `….to_q.lora_A.weight` and `….to_q.lora_B.weight`.
"""

import logging
import re
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.fingerprint import fingerprint
from parallel.frozen_base import FrozenLinear, compressed_layers, linear_layers
from parallel.module_patterns import matching_modules
from parallel.tensor_parallel import cut_low_rank
from utils.console import ONCE

log = logging.getLogger("train")
_ADAPTER = "default"  # `peft` can hold several, by name; we need one
_RECORD = "_base_record"  # attribute of a model whose base is in fewer bits: what the base was
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
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in model.named_modules() if name in names}
    if small := [name for name, shape in shapes.items() if rank > min(shape)]:
        log.warning(
            "--lora_rank %d is more than %d of the %d adapted layers have of their own, such as %s, %d x %d: a lower "
            "one learns the same there", rank, len(small), len(shapes), small[0], *shapes[small[0]], extra=ONCE,
        )  # fmt: skip
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


def compress_base(model: nn.Module, kept_as: str, parts: Iterable[str], device: torch.device) -> None:
    """Let the frozen linear layers of a model with adapters, on the meta device, be kept in fewer bits.

    kept_as: "auto" changes nothing: the base stays in the dtype that `apply_lora` gave it; or a format of
    `parallel.frozen_base.FORMATS`.  parts: name patterns of the modules whose layers are meant.  device: where they are
    to be.
    To be called after tensor parallelism and adapters, before activation checkpointing, compilation and FSDP;
    `parallel.init_weights.materialize` fills the layers on the CPU and moves them one by one, each in its few bits.
    Raises: ValueError for layers that are cut, or multiply in another way.
    """
    if kept_as == "auto":
        return
    for name, layer, owner in linear_layers(model, parts):
        if layer.weight.requires_grad or kept_as == "bfloat16" and layer.weight.dtype == torch.bfloat16:
            continue
        if isinstance(layer.weight, DTensor):
            raise ValueError(f"--lora_base {kept_as} keeps layers whole on every rank, and --tp cuts them; use --tp 1")
        if type(layer) is not nn.Linear:
            raise ValueError(f"--lora_base {kept_as} is for plain linear layers, {name} is a {type(layer).__name__}")
        setattr(owner, name.rpartition(".")[2], FrozenLinear(layer, kept_as, device))


def released_name(name: str) -> str:
    """Return a parameter's name in files and checkpoints, without what `peft` puts into it."""
    return _IN_ADAPTER.sub(r".\1.", name).replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name, in a model or a file, belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters but the adapters', by released name; without adapters, all there are.

    With them the weights of layers that are to be kept in fewer bits (`parallel.frozen_base`) and are not yet.
    """
    found = {released_name(name): p for name, p in model.named_parameters() if not is_adapter(name)}
    waiting = {name: layer for name, layer in compressed_layers(model).items() if not layer.is_narrow}
    return found | {released_name(f"{name}.weight"): layer.stored for name, layer in waiting.items()}


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

    The base itself is not in it: `{"base": {"dtype": …, "fingerprint": …}}` tells whether another one is the same.  Of
    a base in fewer bits the fingerprint is that of the weights before, and "kept_as" says what they became.
    """
    if (record := getattr(model, _RECORD, None)) is not None:
        return record
    if not any(is_adapter(name) for name, _ in model.named_parameters()):
        return {}
    layers, base = compressed_layers(model), base_parameters(model)
    dtype = str(next(iter(base.values())).dtype).removeprefix("torch.")
    on_device = {released_name(f"{name}.weight"): layer.on_device for name, layer in layers.items()}
    seen = ((name, on_device[name]() if name in on_device else tensor) for name, tensor in base.items())
    record = {"dtype": dtype, "fingerprint": fingerprint(seen)}
    return {"base": record | ({"kept_as": next(iter(layers.values())).kept_as} if layers else {})}


def narrow_base(model: nn.Module) -> None:
    """Keep the layers that `parallel.frozen_base.compress_base` chose in their few bits; every rank takes part.

    What `base_record` says of the weights is found before.  Raises: ValueError if a weight does not go into the format.
    """
    if layers := compressed_layers(model):
        setattr(model, _RECORD, base_record(model))
        for layer in layers.values():
            layer.narrow()


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
