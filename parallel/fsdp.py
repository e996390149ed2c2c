"""Fully sharded data parallelism (FSDP2): each rank keeps a slice of every parameter, gradient and optimizer state."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallel.module_patterns import matching_modules


def shard_model(
    model: nn.Module,
    units: Iterable[str],
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shard `model` in place over dp_shard; with dp_replicate > 1, copies of the shards are kept in step (HSDP).

    mesh: that of the weights (`parallel.mesh.weights_mesh`), with cp folded into dp_shard.
    units: name patterns; each match is gathered and freed as a whole, and what is left of the model is one more unit.
    param_dtype: of the gathered weights, hence of the computation; the shards keep their own dtype.
    reduce_dtype: in which gradients are summed.
    reshard_after_forward: free a unit's gathered weights between its forward and its backward.
    Gradients are summed over the ranks, not averaged: the loss is to be divided by the global batch size.
    """
    data_mesh = mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    options = {
        "mesh": data_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "reshard_after_forward": reshard_after_forward,
    }
    for pattern in units:
        for _, module in matching_modules(model, pattern):
            fully_shard(module, **options)
    fully_shard(model, **options)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging reduction


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units of a model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free all gathered weights, so that the next forward gathers the shards' present values."""
    for module in fsdp_modules(model):
        module.reshard()
