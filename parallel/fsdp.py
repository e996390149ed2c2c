"""Fully sharded data parallelism (FSDP2): each rank keeps a slice of every parameter, gradient and optimizer state."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from parallel.module_patterns import matching_modules


def shard_model(
    model: nn.Module,
    units: Iterable[str],
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    num_prefetch: int = 0,
    cpu_offload: bool = False,
) -> None:
    """Shard `model` in place over dp_shard; with dp_replicate > 1, copies of the shards are kept in step (HSDP).

    mesh: that of the weights (`parallel.mesh.weights_mesh`), with cp folded into dp_shard.
    units: name patterns; each match is gathered and freed as a whole, and what is left of the model is one more unit.
    param_dtype: of the gathered weights, hence of the computation; the shards keep their own dtype.
    reduce_dtype: in which gradients are summed.
    reshard_after_forward: free a unit's gathered weights between its forward and its backward.
    num_prefetch: how many units ahead of the running one are gathered, in forward and backward alike, in the order of
    `units`; 0 leaves it to FSDP: none in forward, where the host runs ahead by itself, and one in backward.
    cpu_offload: the shards, their gradients and hence the optimizer's state stay in host memory, and the model is to be
    materialized there; a unit's shards are copied to the device to be gathered.  On a CPU device nothing moves.
    Gradients are summed over the ranks, not averaged: the loss is to be divided by the global batch size.
    Raises: ValueError for a negative num_prefetch.
    """
    if num_prefetch < 0:
        raise ValueError(f"--num_prefetch counts units to gather ahead, at least 0, got {num_prefetch}")
    data_mesh = mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    options = {
        "mesh": data_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy(),
    }
    modules = [module for pattern in units for _, module in matching_modules(model, pattern)]
    for module in (*modules, model):  # the model last: it takes what the units left
        fully_shard(module, **options)
    if num_prefetch:
        _prefetch([model, *modules], num_prefetch, FSDPModule.set_modules_to_forward_prefetch)
        _prefetch([model, *reversed(modules)], num_prefetch, FSDPModule.set_modules_to_backward_prefetch)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging reduction


def _prefetch(
    modules: list[FSDPModule], num_ahead: int, set_prefetch: Callable[[FSDPModule, list[FSDPModule]], None]
) -> None:
    """Let each module, given in the order in which they run, gather the weights of those that run after it."""
    for i, module in enumerate(modules):
        set_prefetch(module, modules[i + 1 : i + 1 + num_ahead])


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units of a model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def shard_frozen(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module that is not trained over all ranks of its mesh axis, as one unit; `gathered` makes it usable.

    mesh: one axis.  Each rank keeps a slice in place of its copy, which has to be there, the same on every rank.
    """
    fully_shard(module, mesh=mesh, reshard_after_forward=False)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Hold a module whole: of one that `shard_frozen` cut, its slices are gathered before and freed after.

    A collective: every rank enters equally often, and may then run the module as often as it likes.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def reshard(model: nn.Module) -> None:
    """Free all gathered weights, so that the next forward gathers the shards' present values."""
    for module in fsdp_modules(model):
        module.reshard()
