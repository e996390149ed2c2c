"""Tensor parallelism: the ranks of the `tp` axis share every layer's work on the same tokens.

Weights become DTensors on the tp axis, so that FSDP, checkpoints and norms know how they are cut.  The mathematics runs
on plain local tensors with the collectives written out: per linear this costs a third of what dispatching on DTensors
does.  Source: Megatron-LM, arXiv 1909.08053; `_CopyIn` and `_SumOut` are its f and g.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel.module_patterns import matching_modules

# One collective under two names: torch 2.13 warns of the older one, earlier versions know no other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _CopyIn(torch.autograd.Function):
    """Hand equal values to every rank's part of the work; their gradient is the sum of the ranks' parts."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _SumOut(torch.autograd.Function):
    """Add up the ranks' parts of a result; each part's gradient is the whole gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherOut(torch.autograd.Function):
    """Join the ranks' slices of the last dimension; backward each takes its slice, since all have the same gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        slices = x.new_empty(group.size(), *x.shape)
        _all_gather(slices.flatten(0, 1), x.contiguous(), group=group)
        return slices.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None


class ColwiseLinear(nn.Linear):
    """A linear layer of which each rank computes some of the output features."""

    input_is_shared = False  # an enclosing module already sums the input's gradient
    gather_output = False

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in), equal on all ranks → (..., out / tp), or (..., out) with gather_output."""
        if not self.input_is_shared:
            x = _CopyIn.apply(x, self.group)
        out = F.linear(x, self.weight.to_local(), _local_or_none(self.bias))
        return _GatherOut.apply(out, self.group) if self.gather_output else out


class RowwiseLinear(nn.Linear):
    """A linear layer of which each rank has some of the input features, as a column-wise layer before it left them."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in / tp) → (..., out), equal on all ranks."""
        out = _SumOut.apply(F.linear(x, self.weight.to_local()), self.group)
        return out if self.bias is None else out + self.bias.to_local()


class ReplicatedLinear(nn.Linear):
    """A linear layer that every rank computes in full."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to_local(), _local_or_none(self.bias))


class ReplicatedEmbedding(nn.Embedding):
    """An embedding that every rank holds in full."""

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight.to_local(), self.padding_idx)


class ReplicatedRMSNorm(nn.RMSNorm):
    """A norm of values that every rank has in full."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to_local(), self.eps)


class HeadRMSNorm(nn.RMSNorm):
    """A norm over the head dimension: the weight is the same for all heads, but each rank sees only its own heads.

    So each rank's gradient of the weight is one part of the sum over all heads.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, N / tp, Dh)."""
        weight = _CopyIn.apply(self.weight.to_local(), self.group)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


# style → {module class it applies to: (class it becomes, the dimension that each parameter is cut along)}
_STYLES = {
    "colwise": {nn.Linear: (ColwiseLinear, {"weight": 0, "bias": 0})},
    "colwise_gather": {nn.Linear: (ColwiseLinear, {"weight": 0, "bias": 0})},
    "rowwise": {nn.Linear: (RowwiseLinear, {"weight": 1})},
    "head_norm": {nn.RMSNorm: (HeadRMSNorm, {})},
    "replicate": {
        nn.Linear: (ReplicatedLinear, {}),
        nn.Embedding: (ReplicatedEmbedding, {}),
        nn.RMSNorm: (ReplicatedRMSNorm, {}),
    },
}


def apply_tensor_parallel(model: nn.Module, plan: Mapping[str, str], tp_mesh: DeviceMesh) -> None:
    """Cut `model` in place over the one-dimensional `tp_mesh`; with a single rank nothing changes.

    plan: module name pattern → style:
      "colwise"         cut along the output features; the output stays local
      "colwise_gather"  the same, and the output is gathered
      "rowwise"         cut along the input features, which come cut; the output is summed
      "head_norm"       replicated norm weight over local heads: its gradient is summed
      "replicate"       replicated weights, ordinary mathematics
      "joint_input"     on a module around column-wise layers that read its tensor arguments: the arguments' gradients
                        are summed once for all these layers instead of once for each
    Weights must be equal on all ranks, or on the meta device.
    Raises: ValueError if a dimension is not divisible, or a parameter is not in the plan.
    """
    if tp_mesh.size() == 1:
        return
    joint: list[str] = []
    for pattern, style in plan.items():
        for name, module in matching_modules(model, pattern):
            if style == "joint_input":
                _share_inputs(module, tp_mesh.get_group())
                joint.append(name + ".")
            else:
                _cut(name, module, style, tp_mesh)
    for name, module in model.named_modules():
        if isinstance(module, ColwiseLinear):
            module.input_is_shared = name.startswith(tuple(joint))
    if missed := [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]:
        raise ValueError(f"the tensor-parallel plan leaves out {len(missed)} parameters, first {missed[0]}")


def _cut(name: str, module: nn.Module, style: str, tp_mesh: DeviceMesh) -> None:
    """Turn a module into its tensor-parallel form, and its parameters into DTensors."""
    if type(module) not in _STYLES.get(style, {}):
        raise ValueError(f"tensor-parallel style {style!r} does not apply to {name}, a {type(module).__name__}")
    module.__class__, cut_dims = _STYLES[style][type(module)]
    module.group = tp_mesh.get_group()
    if style == "colwise_gather":
        module.gather_output = True
    for parameter_name, parameter in list(module.named_parameters(recurse=False)):
        dim = cut_dims.get(parameter_name)
        if dim is not None and parameter.shape[dim] % tp_mesh.size():
            raise ValueError(
                f"--tp {tp_mesh.size()} does not divide dimension {dim} of {name}.{parameter_name}, "
                f"{tuple(parameter.shape)}; use a divisor of {parameter.shape[dim]}"
            )
        module.register_parameter(parameter_name, _distribute(parameter, dim, tp_mesh))


def _distribute(parameter: nn.Parameter, dim: int | None, tp_mesh: DeviceMesh) -> nn.Parameter:
    """Return the DTensor parameter of which this rank keeps its chunk of dimension `dim`, or all if None."""
    local, placement = parameter.detach(), Replicate()
    if dim is not None:
        local = local.chunk(tp_mesh.size(), dim)[tp_mesh.get_local_rank()]
        local, placement = local.clone(memory_format=torch.contiguous_format), Shard(dim)
    cut = DTensor.from_local(
        local, tp_mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)


def _share_inputs(module: nn.Module, group: dist.ProcessGroup) -> None:
    def copy_in(_, args: tuple) -> tuple:
        return tuple(_CopyIn.apply(x, group) if isinstance(x, Tensor) and x.requires_grad else x for x in args)

    module.register_forward_pre_hook(copy_in)


def _local_or_none(tensor: DTensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to_local()
