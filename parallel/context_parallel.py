"""Token parallelism: the ranks that work on the same samples share out their tokens.

Two axes of the mesh may do so.  `cp` is context parallelism: each rank keeps its tokens in all layers, and attention
exchanges tokens for heads and back (Ulysses, arXiv 2309.14509).  `tp` with sequence parallelism keeps the residual
stream cut between the tensor-parallel layers, which gather and scatter it (`parallel.tensor_parallel`).
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.collectives import exchange, gather
from parallel.module_patterns import matching_modules


def apply_token_parallel(
    model: nn.Module,
    shard_inputs: Callable,
    attentions: Iterable[str],
    cp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh | None = None,
) -> None:
    """Cut the tokens of every forward over the cp axis and, for sequence parallelism, the tp axis too.

    shard_inputs(num_groups, group_size, index, *inputs) → the inputs of one of num_groups · group_size pieces; the
    group_size pieces of a group (the tp ranks) are neighbours, and attention runs over all groups (the cp ranks).
    attentions: name patterns of modules with the attributes `tokens_to_heads` and `heads_to_tokens`.
    The model's output must have a row for each row of its first input; the caller gets all of them, on every rank.
    Gradients of parameters are left as each cp rank's part: FSDP sums them over dp_shard and cp together.
    Call it before FSDP is applied.
    """
    group_size, part = (tp_mesh.size(), tp_mesh.get_local_rank()) if tp_mesh else (1, 0)
    if cp_mesh.size() * group_size == 1:
        return
    shard = partial(shard_inputs, cp_mesh.size(), group_size, cp_mesh.get_local_rank() * group_size + part)
    groups = [mesh.get_group() for mesh in (tp_mesh, cp_mesh) if mesh]
    model.forward = partial(_forward_of_a_piece, model.forward, shard, groups)
    if cp_mesh.size() == 1:
        return
    for pattern in attentions:
        for _, module in matching_modules(model, pattern):
            module.tokens_to_heads = partial(_tokens_to_heads, group=cp_mesh.get_group())
            module.heads_to_tokens = partial(_heads_to_tokens, group=cp_mesh.get_group())


def _forward_of_a_piece(forward: Callable, shard: Callable, groups: Iterable[dist.ProcessGroup], *inputs) -> Tensor:
    """Compute one piece of the tokens and return the rows of all, with which all ranks go on alike."""
    rows = forward(*shard(*inputs))
    for group in groups:
        rows = gather(rows, group, 0, sum_gradients=False)
    return rows[: len(inputs[0])].clone()  # FSDP hangs a hook on the output, which must not be a view


def _tokens_to_heads(*tensors: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Exchange some tokens of all heads for all of some: n × (tokens, N, Dh) → n × (cp · tokens, N / cp, Dh).

    One collective for all n.
    """
    stacked = torch.stack(tensors, dim=1)  # (tokens, n, N, Dh)
    by_rank = stacked.unflatten(2, (group.size(), -1)).movedim(2, 0)  # (cp, tokens, n, N / cp, Dh)
    return exchange(by_rank, group).flatten(0, 1).unbind(1)


def _heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all tokens of some heads for some tokens of all heads: (cp · tokens, N / cp, Dh) → (tokens, N, Dh)."""
    by_rank = exchange(x.unflatten(0, (group.size(), -1)), group)  # (cp, tokens, N / cp, Dh)
    return by_rank.movedim(0, 1).flatten(1, 2)
