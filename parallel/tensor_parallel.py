"""Tensor parallelism: a plan (module name pattern → style) applied with DTensor.

Styles:
  colwise          split the output features; the caller sees its local part
  colwise_gather   split the output features, gather them again: for small outputs of large weights
  rowwise          split the input features, which the caller already holds in parts; the outputs are summed
  rowwise_split    split the input features of an input that every rank holds whole; the outputs are summed
  replicate        whole weight and ordinary arithmetic on every rank
  head_norm        whole weight, but each rank applies it to its own heads: the gradient is a part of the sum
  joint_input      img and txt enter the attention as replicated DTensors, so that the backward pass sums the
                   gradients of q, k and v once a stream, not three times
"""

import functools

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from parallel.module_names import matching_modules


class _WholeWeight(ParallelStyle):
    """Register the weights as replicated DTensors, but let the module compute with plain local tensors.

    grad_placement: what the local gradient is on each rank, the whole (Replicate) or a part of the sum (Partial).
    """

    def __init__(self, grad_placement: Placement):
        super().__init__()
        self.grad_placement = grad_placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.forward = functools.partial(_forward_with_local_weights, module, module.forward, self.grad_placement)
        return module


def _forward_with_local_weights(module: nn.Module, forward, grad_placement: Placement, *args):
    """Call `forward` while the module's parameters are their local tensors."""
    parameters = dict(module._parameters)
    try:
        for name, parameter in parameters.items():
            module._parameters[name] = parameter.to_local(grad_placements=[grad_placement])
        return forward(*args)
    finally:
        module._parameters.update(parameters)


_STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda: RowwiseParallel(),
    "rowwise_split": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicate": lambda: _WholeWeight(Replicate()),
    "head_norm": lambda: _WholeWeight(Partial()),
    "joint_input": lambda: PrepareModuleInput(
        input_layouts=(Replicate(), Replicate(), None, None),
        desired_input_layouts=(Replicate(), Replicate(), None, None),
    ),
}


def apply_tensor_parallel(model: nn.Module, plan: dict[str, str], tp_mesh: DeviceMesh) -> None:
    """Apply `plan` to the model in place, before FSDP; nothing happens on a tp axis of size 1.

    Afterwards every parameter is a DTensor on the tp axis.
    Raises: ValueError if a parameter is left out, which would silently be trained apart on each rank.
    """
    if tp_mesh.size() == 1:
        return
    for pattern, style in plan.items():
        for _, module in matching_modules(model, pattern):
            parallelize_module(module, tp_mesh, _STYLES[style]())
    left_out = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left_out:
        raise ValueError(f"the tensor-parallel plan leaves out {len(left_out)} parameters, first {left_out[:3]}")
