"""AdamW by its formulas, Muon against torch's on whole matrices, 8-bit AdamW; complete state from the start."""

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallel.fsdp import shard_model
from parallel.mesh import build_mesh
from parallel.slices import local_slice
from parallel.tensor_parallel import apply_tensor_parallel
from tests import toy_model
from tests.spawn import run_ranks
from utils import muon
from utils.muon import Muon
from utils.optimizer import build_adamw, build_optimizer, optimizer_tensors, set_learning_rate

LR, BETAS, EPS, DECAY = 0.01, (0.8, 0.95), 1e-6, 0.1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(2, 3)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def new_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def loss(net: Net, step: int) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return net(x).square().sum()


def adamw_by_hand(num_steps: int) -> dict[str, torch.Tensor]:
    """Train with the formulas of arXiv 1711.05101, algorithm 2."""
    net = new_net()
    m, v = ({n: torch.zeros_like(p) for n, p in net.named_parameters()} for _ in range(2))
    for t in range(1, num_steps + 1):
        net.zero_grad()
        loss(net, t).backward()
        with torch.no_grad():
            for name, p in net.named_parameters():
                if p.grad is None:
                    continue
                m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * p.grad
                v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * p.grad**2
                m_hat, v_hat = m[name] / (1 - BETAS[0] ** t), v[name] / (1 - BETAS[1] ** t)
                p -= LR * (DECAY if p.ndim > 1 else 0) * p
                p -= LR * m_hat / (v_hat.sqrt() + EPS)
    return dict(net.named_parameters())


def train(net: Net, optimizer, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(net, step).backward()
        optimizer.step()


def test_decays_matrices_only():
    net = new_net()
    train(net, build_adamw(net.named_parameters(), LR, BETAS, EPS, DECAY), range(1, 6))
    for name, expected in adamw_by_hand(5).items():
        assert torch.allclose(dict(net.named_parameters())[name], expected, rtol=1e-10, atol=1e-12), name


def test_state_is_complete_before_the_first_step_and_for_parameters_without_gradient():
    net = new_net()
    optimizer = build_adamw(net.named_parameters(), LR, BETAS, EPS, DECAY)
    tensors = optimizer_tensors(optimizer, net)
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    assert tensors.keys() == {f"{n}.{slot}" for n in trained for slot in ("step", "exp_avg", "exp_avg_sq")}
    train(net, optimizer, [1, 2])
    assert optimizer_tensors(optimizer, net).keys() == tensors.keys()
    assert tensors["first.weight.step"] == 2 and tensors["unused.weight.step"] == 0
    assert tensors["first.weight.exp_avg"].any() and not tensors["unused.weight.exp_avg"].any()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_filling_the_tensors_resumes_to_the_bit(name):
    net, other = new_net(), new_net()
    optimizer, resumed = (
        build_optimizer(name, n.named_parameters(), LR, BETAS, EPS, DECAY, ("first", "unused")) for n in (net, other)
    )
    train(net, optimizer, [1, 2, 3])
    with torch.no_grad():
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            q.copy_(p)
        target = optimizer_tensors(resumed, other)
        for name, tensor in optimizer_tensors(optimizer, net).items():
            target[name].copy_(tensor)
    train(net, optimizer, [4, 5])
    train(other, resumed, [4, 5])
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def sharded(rank, world_size):
    net = new_net()
    shard_model(net, ("first",), build_mesh("cpu"), torch.float64, torch.float64, True)
    optimizer = build_adamw(net.named_parameters(), LR, BETAS, EPS, DECAY)
    for step in range(1, 6):
        optimizer.zero_grad()
        (loss(net, step) / world_size).backward()  # every rank has the same data here, and gradients are summed
        optimizer.step()
    return {name: p.full_tensor().detach() for name, p in net.named_parameters()}


def test_sharded():
    for result in run_ranks(sharded, 3):
        for name, expected in adamw_by_hand(5).items():
            assert torch.allclose(result[name], expected, rtol=1e-10, atol=1e-12), name


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """Return a full gradient that depends on the name and the step alone."""
    random = torch.Generator().manual_seed(1000 * step + len(name) + 7 * sum(map(ord, name)))
    return torch.randn(shape, generator=random, dtype=torch.float64)


def muon_by_torch(weights: dict, hidden: tuple[str, ...], num_steps: int) -> dict[str, torch.Tensor]:
    """Train whole tensors with torch's own Muon and AdamW."""
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    matrices = {n: p for n, p in parameters.items() if p.ndim == 2 and n.startswith(hidden)}
    muon = torch.optim.Muon(matrices.values(), lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    others = {n: p for n, p in parameters.items() if n not in matrices}
    adamw = build_adamw(others.items(), LR, BETAS, EPS, DECAY)
    for step in range(num_steps):
        for name, parameter in parameters.items():
            if "unused" not in name:
                parameter.grad = gradient(name, parameter.shape, step)
        muon.step()
        adamw.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def train_by_hand(optimizer, named_parameters, num_steps: int, first: int = 0) -> None:
    """Give every parameter its part of the gradients of `muon_by_torch`."""
    for step in range(first, first + num_steps):
        for name, parameter in named_parameters.items():
            if "unused" in name:
                continue
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            local = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad
            local.copy_(gradient(name, parameter.shape, step)[local_slice(parameter)])
        optimizer.step()


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (24, 5), (1, 6)])
def test_muon_equals_torch_on_a_whole_matrix(shape):
    weight = gradient("start", shape, 99)
    parameter = nn.Parameter(weight.clone())
    train_by_hand(Muon([parameter], LR, DECAY), {"x": parameter}, 3)
    assert torch.allclose(parameter, muon_by_torch({"x": weight}, ("x",), 3)["x"], rtol=0, atol=1e-12)


