"""Compiled blocks compute what plain ones do, filled micro-batches what unfilled ones do; no block compiles twice."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.distributed.tensor import DTensor

from model import attention, flow
from model.layout import PackedLayout, fill_batch
from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import ATTENTIONS, FSDP_UNITS, TENSOR_PARALLEL_PLAN, shard_inputs
from model.segment_attention import segment_attention
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.compile import compile_units
from parallel.context_parallel import apply_token_parallel
from parallel.fsdp import shard_model
from parallel.mesh import build_mesh, data_parallel, weights_mesh
from parallel.tensor_parallel import apply_tensor_parallel
from tests.spawn import run_ranks
from utils.random_streams import torch_generator

CONFIG = MMDiTConfig(
    num_layers=3, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=12, in_channels=8, out_channels=2,
    axes_dims_rope=(2, 2, 4), num_languages=3,
)  # fmt: skip
# (image grids, text tokens); the second has a reference.
SAMPLES = [([(1, 2, 2)], 5), ([(1, 2, 2), (1, 1, 3)], 4), ([(1, 3, 1)], 6), ([(1, 4, 2)], 7), ([(1, 2, 2)], 5)]
FILL_TO = (20, 20, 5)  # image tokens, text tokens, samples
PACKS = [[0, 1], [3]]  # of two ranks
ROWS = {"img": ("x0", "noise"), "txt": ("txt",), "sample": ("t", "weight", "language")}


@dataclass(frozen=True, eq=False)
class Batch:
    """As the training script's."""

    layout: PackedLayout
    x0: Tensor
    noise: Tensor
    txt: Tensor
    t: Tensor
    weight: Tensor
    language: Tensor


def new_model(dtype: torch.dtype, **settings) -> MMDiT:
    """Return a model in which nothing is zero, so that every gradient has something to show."""
    model = MMDiT(replace(CONFIG, **settings)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=torch_generator(7, 0, name, "compile"))
    return model


def new_batch(chosen: list[int], dtype: torch.dtype) -> Batch:
    random = torch_generator(0, 0, str(chosen), "compile")
    layout = PackedLayout.build([SAMPLES[i][0] for i in chosen], [SAMPLES[i][1] for i in chosen])
    num_img, num_txt, num = len(layout.img_sample), len(layout.txt_sample), len(chosen)
    x0, noise, txt, t = (
        torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
        for shape in ((num_img, 8), (num_img, 8), (num_txt, 12), (num,))
    )
    weight = torch.rand(num, generator=random, dtype=torch.float64).to(dtype)
    return Batch(layout, x0, noise, txt, t.sigmoid(), weight, torch.tensor(chosen) % 3)


def losses(model: MMDiT, batch: Batch) -> Tensor:
    velocity = model(
        flow.interpolate(batch.x0, batch.noise, batch.t, batch.layout), batch.txt, batch.t, batch.layout, batch.language
    )
    return flow.loss_per_sample(velocity, batch.noise - batch.x0, batch.layout) * batch.weight


