"""Arithmetic and memory traffic of one operator call, from its arguments' shapes."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_ATTENTION_PRODUCTS = {"_varlen_attn": 2, "_varlen_attn_backward": 5}  # a flash backward computes the scores again


def operator_flops(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict, result, attention_lens: Sequence[int]
) -> int:
    """Return the operations of a matrix product or attention, 0 for any other operator; a multiply-add is two.

    attention_lens: tokens of each sample, since a variable-length call knows them only as data.
    """
    name = func.name().split("::")[-1].split(".")[0]
    if "scaled_dot_product" in name:
        batch, heads, queries, channels = (args[1] if "backward" in name else args[0]).shape
        return 2 * (5 if "backward" in name else 2) * batch * heads * queries**2 * channels
    if name in _ATTENTION_PRODUCTS:
        _, heads, channels = next(a.shape for a in args if isinstance(a, Tensor) and a.ndim == 3)
        return 2 * _ATTENTION_PRODUCTS[name] * heads * channels * sum(n * n for n in attention_lens)
    count = flop_registry.get(func.overloadpacket)
    return count(*args, **kwargs, out_val=result) if count else 0


def operator_traffic(func: torch._ops.OpOverload, args: tuple, kwargs: dict, outputs: Sequence[Tensor]) -> int:
    """Return the bytes that the operator reads and writes; 0 for views, allocations and collectives."""
    name = func.name().split("::")[-1].split(".")[0]
    if func.is_view or name in _ALLOCATES or func.namespace in ("c10d", "_c10d_functional"):
        return 0
    if name == "all_gather_copy_in":  # it returns the whole buffer, of which it fills its own part
        return 2 * _num_bytes(args[0])
    read, mutated = [], []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        read.append(value)
        if argument.alias_info is not None and argument.alias_info.is_write:
            mutated.append(value)
    read += [value for name, value in kwargs.items() if name != "out"]
    return _num_bytes(read) + (_num_bytes(outputs) or _num_bytes((mutated, kwargs.get("out"))))


def _num_bytes(values) -> int:
    """Return the bytes of the elements of all tensors in `values`; an expanded one is read from its smaller storage."""
    return sum(
        min(t.numel() * t.element_size(), t.untyped_storage().nbytes())
        for t in tree_leaves(values)
        if isinstance(t, Tensor)
    )
