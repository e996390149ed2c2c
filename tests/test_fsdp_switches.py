"""FSDP's switches change when and where things happen, and nothing else; float8 is refused where there is none."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.float8 import apply_float8
from parallel.fsdp import shard_model
from parallel.init_weights import materialize
from parallel.mesh import build_mesh, data_parallel
from parallel.tensor_parallel import apply_tensor_parallel
from tests.spawn import run_ranks
from tests.toy_model import DIM, PLAN, UNITS, Toy, init_toy, toy_batch

SHARDED, TENSOR_PARALLEL = (1, 2, 1, 1), (1, 1, 1, 2)
NUM_BLOCKS = 4


def gradients(model: nn.Module, data_rank: int, num_data_ranks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x, labels, targets = toy_batch(dtype)
    for i in range(data_rank, len(x), num_data_ranks):
        (model(x[i], labels[i]) - targets[i]).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_ranks(rank: int, world_size: int, cases: list[dict]) -> list[dict]:
    results = []
    for case in cases:
        mesh = build_mesh("cpu", *case["mesh"])
        dtype = case.get("dtype", torch.float64)
        with torch.device("meta"):
            model = Toy().to(dtype)
        apply_tensor_parallel(model, PLAN, mesh["tp"])
        apply_activation_checkpointing(model, UNITS, case.get("checkpointing", "none"))
        shard_model(
            model, UNITS, mesh, dtype, case.get("reduce_dtype", dtype), case.get("reshard", True),
            case.get("num_prefetch", 0), case.get("cpu_offload", False),
        )  # fmt: skip
        materialize(model, torch.device("cpu"), init_toy, seed=3)
        result = gradients(model, *data_parallel(mesh), dtype)
        results.append({name: gradient.full_tensor() for name, gradient in result.items()})
    return results


def reference(dtype: torch.dtype) -> nn.Module:
    model = Toy().to(dtype)
    materialize(model, torch.device("cpu"), init_toy, seed=3)
    return model


def test_switches_change_no_gradient():
    cases = [
        {"mesh": SHARDED, "num_prefetch": 1},
        {"mesh": SHARDED, "num_prefetch": 5, "reshard": False},
        {"mesh": SHARDED, "num_prefetch": 2, "cpu_offload": True, "checkpointing": "full"},
        {"mesh": SHARDED, "cpu_offload": True},
        {"mesh": (2, 1, 1, 1), "cpu_offload": True, "num_prefetch": 1},
        *({"mesh": mesh, "checkpointing": c} for c in ("every_2", "selective") for mesh in (SHARDED, TENSOR_PARALLEL)),
    ]
    expected = gradients(reference(torch.float64), 0, 1, torch.float64)
    for case, result in zip(cases, run_ranks(on_ranks, 2, cases)[0], strict=True):
        assert result.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(result[name], gradient, rtol=1e-10, atol=1e-12), (case, name)


def test_gradients_are_summed_in_the_given_dtype():
    cases = [{"mesh": SHARDED, "dtype": torch.float32, "reduce_dtype": d} for d in (torch.float32, torch.bfloat16)]
    parts = []
    for rank in range(2):
        sums: dict[str, torch.Tensor] = {}
        x, labels, targets = toy_batch(torch.float32)
        for i in range(rank, len(x), 2):
            model = reference(torch.float32)
            (model(x[i], labels[i]) - targets[i]).square().sum().backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums.setdefault(name, []).append(p.grad)
        parts.append(sums)
    exact, rounded = run_ranks(on_ranks, 2, cases)[0]
    differ = 0
    for name in parts[0]:
        # Every micro-batch goes to the shards at once, where the sum over micro-batches is in float32.
        pairs = list(zip(*(part[name] for part in parts), strict=True))
        expected = sum((a.bfloat16() + b.bfloat16()).float() for a, b in pairs)
        torch.testing.assert_close(rounded[name], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(exact[name], sum(a + b for a, b in pairs), rtol=1e-5, atol=1e-5)
        differ += not torch.allclose(exact[name], rounded[name], rtol=1e-5, atol=1e-5)
    assert differ > len(parts[0]) / 2


class CountGathers(TorchDispatchMode):
    """Count all-gathers as they are issued."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += "allgather" in func.name()
        return func(*args, **(kwargs or {}))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(NUM_BLOCKS))
        self.out = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def gathers(rank: int, world_size: int, num_prefetch: int) -> tuple[list[int], list[int]]:
    """Return how many all-gathers were issued when each block ran, in forward and in backward."""
    model, counter, seen = Chain(), CountGathers(), ([], [])
    for block in model.blocks:
        block[1].register_forward_pre_hook(lambda *_: seen[0].append(counter.num))
        block[1].register_full_backward_pre_hook(lambda *_: seen[1].append(counter.num))
    shard_model(model, UNITS, build_mesh("cpu"), torch.float32, torch.float32, True, num_prefetch)
    with counter:
        loss = model(torch.ones(2, DIM)).sum()
        before = counter.num
        loss.backward()
    return seen[0], [num - before for num in seen[1]]


@pytest.mark.parametrize("num_prefetch", [0, 1, 2])
def test_units_are_gathered_ahead(num_prefetch):
    forward, backward = run_ranks(gathers, 2, num_prefetch)[0]
    assert forward == [min(1 + i + num_prefetch, NUM_BLOCKS) + 1 for i in range(NUM_BLOCKS)]  # 1 for what is no block
    ahead = max(1, num_prefetch)  # FSDP's own choice is one
    assert backward == [min(1 + i + ahead, NUM_BLOCKS) + 1 for i in range(NUM_BLOCKS)]


def test_negative_prefetch_is_refused():
    with pytest.raises(ValueError, match="--num_prefetch.*at least 0, got -1"):
        shard_model(Toy(), UNITS, None, torch.float32, torch.float32, True, -1)


def test_float8_is_refused_where_there_is_none(monkeypatch):
    with pytest.raises(ValueError, match="--float8 needs a GPU of compute capability 8.9 or more.*got cpu"):
        apply_float8(Toy(), ("blocks.*",), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="got 8.0"):
        apply_float8(Toy(), ("blocks.*",), torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ValueError, match="--float8 needs a package: pip install torchao=="):
        apply_float8(Toy(), ("blocks.*",), torch.device("cuda"))


def test_float8_takes_whole_layers_of_fitting_size(monkeypatch):
    converted = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fake = SimpleNamespace(
        Float8LinearConfig=dict,
        convert_to_float8_training=lambda model, config, module_filter_fn: converted.extend(
            name for name, module in model.named_modules() if module_filter_fn(module, name)
        ),
    )
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=fake))
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)
    model = nn.Module()
    model.a = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 24))
    model.b, model.c = nn.Sequential(nn.Linear(24, 16)), nn.Linear(32, 32)
    apply_float8(model, ("a", "b"), torch.device("cuda"))
    assert converted == ["a.0"]
    with pytest.raises(ValueError, match="no linear layer in .'b'. has features"):
        apply_float8(model, ("b",), torch.device("cuda"))
    model.a[0].__class__ = type("ColwiseLinear", (nn.Linear,), {})
    with pytest.raises(ValueError, match="a.0 is a ColwiseLinear; use --tp 1"):
        apply_float8(model, ("a",), torch.device("cuda"))