def muon_on_a_mesh(rank, world_size, cases):
    results = []
    for model_class, plan, units, mesh_sizes in cases:
        torch.manual_seed(0)
        model = model_class().double()
        weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        mesh = build_mesh("cpu", *mesh_sizes)
        apply_tensor_parallel(model, plan, mesh["tp"])
        shard_model(model, units, mesh, torch.float64, torch.float64, True)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        train_by_hand(build_optimizer("muon", named.items(), LR, BETAS, EPS, DECAY, units), named, 3)
        results.append((weights, {name: p.full_tensor().detach() for name, p in named.items()}))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_muon_on_shards_equals_muon_on_whole_matrices(world_size):
    net, toy = (Net, {}, ("first", "second")), (toy_model.Toy, toy_model.PLAN, toy_model.UNITS)
    cases = {
        2: [(*net, (1, 2, 1, 1)), (*toy, (1, 2, 1, 1)), (*toy, (1, 1, 1, 2)), (*toy, (2, 1, 1, 1))],
        3: [(*net, (1, 3, 1, 1))],  # 5 rows over 3 ranks, and 1 row: two ranks have none of it
        4: [(*toy, (1, 2, 1, 2)), (*toy, (2, 2, 1, 1)), (*toy, (1, 4, 1, 1))],
    }[world_size]
    for result in run_ranks(muon_on_a_mesh, world_size, cases):
        for (_, _, units, mesh_sizes), (weights, trained) in zip(cases, result, strict=True):
            expected = muon_by_torch(weights, tuple(unit.removesuffix("*") for unit in units), 3)
            for name, weight in trained.items():
                assert torch.allclose(weight, expected[name], rtol=0, atol=1e-10), (mesh_sizes, name)
                assert ("unused" in name) == torch.equal(weight, weights[name])


def muon_on_copies(rank, world_size, shapes):
    """Train the same matrices twice, alone and with the work shared out; one gets no gradient."""
    alone, shared = (
        {f"{i}": nn.Parameter(gradient("x", shape, i).float()) for i, shape in enumerate(shapes)} for _ in "12"
    )
    optimizers = Muon(alone.values(), LR, DECAY), Muon(shared.values(), LR, DECAY, copies=dist.group.WORLD)
    worked_on = []
    for step in range(3):
        for named, optimizer in zip((alone, shared), optimizers, strict=True):
            for name, parameter in list(named.items())[1:]:
                parameter.grad = gradient(name, parameter.shape, step).float()
            with counting_orthogonalized() as count:
                optimizer.step()
            worked_on.append(count[0])
    equal = all(torch.equal(alone[name], shared[name]) for name in alone)
    state = [
        [o.state[p]["momentum_buffer"] for p in n.values()] for o, n in zip(optimizers, (alone, shared), strict=True)
    ]
    return equal and all(map(torch.equal, *state)), worked_on


@contextlib.contextmanager
def counting_orthogonalized():
    count, original = [0], muon.orthogonalize

    def counted(matrix):
        count[0] += 1
        return original(matrix)

    muon.orthogonalize = counted
    try:
        yield count
    finally:
        muon.orthogonalize = original