def loss_and_gradients(model: MMDiT, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    loss = losses(model, batch).sum()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(result: dict, expected: dict, bound: float) -> None:
    assert result.keys() == expected.keys()
    largest = max(value.norm().item() for value in expected.values())
    for name, value in expected.items():
        error = (result[name] - value).norm().item()
        assert error <= bound * max(value.norm().item(), 1e-3 * largest), name


@pytest.mark.parametrize("zero_cond_t", [False, True])
@pytest.mark.parametrize("chosen", [[0, 1, 2], [3], [0, 4]])
def test_filler_changes_neither_losses_nor_gradients(chosen, zero_cond_t):
    model, batch = new_model(torch.float64, zero_cond_t=zero_cond_t), new_batch(chosen, torch.float64)
    filled = fill_batch(batch, [FILL_TO], **ROWS)
    assert [len(filled.x0), len(filled.txt), len(filled.t)] == list(FILL_TO)
    assert filled.layout.num_filler_tokens == FILL_TO[0] + FILL_TO[1] - len(batch.x0) - len(batch.txt) > 0
    assert filled.layout.img_lens == batch.layout.img_lens
    per_sample = losses(model, filled).detach()
    torch.testing.assert_close(per_sample[: len(chosen)], losses(model, batch).detach(), rtol=1e-10, atol=0)
    assert not per_sample[len(chosen) :].any()
    assert_equal(loss_and_gradients(model, filled), loss_and_gradients(model, batch), 1e-10)


def test_without_a_size_nothing_is_filled():
    batch = new_batch([0], torch.float64)
    assert fill_batch(batch, None, **ROWS) is batch


def test_segment_attention_equals_attention_by_runs():
    layout = PackedLayout.build([images for images, _ in SAMPLES], [txt for _, txt in SAMPLES], fill_to=(26, 29, 8))
    torch.manual_seed(0)
    q, k, v = (torch.randn(55, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.randn(55, 2, 8, dtype=torch.float64)
    outs, grads = [], []
    for out in (
        segment_attention(q, k, v, layout.cu_seqlens),
        attention.packed_attention(q, k, v, layout),
    ):
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out, (q, k, v), grad))
    assert torch.equal(*outs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    torch.library.opcheck(torch.ops.packed.segment_attention, (q, k, v, layout.cu_seqlens))


class Traced:
    """A backend that compiles nothing, and counts the graphs that it is given."""

    num_graphs = 0

    def __call__(self, graph_module, inputs):
        self.num_graphs += 1
        return lookup_backend("aot_eager")(graph_module, inputs)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_like_blocks_and_filled_packs_share_their_graphs(checkpointing):
    torch.compiler.reset()
    backend = Traced()
    plain, compiled = new_model(torch.float64), new_model(torch.float64)
    names = list(compiled.state_dict())
    apply_activation_checkpointing(compiled, FSDP_UNITS, checkpointing)
    compile_units(compiled, FSDP_UNITS, backend)
    assert list(compiled.state_dict()) == names
    for chosen in ([0, 1, 2], [3], [0, 4]):
        batch = new_batch(chosen, torch.float64)
        filled = fill_batch(batch, [FILL_TO], **ROWS)
        assert_equal(loss_and_gradients(compiled, filled), loss_and_gradients(plain, batch), 1e-10)
        with torch.no_grad():  # of any size: not compiled
            assert torch.allclose(losses(compiled, batch), losses(plain, batch), rtol=1e-10)
    assert backend.num_graphs == 2  # the first two blocks are alike, the last has no text output


class Block(nn.Module):
    """A unit of two kinds, as the network's last block is one of its own."""

    def __init__(self, is_last: bool):
        super().__init__()
        self.is_last, self.scale = is_last, nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if self.is_last else x + self.scale


def test_all_sizes_that_a_plan_may_fill_to_compile():
    """Five found for the data, a roomier one and the last resort, each for blocks of two kinds; torch's limit is 8."""
    torch.compiler.reset()
    model, graphs = nn.Sequential(Block(False), Block(True)), []
    compile_units(model, ["0", "1"], lambda graph_module, inputs: graphs.append(graph_module) or graph_module)
    for num_rows in range(7):
        assert torch.equal(model(torch.ones(num_rows + 2)), torch.full((num_rows + 2,), 12.0))
    assert len(graphs) == 7 * 2


def test_the_first_size_that_holds_a_micro_batch_is_filled():
    batch = new_batch([0, 1, 2], torch.float64)  # 14 image tokens, 15 text tokens
    for sizes, expected in (
        ([(14, 15, 4), (20, 20, 5)], (14, 15, 4)),
        ([(13, 20, 5), (20, 14, 5), (20, 20, 3), (30, 20, 5), (40, 40, 9)], (30, 20, 5)),
    ):
        filled = fill_batch(batch, sizes, **ROWS)
        assert (len(filled.x0), len(filled.txt), len(filled.t)) == expected
    with pytest.raises(ValueError, match="cannot be filled"):
        fill_batch(batch, [(13, 20, 5), (20, 14, 5)], **ROWS)


def on_ranks(rank: int, world_size: int, cases: list[tuple]) -> list[dict]:
    results = []
    for num_layers, mesh_sizes, checkpointing, traced in cases:
        torch.compiler.reset()
        mesh = build_mesh("cpu", *mesh_sizes)
        data_rank, num_data_ranks = data_parallel(mesh)
        model = new_model(torch.float32, num_layers=num_layers)
        weights = weights_mesh(mesh)
        apply_tensor_parallel(model, TENSOR_PARALLEL_PLAN, weights["tp"])
        apply_token_parallel(model, shard_inputs, ATTENTIONS, mesh["cp"])
        apply_activation_checkpointing(model, FSDP_UNITS, checkpointing)
        backend = Traced() if traced else "inductor"
        compile_units(model, FSDP_UNITS, backend)
        shard_model(model, FSDP_UNITS, weights, torch.float32, torch.float32, True)
        chosen = PACKS[data_rank] if num_data_ranks == 2 else sum(PACKS, [])
        for samples in ([2], chosen):  # other weights are gathered, other samples packed, and nothing compiles again
            result = loss_and_gradients(model, fill_batch(new_batch(samples, torch.float32), [FILL_TO], **ROWS))
        if traced:
            assert backend.num_graphs == num_layers
        results.append({n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in result.items()})
    return results


@pytest.mark.parametrize(
    "cases",
    [
        [
            (2, (1, 2, 1, 1), "selective", True),
            (2, (1, 1, 2, 1), "none", True),
            (2, (1, 1, 1, 2), "none", True),
        ],
        [(1, (1, 2, 1, 1), "none", False)],  # one block: the C++ compiler takes its time
    ],
    ids=["traced", "inductor"],
)
def test_compiled_blocks_under_fsdp_and_tensor_parallelism(cases):
    results = run_ranks(on_ranks, 2, cases, timeout_s=280)
    for (num_layers, mesh_sizes, _, _), *ranks in zip(cases, *results, strict=True):
        model = new_model(torch.float32, num_layers=num_layers)
        is_data_parallel = mesh_sizes[1] == 2
        packs = PACKS if is_data_parallel else [sum(PACKS, [])]
        parts = [loss_and_gradients(model, new_batch(chosen, torch.float32)) for chosen in packs]
        expected = {name: sum(part[name] for part in parts) for name in parts[0]}
        if is_data_parallel:
            ranks[0]["loss"] = ranks[0]["loss"] + ranks[1]["loss"]
        assert_equal(ranks[0], expected, 1e-5)
