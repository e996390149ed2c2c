"""Flow matching, said once: time runs from data (t = 0) to noise (t = 1).

    x_t = (1 − t)·x0 + t·ε          velocity = dx_t/dt = ε − x0

Legend: B samples in the micro-batch, I image tokens, C channels a token.
Source: Qwen-Image technical report, arXiv 2508.02324; sampler: `diffusers` FlowMatchEulerDiscreteScheduler.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model.layout import Grid, PackedLayout

NUM_STRATA = 8  # equally likely parts of the time axis at which validation looks


def shift_mu(
    num_tokens: int, base_tokens: int = 256, max_tokens: int = 8192, base_shift: float = 0.5, max_shift: float = 0.9
) -> float:
    """Return mu, the log-odds by which the resolution moves t towards noise; linear in the target's tokens."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return base_shift + slope * (num_tokens - base_tokens)


def shift_t(t: Tensor, mu: Tensor | float) -> Tensor:
    """Move t in (0, 1] by `mu` in log-odds: more noise for more tokens."""
    odds = torch.exp(torch.as_tensor(mu, dtype=t.dtype, device=t.device))
    return odds / (odds + (1 / t - 1))


def sample_t(normal: Tensor, mu: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Turn standard normal numbers into logit-normal times, shifted for the resolution.

    normal: (B,) float32; mu: (B,) from `shift_mu`; mean, std: of the logit.
    Returns (B,) float32 in (0, 1).  Source: arXiv 2403.03206, section 3.1.
    """
    return shift_t(torch.sigmoid(mean + std * normal.float()), mu)


def draw_t(normal: Tensor, grid: Grid, mean: float, std: float, stratum: int | None = None) -> Tensor:
    """Return the time of one sample: in training logit-normal, in validation the middle of one of NUM_STRATA strata.

    normal: a standard normal number, () float32; grid: (frames, rows, columns) of the target, whose tokens shift the
    time; mean, std: of the logit, in training; stratum: in validation, which.
    Returns () float32 in (0, 1).
    """
    mu = shift_mu(math.prod(grid))
    if stratum is None:
        return sample_t(normal, torch.tensor(mu), mean, std)
    return shift_t(torch.tensor(logit_normal_quantiles(NUM_STRATA)[stratum]), mu)


def token_t(t: Tensor, layout: PackedLayout) -> Tensor:
    """Spread t (B,) over the image tokens: (I, 1); references are clean pictures, t = 0."""
    return (t[layout.img_sample] * ~layout.is_reference)[:, None]


def interpolate(x0: Tensor, noise: Tensor, t: Tensor, layout: PackedLayout) -> Tensor:
    """Return x_t for target tokens and x0 for reference tokens.  x0, noise: (I, C); t: (B,)."""
    t = token_t(t, layout)
    return (1 - t) * x0 + t * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """Return what the network predicts, ε − x0, for (I, C) each."""
    return noise - x0


def loss_per_sample(velocity: Tensor, target: Tensor, layout: PackedLayout, weights: Tensor | None = None) -> Tensor:
    """Mean squared error of each sample's target tokens.

    velocity, target: (I, C), any float dtype; reference tokens are ignored.
    weights: (I,) of the tokens, at least one of a target above 0; the mean of a sample is the weighted one.
    Returns (B,) float32 (float64 if both are).  Source: Qwen-Image report, eq. 2.
    """
    if velocity.dtype != torch.float64:
        velocity, target = velocity.float(), target.float()
    mean = layout.target_mean.to(velocity.dtype)
    if weights is not None:
        mean = mean * weights
        mean = mean / mean.sum(dim=1, keepdim=True).clamp(min=torch.finfo(mean.dtype).tiny)  # a filler has no target
    return mean @ (velocity - target).square().mean(dim=-1)


def sampler_grid(num_steps: int, mu: float, shift_terminal: float | None = 0.02) -> Tensor:
    """Return the times of an Euler sampler from noise to data, (num_steps + 1,) float32, last one 0.

    shift_terminal: the times are stretched so that the last step starts here; None leaves them.
    Source: FlowMatchEulerDiscreteScheduler.set_timesteps with the released exponential dynamic shift.
    """
    t = shift_t(torch.linspace(1.0, 1.0 / num_steps, num_steps, dtype=torch.float64), mu)
    if shift_terminal is not None and num_steps > 1:
        t = 1 - (1 - t) * ((1 - shift_terminal) / (1 - t[-1]))
    return torch.cat((t, torch.zeros(1, dtype=t.dtype))).float()


def classifier_free_guidance(conditional: Tensor, unconditional: Tensor, cfg_scale: float) -> Tensor:
    """Move away from the unconditional velocity, keeping each token's norm.  (I, C) each.

    Source: `diffusers` QwenImagePipeline.__call__ (true_cfg_scale).
    """
    guided = unconditional + cfg_scale * (conditional - unconditional)
    norm = torch.linalg.vector_norm(conditional, dim=-1, keepdim=True)
    return guided * (norm / torch.linalg.vector_norm(guided, dim=-1, keepdim=True).clamp_min(1e-12))


def euler_sample(
    velocity: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    grids: Sequence[Tensor],
    layout: PackedLayout,
    known: Tensor | None = None,
    is_known: Tensor | None = None,
) -> Tensor:
    """Integrate from noise to data, each sample on its own times.

    velocity: (x (I, C), t (B,) float32) → (I, C).  noise: (I, C) float32, references hold their clean latents.
    grids: for each sample its times from `sampler_grid`, all of the same length.
    known, is_known: (I, C) float32 and bool, clean values and where they are to come out: there x runs along the
    straight line from its noise to them, whatever the velocity says.  Source: QwenImageEditInpaintPipeline.__call__.
    Returns (I, C) float32.
    """
    times = torch.stack(list(grids), dim=1).to(noise.device)  # (num_steps + 1, B)
    x = noise.float()
    for now, following in zip(times[:-1], times[1:], strict=True):
        step = (following - now)[layout.img_sample] * ~layout.is_reference
        x = x + step[:, None] * velocity(x, now).float()
        if known is not None:
            x = torch.where(is_known, interpolate(known, noise.float(), following, layout), x)
    return x


def logit_normal_quantiles(num: int, mean: float = 0.0, std: float = 1.0) -> list[float]:
    """Return the centres of `num` equally likely strata of the logit-normal distribution, before any shift."""
    normal = torch.distributions.Normal(0.0, 1.0)
    quantiles = normal.icdf((torch.arange(num, dtype=torch.float64) + 0.5) / num)
    return [1 / (1 + math.exp(-(mean + std * q))) for q in quantiles.tolist()]
