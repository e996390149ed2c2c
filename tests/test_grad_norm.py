"""The gradient norm over mixed meshes against the norm of the full gradients in one vector."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parallel.grad_norm import clip_grad_norm, grad_norm
from parallel.mesh import build_mesh
from tests.spawn import run_ranks

SHAPES = [(6, 4), (5, 2), (3,), (7,), (4, 4), (), (1,)]


def full_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def mixed_parameters(mesh, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """One parameter a kind of placement; the last two plain, and one without a gradient."""
    kinds = [
        (mesh["dp_shard", "tp"], [Shard(0), Shard(1)]),
        (mesh["dp_shard", "tp"], [Shard(0), Replicate()]),  # 5 rows over 2 ranks
        (mesh["tp"], [Replicate()]),
        (mesh["dp_shard"], [Shard(0)]),
        (mesh["dp_shard", "tp"], [Replicate(), Shard(1)]),
    ]
    parameters = []
    for i, gradient in enumerate(full_gradients(dtype)):
        if i < len(kinds):
            gradient = distribute_tensor(gradient, *kinds[i])
        parameters.append(torch.nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    return [*parameters, torch.nn.Parameter(torch.ones(3))]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norms(rank, world_size):
    mesh, results = build_mesh("cpu", 1, 2, 1, 2), {}
    for dtype in (torch.float64, torch.float32):
        parameters = mixed_parameters(mesh, dtype)
        loose = clip_grad_norm(parameters, 1e6)
        untouched = [whole(p.grad).clone() for p in parameters[:-1]]
        before = clip_grad_norm(parameters, 0.5, norm=grad_norm(parameters))
        clipped = [whole(p.grad).clone() for p in parameters[:-1]]
        results[dtype] = (loose, untouched, before, clipped, grad_norm(parameters))
    # A NaN in a single rank's shard reaches every rank.
    if rank == 3:
        parameters[0].grad.to_local()[0, 0] = float("nan")
    results["nan"] = grad_norm(parameters)
    unreduced = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
    unreduced.grad = DTensor.from_local(torch.ones(4), mesh["tp"], [Partial()])
    with pytest.raises(AssertionError, match="reduction"):
        grad_norm([unreduced])
    return results


def test_norm_and_clipping_over_mixed_meshes():
    results = run_ranks(norms, 4)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        full = full_gradients(dtype)
        expected = torch.cat([g.flatten() for g in full]).norm().item()
        for loose, untouched, before, clipped, after in (result[dtype] for result in results):
            assert loose.shape == () and loose.dtype == dtype
            assert loose.item() == pytest.approx(expected, rel=bound) == before.item()
            assert torch.equal(loose, results[0][dtype][0])  # the same to the bit on every rank
            assert all(torch.equal(a, b) for a, b in zip(untouched, full, strict=True))
            assert after.item() == pytest.approx(0.5, rel=1e-5)
            for gradient, original in zip(clipped, full, strict=True):
                assert torch.allclose(gradient, original * (0.5 / expected), rtol=1e-5, atol=0)
    assert all(result["nan"].isnan() for result in results)


def test_without_a_process_group_it_is_torchs_own():
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    assert grad_norm(parameters).item() == 0
    for parameter, gradient in zip(parameters, full_gradients(torch.float32), strict=True):
        parameter.grad = gradient
    expected = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    assert clip_grad_norm(parameters, 1e9).item() == pytest.approx(expected.item(), rel=1e-6)
