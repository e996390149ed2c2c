"""Every mesh computes what one plain process computes: loss, norm, every gradient, weights and EMA after three steps.

The reference uses nothing of `parallel`: the bare network, torch's AdamW and clip_grad_norm_.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from data.pack import deal
from model import flow
from model.layout import PackedLayout
from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import (
    ATTENTIONS,
    FSDP_UNITS,
    SEQUENCE_PARALLEL_PLAN,
    TENSOR_PARALLEL_PLAN,
    shard_inputs,
)
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.compile import compile_units
from parallel.context_parallel import apply_token_parallel
from parallel.fsdp import shard_model
from parallel.grad_norm import clip_grad_norm
from parallel.init_weights import materialize
from parallel.mesh import build_mesh, data_parallel, weights_mesh
from parallel.tensor_parallel import apply_tensor_parallel
from tests.spawn import run_ranks
from utils.ema import EMA
from utils.optimizer import build_adamw
from utils.random_streams import torch_generator

CONFIG = MMDiTConfig(
    num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=12, in_channels=8, out_channels=2,
    axes_dims_rope=(2, 2, 4), num_languages=3,
)  # fmt: skip
# A global batch of mixed sizes: (image grids, text tokens); the fourth has a reference.
SAMPLES = [
    ([(1, 2, 2)], 5), ([(1, 2, 4)], 3), ([(1, 3, 1)], 6), ([(1, 2, 2), (1, 1, 3)], 4),
    ([(1, 1, 2)], 2), ([(1, 4, 2)], 7), ([(1, 2, 2)], 5), ([(1, 1, 5)], 1),
]  # fmt: skip
# Number of ranks → every (dp_replicate, dp_shard, cp, tp) that makes it.
MESHES = {n: [m for m in itertools.product((1, 2, 4), repeat=4) if math.prod(m) == n] for n in (1, 2, 4)}
CHECKPOINTING = ("none", "full", "every_2", "selective")
FILL_TO = (48, 40, 9)  # image tokens, text tokens and samples of a compiled micro-batch: room for all of SAMPLES
MAX_NORM = 0.5  # below the first norms, so that clipping is at work
NUM_STEPS = 3


def init(name, parameter, generator=None):
    """Nothing starts at zero here: every gradient has something to show."""
    parameter.normal_(std=0.3, generator=torch_generator(7, 0, name, "parity"))


def losses(model, chosen: list[int], step: int, dtype: torch.dtype, fill_to: tuple | None = None) -> torch.Tensor:
    """Return the losses of some samples of a step's global batch; their numbers depend on the sample alone."""
    layout = PackedLayout.build([SAMPLES[i][0] for i in chosen], [SAMPLES[i][1] for i in chosen], fill_to=fill_to)
    pieces = []
    for i in chosen:
        (grids, num_txt), random = SAMPLES[i], torch_generator(0, step, i, "parity")
        num_img = sum(f * h * w for f, h, w in grids)
        shapes = [(num_img, 8), (num_img, 8), (num_txt, 12), ()]
        pieces.append([torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes])
    x0, noise, txt, normal = zip(*pieces, strict=True)
    x0, noise, txt, t = torch.cat(x0), torch.cat(noise), torch.cat(txt), torch.sigmoid(torch.stack(normal))
    language = torch.tensor(chosen) % 3
    if fill_to is not None:
        num_img, num_txt, num_samples = fill_to
        x0, noise, txt = (F.pad(x, (0, 0, 0, n - len(x))) for x, n in ((x0, num_img), (noise, num_img), (txt, num_txt)))
        t, language = (F.pad(x, (0, num_samples - len(chosen))) for x in (t, language))
    velocity = model(flow.interpolate(x0, noise, t, layout), txt, t, layout, language)
    return flow.loss_per_sample(velocity, noise - x0, layout)[: len(chosen)]


