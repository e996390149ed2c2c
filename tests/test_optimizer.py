"""AdamW by its formulas, with complete state from the start."""

import torch
from torch import nn

from parallel.fsdp import shard_model
from parallel.mesh import build_mesh
from tests.spawn import run_ranks
from utils.optimizer import build_adamw, optimizer_tensors

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


def test_filling_the_tensors_resumes_to_the_bit():
    net, other = new_net(), new_net()
    optimizer, resumed = (build_adamw(n.named_parameters(), LR, BETAS, EPS, DECAY) for n in (net, other))
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
