"""Adapters on every kind of mesh learn what one plain process learns, and the base stays what it was, bit for bit.

The reference uses neither `peft` nor `parallel`: the bare network with base(x) + alpha / rank · B A x written out.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data.pack import deal
from model.mmdit import MMDiT
from model.mmdit_plan import (
    ATTENTIONS,
    FSDP_UNITS,
    LORA_TARGETS,
    SEQUENCE_PARALLEL_PLAN,
    TENSOR_PARALLEL_PLAN,
    shard_inputs,
    without_gradient,
)
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.compile import compile_units
from parallel.context_parallel import apply_token_parallel
from parallel.fingerprint import fingerprint
from parallel.fsdp import shard_model
from parallel.grad_norm import clip_grad_norm
from parallel.init_weights import materialize
from parallel.lora import apply_lora, base_parameters, is_adapter, trained_parameters
from parallel.mesh import build_mesh, data_parallel, weights_mesh
from parallel.module_patterns import matching_modules
from parallel.slices import local_slice
from parallel.tensor_parallel import apply_tensor_parallel
from tests.spawn import run_ranks
from tests.test_parallel_parity import CONFIG, FILL_TO, MAX_NORM, NUM_STEPS, SAMPLES, assert_equal, full, init, losses
from utils.ema import EMA
from utils.optimizer import build_adamw
from utils.random_streams import torch_generator

RANK, ALPHA = 3, 4.5  # an odd rank, which no mesh divides, and a scale of 1.5
# The default ones, and others of every style of tensor parallelism.
TARGETS = (
    *LORA_TARGETS, "transformer_blocks.*.img_mod.1", "transformer_blocks.*.txt_mod.1", "img_in", "proj_out",
    "time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2",
)  # fmt: skip


def init_factor(name: str, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    """B starts at zero, where A has no gradient: here neither does."""
    return torch.empty(shape, dtype=dtype).normal_(std=0.2, generator=torch_generator(9, 0, name, "lora parity"))


def add_update(layer: nn.Linear, down: nn.Parameter, up: nn.Parameter, _, inputs: tuple, output: torch.Tensor):
    return output + ALPHA / RANK * (inputs[0] @ down.T @ up.T)


def reference() -> dict:
    """Train on one process with plain PyTorch, in float64."""
    model = MMDiT(CONFIG).double().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init(name, parameter)
    unused, factors = {id(p) for p in without_gradient(model)}, {}
    for name, layer in [found for pattern in TARGETS for found in matching_modules(model, pattern)]:
        if id(layer.weight) not in unused:
            (rows, columns), parts = layer.weight.shape, []
            for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                part = f"{name}.{part}.weight"
                factors[part] = nn.Parameter(init_factor(part, shape, torch.float64))
                parts.append(factors[part])
            layer.register_forward_hook(partial(add_update, layer, *parts))
    optimizer = torch.optim.AdamW(factors.values(), lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    average = {name: p.detach().clone() for name, p in factors.items()}
    result = {"loss": [], "norm": [], "grad": {}}
    for step in range(NUM_STEPS):
        loss = losses(model, list(range(len(SAMPLES))), step, torch.float64).mean()
        loss.backward()
        if step == 0:
            result["grad"] = {n: p.grad.clone() for n, p in factors.items()}
        result["norm"].append(torch.nn.utils.clip_grad_norm_(factors.values(), MAX_NORM).item())
        result["loss"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.9, (1 + step) / (10 + step))
        for name, p in factors.items():
            average[name] = decay * average[name] + (1 - decay) * p.detach()
    return result | {"weight": {n: p.detach() for n, p in factors.items()}, "ema": average}


def build(mesh, dtype, by_rows=False, checkpointing="none", compiled=False, dropout=0.0, base_dtype=None):
    """Build the network with adapters on this rank's part of a mesh, as the training script does."""
    with torch.device("meta"):
        model = MMDiT(CONFIG).to(dtype)
    weights = weights_mesh(mesh)
    apply_tensor_parallel(model, SEQUENCE_PARALLEL_PLAN if by_rows else TENSOR_PARALLEL_PLAN, weights["tp"])
    apply_token_parallel(model, shard_inputs, ATTENTIONS, mesh["cp"], weights["tp"] if by_rows else None)
    apply_lora(model, TARGETS, RANK, ALPHA, dropout, base_dtype, without_gradient(model))
    apply_activation_checkpointing(model, FSDP_UNITS, checkpointing)
    if compiled:
        torch.compiler.reset()
        compile_units(model, FSDP_UNITS, "aot_eager")
    shard_model(model, FSDP_UNITS, weights, base_dtype or dtype, dtype, True)
    materialize(model, torch.device("cpu"), init, seed=7)
    return model


