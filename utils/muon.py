"""Muon: momentum whose matrices are made orthogonal, also where each rank has but a slice of each matrix.

torch.optim.Muon does this for whole matrices.  The orthogonal form of a matrix is not made of those of its slices, so
here the ranks that share a set of like matrices swap slices: each gets some of the matrices whole, works on these, and
hands the slices back.  No matrix is worked on twice, and the result is the same on every mesh.  Of copies, as DDP has
them, the ranks share the work out as well.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

NUM_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of x → a x + b x³ + c x⁵ on the singular values
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13

Cut = tuple[DeviceMesh, int, tuple[int, int]]  # a mesh of one axis, the dimension it cuts, the shape before that


def orthogonalize(matrix: Tensor) -> Tensor:
    """Bring all singular values of a (rows, columns) matrix near 1: five Newton-Schulz iterations in bfloat16.

    Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", with torch.optim.Muon's numbers.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, with decoupled weight decay, for weight matrices.

    The step has the size of one of AdamW, so that both take the same learning rate and weight decay (arXiv 2502.16982,
    section 2.2).  The state is complete from the start.

    copies: ranks that all hold the same whole matrices and gradients: each matrix is then worked on by one of them, and
    the step is bit for bit the one without.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        copies: dist.ProcessGroup | None = None,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.copies = copies
        for parameter in (p for group in self.param_groups for p in group["params"]):
            assert parameter.ndim == 2
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    @torch.no_grad()
    def step(self) -> None:
        """Take one step; parameters without a gradient, on all ranks alike, stay as they are."""
        for group in self.param_groups:
            alike, whole = defaultdict(list), []
            for parameter in (p for p in group["params"] if p.grad is not None):
                if isinstance(parameter, DTensor):
                    cut = parameter.device_mesh, parameter.placements
                    alike[tuple(parameter.shape), cut].append(parameter)
                else:
                    whole.append(parameter)
            for parameters in alike.values():
                cuts = _cuts(parameters[0])
                num_ranks = math.prod(mesh.size() for mesh, _, _ in cuts)  # so many matrices, one for each
                for first in range(0, len(parameters), num_ranks):
                    chosen = parameters[first : first + num_ranks]
                    stack = torch.stack([self._direction(parameter, group) for parameter in chosen])
                    updates = _orthogonalize_shards(stack.to(_device(chosen[0])), cuts)
                    for parameter, update in zip(chosen, updates, strict=True):
                        _move(parameter, update, group)
            directions = [self._direction(parameter, group) for parameter in whole]
            for parameter, update in zip(whole, _orthogonalize_shared(directions, self.copies), strict=True):
                _move(parameter, update, group)

    def _direction(self, parameter: Tensor, group: dict) -> Tensor:
        """Take the gradient into the momentum; return what is to be made orthogonal, as it lies here, in bfloat16."""
        gradient, average = _local(parameter.grad), _local(self.state[parameter]["momentum_buffer"])
        average.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"]).bfloat16()


def _move(parameter: Tensor, update: Tensor, group: dict) -> None:
    local = _local(parameter)
    local.mul_(1 - group["lr"] * group["weight_decay"])
    local.add_(update.to(local.device), alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def _orthogonalize_shared(matrices: list[Tensor], copies: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the orthogonal form of whole matrices, bfloat16, which are the same on all ranks of `copies`.

    Each rank works on matrices that take about as long as those of the others, and sends its own to all.
    """
    num_ranks = dist.get_world_size(copies) if copies is not None else 1
    if num_ranks == 1 or not matrices:
        return [orthogonalize(matrix) for matrix in matrices]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    costs = [matrix.numel() * min(matrix.shape) for matrix in matrices]
    for i in sorted(range(len(matrices)), key=lambda i: -costs[i]):
        owner = work.index(min(work))
        shares[owner].append(i)
        work[owner] += costs[i]
    length = max(sum(matrices[i].numel() for i in share) for share in shares)
    mine = matrices[0].new_zeros(length)
    flat = [orthogonalize(matrices[i]).flatten() for i in shares[dist.get_rank(copies)]]
    if flat:
        torch.cat(flat, out=mine[: sum(map(len, flat))])
    sent = mine.new_empty(num_ranks * length)
    _all_gather(sent.view(torch.uint8), mine.view(torch.uint8), group=copies)
    updates = list(matrices)
    for share, part in zip(shares, sent.split(length), strict=True):
        pieces = part.split([*(matrices[i].numel() for i in share), length - sum(matrices[i].numel() for i in share)])
        for i, piece in zip(share, pieces[:-1], strict=True):
            updates[i] = piece.view(matrices[i].shape)
    return updates


def _cuts(parameter: Tensor) -> list[Cut]:
    """Return how a matrix came to its shards, last cut first; FSDP, the left axis, cuts what the right ones left."""
    mesh, shape, cuts = parameter.device_mesh, tuple(parameter.shape), []
    for axis, placement in reversed(list(zip(mesh.mesh_dim_names, parameter.placements, strict=True))):
        size = mesh[axis].size()
        if size > 1 and not isinstance(placement, Replicate):
            cuts.append((mesh[axis], placement.dim, shape))
            shape = tuple(-(-n // size) if dim == placement.dim else n for dim, n in enumerate(shape))
    return cuts[::-1]


def _orthogonalize_shards(stack: Tensor, cuts: list[Cut]) -> Tensor:
    """stack: (matrices, rows, columns), of each matrix the part that `cuts` left to this rank → the same."""
    if not cuts:
        return torch.stack([orthogonalize(matrix) for matrix in stack]) if len(stack) else stack
    (mesh, dim, whole), *others = cuts
    swap = {"shape": (len(stack), *whole), "stride": (whole[0] * whole[1], whole[1], 1), "run_check": False}
    parts = DTensor.from_local(stack, mesh, [Shard(dim + 1)], **swap)
    mine = parts.redistribute(placements=[Shard(0)]).to_local()
    mine = DTensor.from_local(_orthogonalize_shards(mine, others), mesh, [Shard(0)], **swap)
    return mine.redistribute(placements=[Shard(dim + 1)]).to_local()


def _device(parameter: Tensor) -> torch.device | str:
    """Return where matrices are worked on: the mesh's device, also where the shards stay in host memory."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
