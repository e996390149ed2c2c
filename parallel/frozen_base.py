"""What lies under low-rank adapters kept in fewer bits: bfloat16, int8 or NF4, made wide again wherever it is used.

A layer in fewer bits is whole on every rank, on its device: its weight is no parameter, so FSDP and DDP do not see it.
Source of NF4 and of adapters on top of it: QLoRA, arXiv 2305.14314.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.module_patterns import matching_modules

FORMATS = ("bfloat16", "int8", "nf4")
_TORCHAO = "torchao==0.18.0"
_BLOCK, _SCALE_BLOCK = 64, 256  # of NF4: weights that share a scale, and scales that share theirs; both as in QLoRA


def narrowed(weight: Tensor, kept_as: str) -> Tensor:
    """Return a weight (out, in) in fewer bits: a tensor that `widened` takes.

    kept_as: bfloat16; int8: a scale a row; nf4: 4 bits, a scale for 64 weights, itself in 8 bits.
    Raises: ValueError without torchao, where that is needed, or for a weight that the format cannot hold.
    """
    if kept_as == "bfloat16":
        return weight.to(torch.bfloat16)
    try:
        from torchao.quantization import Int8Tensor, PerRow, to_nf4
    except ImportError as error:
        raise ValueError(f"--lora_base {kept_as} needs a package: pip install {_TORCHAO} ({error})") from error
    if kept_as == "int8":
        return Int8Tensor.from_hp(weight, granularity=PerRow())
    num_blocks, rest = divmod(weight.numel(), _BLOCK)
    shared = _SCALE_BLOCK
    while num_blocks % shared:
        shared //= 2
    if rest:
        raise ValueError(
            f"a layer of {tuple(weight.shape)} cannot be kept as nf4, whose blocks have {_BLOCK} weights; use "
            "--lora_base int8"
        )
    return to_nf4(weight.contiguous(), _BLOCK, shared)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight (out, in) that `narrowed` made."""
    if hasattr(stored, "get_original_weight"):  # torchao's NF4Tensor
        return stored.get_original_weight().to(dtype)
    return stored.dequantize(dtype) if hasattr(stored, "qdata") else stored.to(dtype)  # its Int8Tensor; a plain one


class _Product(torch.autograd.Function):
    """x · Wᵀ + b.  The wide weight is made again for the backward pass: a plain product would keep it until then."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: "FrozenLinear") -> Tensor:
        ctx.layer = layer
        bias = layer.bias
        return F.linear(x, widened(layer.stored, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ widened(ctx.layer.stored, grad.dtype), None


class FrozenLinear(nn.Module):
    """A linear layer whose weight is constant, no parameter, and kept in fewer bits.

    stored: the weight: (out, in) on the CPU or the meta device until `narrow`, then what `narrowed` gives.
    """

    def __init__(self, linear: nn.Linear, kept_as: str, device: torch.device):
        """linear: on the meta device; device: where the weight is to be."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kept_as, self.is_narrow, self._device = kept_as, False, device
        self.bias = linear.bias
        self.stored: Tensor = linear.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        return _Product.apply(x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x, self)

    def on_device(self) -> Tensor:
        """Return the weight as it is before `narrow`, a copy on the layer's device."""
        return self.stored.to(self._device)

    @torch.no_grad()
    def narrow(self) -> None:
        """Keep the weight in fewer bits from now on.  Raises: ValueError if that gives no finite numbers."""
        weight = self.on_device()
        self.stored, self.is_narrow = narrowed(weight, self.kept_as), True
        if not widened(self.stored, weight.dtype).isfinite().all():
            raise ValueError(f"a layer's weights of {tuple(weight.shape)} are not finite as {self.kept_as}")


def compressed_layers(model: nn.Module) -> dict[str, FrozenLinear]:
    """Return the layers that are kept in fewer bits, by the name of each in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}


def empty_layers(model: nn.Module) -> None:
    """Give the layers their memory, in few bits and without values, for plans."""
    for layer in compressed_layers(model).values():
        layer.stored = narrowed(torch.empty_like(layer.stored, device="cpu"), layer.kept_as)


def stored_tensors(model: nn.Module) -> list[Tensor]:
    """Return the plain tensors that hold the weights of the layers in few bits."""
    stored = [layer.stored for layer in compressed_layers(model).values()]
    parts = [list(vars(x).values()) if type(x).__module__.startswith("torchao") else [x] for x in stored]
    return [tensor for part in parts for tensor in part if torch.is_tensor(tensor)]


def linear_weights(model: nn.Module, parts: Iterable[str]) -> frozenset[str]:
    """Return the names of the weights that go into fewer bits, of a model without adapters."""
    return frozenset(f"{name}.weight" for name, _, _ in linear_layers(model, parts))


def linear_layers(model: nn.Module, parts: Iterable[str]) -> list[tuple[str, nn.Linear, nn.Module]]:
    """Return (name, layer, the module that holds it) of every linear layer in modules that match a name pattern."""
    return [
        (f"{owner_name}.{name}", layer, owner)
        for pattern in parts
        for module_name, module in matching_modules(model, pattern)
        for owner_name, owner in module.named_modules(prefix=module_name)
        for name, layer in owner.named_children()
        if isinstance(layer, nn.Linear)
    ]
