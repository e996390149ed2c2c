"""Flow matching against closed forms and the `diffusers` scheduler and pipelines."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline, calculate_shift

from model import flow
from model.latents import patchify, unpatchify
from model.layout import PackedLayout

LAYOUT = PackedLayout.build([[(1, 2, 3)], [(1, 2, 2), (1, 3, 1)], [(1, 1, 1)]], [3, 1, 2])
SCHEDULER = dict(
    base_image_seq_len=256, base_shift=0.5, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02,
    use_dynamic_shifting=True, time_shift_type="exponential", shift=1.0,
)  # fmt: skip


@pytest.mark.parametrize("num_tokens, expected", [(256, 0.5), (4096, 0.694), (6889, 0.834), (8192, 0.9)])
def test_mu_is_the_reports_and_the_pipelines(num_tokens, expected):
    assert flow.shift_mu(num_tokens) == pytest.approx(expected, abs=5e-4)
    assert flow.shift_mu(num_tokens) == pytest.approx(calculate_shift(num_tokens, 256, 8192, 0.5, 0.9))


@pytest.mark.parametrize("num_steps", [4, 20, 50])
@pytest.mark.parametrize("terminal", [0.02, None])
def test_sampler_grid_is_the_schedulers(num_steps, terminal):
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER | {"shift_terminal": terminal})
    scheduler.set_timesteps(sigmas=[1 - i / num_steps for i in range(num_steps)], mu=0.7)
    torch.testing.assert_close(flow.sampler_grid(num_steps, 0.7, terminal), scheduler.sigmas, atol=1e-6, rtol=0)


def test_sampled_times_follow_the_shifted_logit_normal():
    normal = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    t = flow.sample_t(normal, torch.full((200_000,), 0.7), mean=-0.3, std=1.2)
    logits = torch.log(t / (1 - t))  # a shift by mu adds mu to the logit
    assert logits.mean().item() == pytest.approx(0.7 - 0.3, abs=0.01)
    assert logits.std().item() == pytest.approx(1.2, abs=0.01)


def test_interpolation_velocity_and_loss_by_hand():
    torch.manual_seed(0)
    x0, noise, velocity = (torch.randn(14, 4, dtype=torch.float64) for _ in range(3))
    t = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
    x_t = flow.interpolate(x0, noise, t, LAYOUT)
    torch.testing.assert_close(x_t[:6], 0.75 * x0[:6] + 0.25 * noise[:6])
    torch.testing.assert_close(x_t[6:10], 0.5 * x0[6:10] + 0.5 * noise[6:10])
    assert torch.equal(x_t[10:13], x0[10:13])  # the reference stays clean
    assert torch.equal(x_t[13:], noise[13:])
    target = flow.velocity_target(x0, noise)
    loss = flow.loss_per_sample(velocity, target, LAYOUT)
    expected = [((velocity - noise + x0)[rows] ** 2).mean() for rows in (slice(0, 6), slice(6, 10), slice(13, 14))]
    torch.testing.assert_close(loss, torch.stack(expected))


def test_a_weighted_loss_is_each_sample_s_weighted_mean():
    generator = torch.Generator().manual_seed(3)
    velocity, target = (torch.randn(14, 5, generator=generator) for _ in range(2))
    weights = torch.tensor([1, 3, 1, 1, 0, 2, 5, 1, 1, 1, 9, 9, 9, 0.5])
    errors = (velocity - target).square().mean(dim=1)
    targets = [slice(0, 6), slice(6, 10), slice(13, 14)]  # rows 10 to 12 are the second sample's reference
    expected = torch.stack([(errors[s] * weights[s]).sum() / weights[s].sum() for s in targets])
    torch.testing.assert_close(flow.loss_per_sample(velocity, target, LAYOUT, weights), expected)
    plain = flow.loss_per_sample(velocity, target, LAYOUT)
    torch.testing.assert_close(flow.loss_per_sample(velocity, target, LAYOUT, torch.full((14,), 7.0)), plain)
    filled = PackedLayout.build(LAYOUT.grids, LAYOUT.txt_lens, fill_to=(20, 10, 5))
    rows = [torch.cat((x, x.new_zeros(6, *x.shape[1:]))) for x in (velocity, target, weights)]
    of_filled = flow.loss_per_sample(*rows[:2], filled, rows[2])
    torch.testing.assert_close(of_filled, torch.cat((expected, torch.zeros(2))))


def test_euler_walks_a_straight_line_home():
    torch.manual_seed(0)
    x0, noise = torch.randn(14, 4), torch.randn(14, 4)
    noise[10:13] = x0[10:13]
    grids = [flow.sampler_grid(7, mu) for mu in (0.1, 0.5, 0.9)]
    times = []

    def velocity(x, t):
        times.append(t)
        return noise - x0

    torch.testing.assert_close(flow.euler_sample(velocity, noise, grids, LAYOUT), x0, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.stack(times), torch.stack(grids, 1)[:-1])


def test_what_is_known_comes_out_and_is_passed_on_the_way():
    torch.manual_seed(0)
    noise, known = torch.randn(14, 4), torch.randn(14, 4)
    is_known = torch.rand(14, 4) < 0.5
    is_known[10:13] = False  # a reference
    grids, seen = [flow.sampler_grid(5, mu) for mu in (0.1, 0.5, 0.9)], []

    def velocity(x, t):
        seen.append((x.clone(), t))
        return torch.full_like(x, 3.0)

    x = flow.euler_sample(velocity, noise, grids, LAYOUT, known, is_known)
    assert torch.equal(x[is_known], known[is_known])
    free = ~is_known & ~LAYOUT.is_reference[:, None]
    torch.testing.assert_close(x[free], (noise - 3.0)[free])  # from t = 1 to 0 at a speed of 3
    assert torch.equal(x[10:13], noise[10:13])
    for at, t in seen:  # on the straight line that training goes
        line = flow.interpolate(known, noise, t, LAYOUT)
        torch.testing.assert_close(at[is_known], line[is_known])


def test_guidance_keeps_the_conditional_norm():
    conditional, unconditional = torch.randn(5, 8), torch.randn(5, 8)
    guided = flow.classifier_free_guidance(conditional, unconditional, 4.0)
    torch.testing.assert_close(guided.norm(dim=-1), conditional.norm(dim=-1))
    direction = unconditional + 4.0 * (conditional - unconditional)
    torch.testing.assert_close(torch.cosine_similarity(guided, direction), torch.ones(5))
    torch.testing.assert_close(flow.classifier_free_guidance(conditional, unconditional, 1.0), conditional)


def test_patchify_is_the_pipelines_and_undone():
    latents = torch.randn(16, 6, 10)
    ours = patchify(latents)
    assert torch.equal(ours, QwenImagePipeline._pack_latents(latents[None], 1, 16, 6, 10)[0])
    assert torch.equal(unpatchify(ours, (1, 3, 5)), latents)


def test_strata_are_equally_likely():
    t = flow.logit_normal_quantiles(8)
    probabilities = [0.5 * (1 + math.erf(math.log(v / (1 - v)) / math.sqrt(2))) for v in t]
    assert probabilities == pytest.approx([(i + 0.5) / 8 for i in range(8)])