def train(mesh_sizes: tuple, compiled: bool = False, dropout: float = 0.0, **options) -> dict:
    mesh = build_mesh("cpu", *mesh_sizes)
    data_rank, num_data_ranks = data_parallel(mesh)
    model = build(mesh, torch.float64, compiled=compiled, dropout=dropout, **options)
    trained = trained_parameters(model)
    for name, parameter in trained.items():
        local = parameter.to_local().detach()
        local.copy_(init_factor(name, parameter.shape, torch.float64)[local_slice(parameter)])
    before = fingerprint(base_parameters(model).items())
    optimizer, ema = build_adamw(trained.items(), 1e-2, (0.9, 0.99), 1e-6, 0.1), EMA(trained.items(), 0.9)
    tokens = [sum(f * h * w for f, h, w in grids) + txt for grids, txt in SAMPLES]
    result = {"loss": [], "norm": [], "grad": {}}
    for step in range(NUM_STEPS):
        (micro,) = deal(tokens, num_data_ranks, -(-sum(tokens) // num_data_ranks) + max(tokens) // 2)[data_rank]
        torch.manual_seed(step)
        loss = losses(model, micro, step, torch.float64, FILL_TO if compiled else None).sum() / len(SAMPLES)
        loss.backward()
        if step == 0:
            result["grad"] = {n: full(p.grad) for n, p in trained.items()}
        total = loss.detach().clone()
        dist.all_reduce(total)
        result["loss"].append(total.item() / mesh["cp"].size() / mesh["tp"].size())
        result["norm"].append(clip_grad_norm(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
    result["weight"] = {n: full(p) for n, p in trained.items()}
    result["ema"] = {n: full(p) for n, p in ema.tensors().items()}
    result["base"] = before, fingerprint(base_parameters(model).items())
    # What is replicated over tensor-parallel ranks must be the same to the bit.
    if mesh["tp"].size() == dist.get_world_size():
        placed = [
            p.to_local() for p in trained.values() if not any(x.is_shard(0) or x.is_shard(1) for x in p.placements)
        ]
        mine = torch.cat([p.detach().flatten() for p in placed] or [torch.zeros(1)])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        result["replicas_equal"] = all(torch.equal(other, mine) for other in everyone)
    return result


def train_on_ranks(rank: int, world_size: int, cases: list[dict]) -> list[dict] | None:
    results = [train(**case) for case in cases]
    return results if rank == 0 else None


TWO = [
    dict(mesh_sizes=(1, 2, 1, 1)),
    dict(mesh_sizes=(2, 1, 1, 1), checkpointing="selective"),
    dict(mesh_sizes=(1, 1, 2, 1), checkpointing="every_2"),
    dict(mesh_sizes=(1, 1, 1, 2)),
    dict(mesh_sizes=(1, 1, 1, 2), checkpointing="full", compiled=True),
    dict(mesh_sizes=(1, 1, 1, 2), by_rows=True),
    dict(mesh_sizes=(1, 1, 1, 2), by_rows=True, checkpointing="selective", compiled=True),
]
FOUR = [dict(mesh_sizes=(1, 2, 1, 2)), dict(mesh_sizes=(1, 1, 2, 2), by_rows=True, checkpointing="full")]


@pytest.mark.parametrize("world_size, cases", [(1, [dict(mesh_sizes=(1, 1, 1, 1))]), (2, TWO), (4, FOUR)])
def test_every_mesh_equals_one_process(world_size, cases):
    expected = reference()
    assert len(expected["grad"]) > 50 and all(g.any() for n, g in expected["grad"].items() if "1.attn.add_q" not in n)
    bases = set()
    for case, result in zip(cases, run_ranks(train_on_ranks, world_size, cases, timeout_s=300)[0], strict=True):
        try:
            assert_equal(result, expected, 1e-10)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
        bases |= set(result["base"])
    assert len(bases) == 1  # unchanged, and the same however it is cut


def test_dropout_is_the_same_on_tensor_parallel_ranks_and_when_computed_again():
    cases = [
        dict(mesh_sizes=(1, 1, 1, 2), dropout=0.5, checkpointing=checkpointing, by_rows=by_rows)
        for checkpointing in ("none", "full")
        for by_rows in (False, True)
    ]
    plain, rows, plain_again, rows_again = run_ranks(train_on_ranks, 2, cases, timeout_s=300)[0]
    expected = reference()
    for once, again in ((plain, plain_again), (rows, rows_again)):
        assert once["replicas_equal"] and again["loss"] == once["loss"] and again["norm"] == once["norm"]
        assert abs(once["loss"][0] / expected["loss"][0] - 1) > 1e-4  # it drops


def in_half(rank: int, world_size: int, mesh_sizes: tuple) -> dict:
    mesh = build_mesh("cpu", *mesh_sizes)
    model = build(mesh, torch.float32, base_dtype=torch.bfloat16)
    dtypes = {(is_adapter(n), p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    local = {"base": 0, "adapter": 0}
    for name, p in model.named_parameters():
        local["adapter" if is_adapter(name) else "base"] += p.to_local().numel() * p.element_size()
    loss = losses(model, list(range(len(SAMPLES))), 0, torch.float32).mean()
    loss.backward()
    grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    numbers = {"base": 0, "adapter": 0}
    for name, p in model.named_parameters():
        numbers["adapter" if is_adapter(name) else "base"] += p.numel()
    return {"dtypes": dtypes, "local": local, "numbers": numbers, "grads": grads, "loss": loss.item()}


@pytest.mark.parametrize("mesh_sizes", [(1, 2, 1, 1), (1, 1, 1, 2)])
def test_the_base_takes_two_bytes_a_parameter(mesh_sizes):
    results = run_ranks(in_half, 2, mesh_sizes)
    for result in results:
        assert result["dtypes"] == {(False, torch.bfloat16, False), (True, torch.float32, True)}
        assert result["grads"] == {torch.float32} and result["loss"] == pytest.approx(results[0]["loss"])
    if mesh_sizes[1] == 2:
        for part, num_bytes in (("base", 2), ("adapter", 4)):
            assert sum(r["local"][part] for r in results) == num_bytes * results[0]["numbers"][part]