@pytest.mark.parametrize(("world_size", "num"), [(2, 6), (3, 6), (3, 2)])
def test_muon_shared_out_over_copies_is_bitwise_muon_alone(world_size, num):
    shapes = [(4, 4), (32, 8), (5, 24), (1, 6), (24, 5), (16, 16), (8, 3)][: num + 1]
    results = run_ranks(muon_on_copies, world_size, shapes)
    assert all(equal for equal, _ in results)
    for alone, shared in zip(*[iter(zip(*(counts for _, counts in results), strict=True))] * 2, strict=True):
        assert set(alone) == {num} and sum(shared) == num  # no matrix twice
        assert max(shared) < num


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model = toy_model.Toy()
    optimizer = build_optimizer("muon", model.named_parameters(), LR, BETAS, EPS, DECAY, toy_model.UNITS)
    slots = {name: set() for name, _ in model.named_parameters()}
    for name in optimizer_tensors(optimizer, model):
        parameter, slot = name.rsplit(".", 1)
        slots[parameter].add(slot)
    for name, parameter in model.named_parameters():
        is_hidden = parameter.ndim == 2 and name.startswith("blocks.")
        assert slots[name] == ({"momentum_buffer"} if is_hidden else {"step", "exp_avg", "exp_avg_sq"})
    with pytest.raises(ValueError, match="muon.*the model has none there"):
        build_optimizer("muon", model.named_parameters(), LR, BETAS, EPS, DECAY, ("layers.*",))


def test_the_learning_rate_reaches_every_group():
    for name in ("adamw", "muon"):
        optimizer = build_optimizer(name, Net().named_parameters(), LR, BETAS, EPS, DECAY, ("first",))
        set_learning_rate(optimizer, 0.5)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5] * len(optimizer.param_groups)
        set_learning_rate(optimizer, 0.5, adamw_share=0.25)
        own = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        muon = {id(p) for p, state in optimizer.state.items() if "momentum_buffer" in state}
        assert bool(muon) == (name == "muon") and set(own) > muon
        assert all(lr == (0.5 if p in muon or name == "adamw" else 0.125) for p, lr in own.items())


def test_unknown_and_missing_optimizers_are_refused(monkeypatch):
    settings = (LR, BETAS, EPS, DECAY)
    with pytest.raises(ValueError, match="--optimizer must be one of adamw, adamw8bit, muon, got 'sgd'"):
        build_optimizer("sgd", Net().named_parameters(), *settings)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match="adamw8bit needs a package: pip install torchao=="):
        build_optimizer("adamw8bit", Net().named_parameters(), *settings)


class Wide(nn.Module):
    """With a matrix that is large enough for 8-bit state, and one that is not."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(256, 32), nn.Linear(32, 3)


def adamw8bit(rank, world_size, is_sharded):
    """Train three steps, with a restart from the checkpointed tensors after two.  Returns both runs' weights, state."""
    torch.compiler.set_stance("force_eager")  # torchao compiles its formula
    results = []
    for restart in (False, True):
        torch.manual_seed(0)
        model = Wide()
        if is_sharded:
            shard_model(model, ("large",), build_mesh("cpu"), torch.float32, torch.float32, True)
        named = dict(model.named_parameters())
        optimizer = build_optimizer("adamw8bit", named.items(), LR, BETAS, EPS, DECAY)
        set_learning_rate(optimizer, LR / 2)
        for step in range(3):
            if restart and step == 2:
                saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
                optimizer = build_optimizer("adamw8bit", named.items(), LR / 2, BETAS, EPS, DECAY)
                with torch.no_grad():
                    for name, tensor in optimizer_tensors(optimizer, model).items():
                        tensor.copy_(saved[name])
            train_by_hand(optimizer, named, 1, first=step)
        tensors = named | optimizer_tensors(optimizer, model)
        full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}
        results.append({name: x.detach().clone() for name, x in full.items()})
    return results


def test_adamw8bit_is_the_same_sharded_restarted_and_near_adamw():
    pytest.importorskip("torchao")
    straight, restarted = run_ranks(adamw8bit, 1, False)[0]
    assert straight["large.weight.exp_avg.codes"].dtype == torch.uint8
    assert straight["large.weight.exp_avg.scale"].shape == (32, 1)
    assert straight["small.weight.exp_avg"].dtype == torch.float32
    for run in (restarted, *run_ranks(adamw8bit, 2, True)[0]):
        assert run.keys() == straight.keys()
        assert all(torch.equal(run[name], straight[name]) for name in straight)
    torch.manual_seed(0)
    named = dict(Wide().named_parameters())
    train_by_hand(build_adamw(named.items(), LR / 2, BETAS, EPS, DECAY), named, 3)
    for name, weight in named.items():
        difference = (straight[name] - weight).abs().max()
        assert difference < 0.3 * LR if name == "large.weight" else difference < 1e-6
