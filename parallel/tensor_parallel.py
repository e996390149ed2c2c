"""Tensor parallelism: the ranks of the `tp` axis share every layer's work on the same tokens.

Weights become DTensors on the tp axis, so that FSDP, checkpoints and norms know how they are cut.  The mathematics runs
on plain local tensors with the collectives written out: per linear this costs a third of what dispatching on DTensors
does.  Source: Megatron-LM, arXiv 1909.08053 (`copy_in` and `sum_out` are its f and g) and 2205.05198 (rows).
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel.collectives import copy_in, gather, sum_out, sum_scatter_rows
from parallel.module_patterns import matching_modules


class ColwiseLinear(nn.Linear):
    """A linear layer of which each rank computes some of the output features."""

    input_is_shared = False  # an enclosing module already gathers the input or sums its gradient
    gather_output = False
    by_rows = False  # sequence parallelism: rows are shared out before the input, or after the gathered output

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in), equal on all ranks → (..., out / tp), or (..., out) with gather_output.

        by_rows without gather_output: (rows, in) → (tp · rows, out / tp).
        """
        if not self.input_is_shared:
            cut = self.by_rows and not self.gather_output
            x = gather(x, self.group, 0, sum_gradients=True) if cut else copy_in(x, self.group)
        out = F.linear(x, self.weight.to_local(), _local_or_none(self.bias))
        return gather(out, self.group, -1, sum_gradients=self.by_rows) if self.gather_output else out


class RowwiseLinear(nn.Linear):
    """A linear layer of which each rank has some of the input features, as a column-wise layer before it left them."""

    by_rows = False  # sequence parallelism: each rank keeps some rows of the sum

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in / tp) → (..., out), equal on all ranks; by_rows: (rows, in / tp) → (rows / tp, out)."""
        out = F.linear(x, self.weight.to_local())
        out = sum_scatter_rows(out, self.group) if self.by_rows else sum_out(out, self.group)
        if self.bias is None:
            return out
        bias = self.bias.to_local()
        return out + (copy_in(bias, self.group) if self.by_rows else bias)


class ReplicatedLinear(nn.Linear):
    """A linear layer whose weights every rank holds in full, for all rows or, by_rows, for this rank's."""

    by_rows = False

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to_local(), _local_or_none(self.bias)
        if self.by_rows:
            weight, bias = copy_in(weight, self.group), None if bias is None else copy_in(bias, self.group)
        return F.linear(x, weight, bias)


class ReplicatedEmbedding(nn.Embedding):
    """An embedding that every rank holds in full."""

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight.to_local(), self.padding_idx)


class ReplicatedRMSNorm(nn.RMSNorm):
    """A norm of values that every rank has in full, or, by_rows, of this rank's rows."""

    by_rows = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local()
        weight = copy_in(weight, self.group) if self.by_rows else weight
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class HeadRMSNorm(nn.RMSNorm):
    """A norm over the head dimension: the weight is the same for all heads, but each rank sees only its own heads.

    So each rank's gradient of the weight is one part of the sum over all heads.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, N / tp, Dh)."""
        weight = copy_in(self.weight.to_local(), self.group)
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
      "joint_input"     on a module around column-wise layers that read its real (not complex) tensor arguments: the
                        arguments' gradients are summed once for all these layers instead of once for each
    With "_rows" after the name, the rows of activations are shared out over the ranks (sequence parallelism; see
    `parallel.context_parallel`):
      "colwise_rows"         the input's rows are gathered
      "colwise_gather_rows"  what comes after the gathered output sees this rank's rows only
      "rowwise_rows"         the output is summed and its rows scattered
      "replicate_rows"       ordinary mathematics on this rank's rows
      "joint_input_rows"     the arguments' rows are gathered once for all column-wise layers inside
    Weights must be equal on all ranks, or on the meta device.
    Raises: ValueError if a dimension is not divisible, or a parameter is not in the plan.
    """
    if tp_mesh.size() == 1:
        return
    joint: list[str] = []
    for pattern, style in plan.items():
        for name, module in matching_modules(model, pattern):
            if style in ("joint_input", "joint_input_rows"):
                _share_inputs(module, tp_mesh.get_group(), by_rows=style == "joint_input_rows")
                joint.append(name + ".")
            else:
                _cut(name, module, style, tp_mesh)
    for name, module in model.named_modules():
        if isinstance(module, ColwiseLinear):
            module.input_is_shared = name.startswith(tuple(joint))
    if missed := [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]:
        raise ValueError(f"the tensor-parallel plan leaves out {len(missed)} parameters, first {missed[0]}")


def cut_low_rank(base: nn.Linear, down: nn.Linear, up: nn.Linear) -> None:
    """Cut the factors of a low-rank update so that `up(down(x))` goes with `base(x)`, a layer that has been cut.

    down: in → rank, up: rank → out, both without bias; the rank is never cut.
      column-wise base   `down` is replicated, `up` cut along its output as the base is
      row-wise base      `down` is cut along its input, the result summed, and `up` replicated
      replicated base    both are replicated
    What travels between the ranks is of the width of the rank: the sum of a row-wise `down`, the gradient of what a
    column-wise `up` read.  Where an enclosing module sums the input's gradient already, that gradient is to stay each
    rank's part, and it is the gradient of `down` that is summed.
    """
    tp_mesh, rows = base.weight.device_mesh, "_rows" if base.by_rows else ""
    if isinstance(base, ColwiseLinear):
        reads_parts = base.input_is_shared or (base.by_rows and not base.gather_output)
        _cut("down", down, "replicate_rows" if reads_parts else "replicate", tp_mesh)
        _cut("up", up, ("colwise_gather" if base.gather_output else "colwise") + rows, tp_mesh)
        up.input_is_shared = base.input_is_shared
    elif isinstance(base, RowwiseLinear):
        _cut("down", down, "rowwise" + rows, tp_mesh)
        _cut("up", up, "replicate" + rows, tp_mesh)
    else:
        _cut("down", down, "replicate" + rows, tp_mesh)
        _cut("up", up, "replicate" + rows, tp_mesh)


def _cut(name: str, module: nn.Module, style: str, tp_mesh: DeviceMesh) -> None:
    """Turn a module into its tensor-parallel form, and its parameters into DTensors."""
    base, by_rows = style.removesuffix("_rows"), style.endswith("_rows")
    become, cut_dims = _STYLES.get(base, {}).get(type(module), (None, {}))
    if become is None or (by_rows and not hasattr(become, "by_rows")):
        raise ValueError(f"tensor-parallel style {style!r} does not apply to {name}, a {type(module).__name__}")
    module.__class__, module.group = become, tp_mesh.get_group()
    if base == "colwise_gather":
        module.gather_output = True
    if by_rows:
        module.by_rows = True
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


def _share_inputs(module: nn.Module, group: dist.ProcessGroup, by_rows: bool) -> None:
    def share(x):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return gather(x, group, 0, sum_gradients=True) if by_rows else copy_in(x, group)

    module.register_forward_pre_hook(lambda _, args: tuple(map(share, args)))


def _local_or_none(tensor: DTensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to_local()
