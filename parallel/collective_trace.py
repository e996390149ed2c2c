"""Collectives as a dispatch mode sees them: what kind, how many bytes, over which ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

# A part of the operator's name → the collective's usual name.
_KINDS = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "allgather": "all_gather", "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all", "all_to_all": "all_to_all",
    "broadcast": "broadcast", "gather": "gather", "scatter": "scatter", "send": "send", "recv": "recv",
}  # fmt: skip
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_SILENT = ("barrier", "wait_tensor")  # they move no data


@dataclass(frozen=True, order=True)
class Collective:
    """One collective call as this rank makes it."""

    kind: str  # all_gather, all_reduce, reduce_scatter, all_to_all …
    num_bytes: int  # of the whole tensor: what is gathered, what is scattered, what is summed, what a rank exchanges
    ranks: tuple[int, ...]  # the group


def read_collective(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Collective | None:
    """Return the collective that an operator call is, or None if it is another operator."""
    if func.namespace not in _NAMESPACES or any(name in func.name() for name in _SILENT):
        return None
    kind = next((kind for part, kind in _KINDS.items() if part in func.name()), func.name())
    sizes, group = [], None
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            group = dist.ProcessGroup.unbox(arg)
        elif isinstance(arg, str):  # functional collectives name their group
            group = dist.distributed_c10d._resolve_process_group(arg)
        else:
            sizes.append(sum(t.numel() * t.element_size() for t in tree_leaves(arg) if isinstance(t, Tensor)))
    assert group is not None, f"{func} names no process group"
    # Of input and output, the larger is the whole tensor.
    return Collective(kind, max(sizes), tuple(dist.get_process_group_ranks(group)))