def reference(dtype: torch.dtype, zero_cond_t: bool = False) -> dict:
    """Train on one process with plain PyTorch."""
    model = MMDiT(replace(CONFIG, zero_cond_t=zero_cond_t)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init(name, parameter)
    decayed, plain = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), eps=1e-6)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = {"loss": [], "norm": [], "grad": {}}
    for step in range(NUM_STEPS):
        loss = losses(model, list(range(len(SAMPLES))), step, dtype).mean()
        loss.backward()
        if step == 0:
            result["grad"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        result["norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        result["loss"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.9, (1 + step) / (10 + step))
        for name, p in model.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * p.detach()
    return result | {"weight": {n: p.detach() for n, p in model.named_parameters()}, "ema": average}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).clone()


def train(
    mesh_sizes: tuple,
    dtype: torch.dtype,
    num_micro: int = 1,
    checkpointing: str = "none",
    reshard: bool = True,
    sequence_parallel: bool = False,
    zero_cond_t: bool = False,
    compiled: bool = False,
) -> dict:
    """Train on this rank's part of the mesh, as the training script does; compiled: traced, and run as graphs."""
    mesh = build_mesh("cpu", *mesh_sizes)
    data_rank, num_data_ranks = data_parallel(mesh)
    with torch.device("meta"):
        model = MMDiT(replace(CONFIG, zero_cond_t=zero_cond_t)).to(dtype)
    weights = weights_mesh(mesh)
    apply_tensor_parallel(model, SEQUENCE_PARALLEL_PLAN if sequence_parallel else TENSOR_PARALLEL_PLAN, weights["tp"])
    tokens_tp = weights["tp"] if sequence_parallel else None
    apply_token_parallel(model, shard_inputs, ATTENTIONS, mesh["cp"], tokens_tp)
    apply_activation_checkpointing(model, FSDP_UNITS, checkpointing)
    if compiled:
        torch.compiler.reset()
        compile_units(model, FSDP_UNITS, "aot_eager")
    shard_model(model, FSDP_UNITS, weights, dtype, dtype, reshard)
    materialize(model, torch.device("cpu"), init, seed=7)
    optimizer = build_adamw(model.named_parameters(), 1e-2, (0.9, 0.99), 1e-6, 0.1)
    ema = EMA(model.named_parameters(), 0.9)
    tokens = [sum(f * h * w for f, h, w in grids) + txt for grids, txt in SAMPLES]
    result = {"loss": [], "norm": [], "grad": {}}
    for step in range(NUM_STEPS):
        micro_batches = deal(tokens, num_data_ranks, -(-sum(tokens) // num_data_ranks // num_micro) + max(tokens) // 2)
        micro_batches = micro_batches[data_rank]
        total = torch.zeros((), dtype=torch.float64)
        for i, micro in enumerate(micro_batches):
            model.set_requires_all_reduce(i == len(micro_batches) - 1)
            loss = losses(model, micro, step, dtype, FILL_TO if compiled else None).sum() / len(SAMPLES)
            loss.backward()
            total += loss.detach()
        if step == 0:
            result["grad"] = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            result["num_micro"] = len(micro_batches)
        dist.all_reduce(total)
        result["loss"].append(total.item() / mesh["cp"].size() / mesh["tp"].size())
        result["norm"].append(clip_grad_norm(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
    result["weight"] = {n: full(p) for n, p in model.named_parameters()}
    result["ema"] = {n: full(p) for n, p in ema.tensors().items()}
    # Copies on different ranks must be the same to the bit, also those that no collective ever compares.
    replicas = [p.to_local() for n, p in model.named_parameters() if ".norm_" in n and mesh_sizes[1:3] == (1, 1)]
    if replicas:
        mine = torch.cat([r.flatten() for r in replicas])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine.contiguous())
        result["replicas_equal"] = all(torch.equal(other, mine) for other in everyone)
    return result


def train_on_ranks(rank: int, world_size: int, cases: list[dict]) -> list[dict] | None:
    results = [train(**case) for case in cases]
    return results if rank == 0 else None


def assert_equal(result: dict, expected: dict, bound: float) -> None:
    assert result["loss"] == pytest.approx(expected["loss"], rel=bound)
    assert result["norm"] == pytest.approx(expected["norm"], rel=bound)
    for kind in ("grad", "weight", "ema"):
        # Same names, save for wrappers: no prefix of FSDP, checkpointing or tensor parallelism may show.
        assert result[kind].keys() == expected[kind].keys()
        largest = max(value.norm().item() for value in expected[kind].values())
        for name, value in expected[kind].items():
            error = (result[kind][name] - value).norm().item()
            assert error <= bound * max(value.norm().item(), 1e-3 * largest), (kind, name)
    assert result.get("replicas_equal", True)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_mesh_equals_one_process(world_size):
    bounds = {torch.float64: 1e-10, torch.float32: 1e-5}
    cases = [
        {"mesh_sizes": mesh, "dtype": dtype, "sequence_parallel": sequence_parallel}
        for mesh in MESHES[world_size]
        for sequence_parallel in ((False, True) if mesh[3] > 1 else (False,))
        for dtype in bounds
    ]
    expected = {dtype: reference(dtype) for dtype in bounds}
    # Gradients exist for all but the text output and text MLP of the last block.
    without = {n for n in expected[torch.float64]["weight"] if n not in expected[torch.float64]["grad"]}
    assert without and all("blocks.1.txt_mlp" in n or "blocks.1.attn.to_add_out" in n for n in without)
    for _, own in itertools.groupby(cases, key=lambda case: case["mesh_sizes"]):  # new ranks: a mesh's threads stay
        own = list(own)
        for case, result in zip(own, run_ranks(train_on_ranks, world_size, own)[0], strict=True):
            try:
                assert_equal(result, expected[case["dtype"]], bounds[case["dtype"]])
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["eager", "compiled"]
)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_every_mesh_with_checkpointing_and_compilation(world_size, compiled, checkpointing):
    """The whole product takes about twenty minutes: `./launch.sh test -m exhaustive`."""
    cases = [
        dict(
            mesh_sizes=mesh,
            dtype=torch.float64,
            sequence_parallel=by_rows,
            checkpointing=checkpointing,
            compiled=compiled,
        )
        for mesh in MESHES[world_size]
        for by_rows in ((False, True) if mesh[3] > 1 else (False,))
    ]
    expected = reference(torch.float64)
    for case, result in zip(cases, run_ranks(train_on_ranks, world_size, cases, timeout_s=1200)[0], strict=True):
        try:
            assert_equal(result, expected, 1e-10)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_accumulation_and_checkpointing_change_nothing():
    sharded, replicated = (1, 2, 1, 1), (2, 1, 1, 1)
    names = ("mesh_sizes", "num_micro", "checkpointing", "reshard")
    choices = [
        (sharded, 1, "full", True), (sharded, 2, "none", True), (sharded, 4, "none", False),
        (sharded, 2, "full", False),
        (replicated, 2, "none", True), (replicated, 4, "full", True),
    ]  # fmt: skip
    cases = [dict(zip(names, choice, strict=True), dtype=torch.float64) for choice in choices]
    expected = reference(torch.float64)
    results = run_ranks(train_on_ranks, 2, cases)[0]
    assert len({result["num_micro"] for result in results}) > 2
    for result in results:
        assert_equal(result, expected, 1e-10)


def test_references_at_time_zero_on_a_mesh_of_all_kinds():
    """Their tokens take other rows of the modulation than the targets', also where a rank has some tokens only."""
    case = dict(mesh_sizes=(1, 1, 2, 2), dtype=torch.float64, sequence_parallel=True, zero_cond_t=True)
    (result,) = run_ranks(train_on_ranks, 4, [case])[0]
    assert_equal(result, reference(torch.float64, zero_cond_t=True), 1e-10)
