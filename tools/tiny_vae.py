"""Recipe of the tiny VAE: an `AutoencoderKLQwenImage` of 2.6 M parameters, trained on emoji and scenes of emoji.

Called by `python -m tools.make_tiny`.  Validation emoji (by base, see `data.emoji_table`) are never shown in training.
"""

import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from data.emoji_table import draw_emoji, draw_scene, load_emoji
from model.vae import ImageVAE, _ImageConv2d

SIDE = 64  # pixels
CONFIG = dict(base_dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, attn_scales=[])
BATCH = 64
# Steps, peak learning rate and weight of the KL term of each phase.  The first learns to copy; the second makes the
# latents smooth: it charges for precision that the decoder does not need, and so teaches it to forgive errors.
PHASES = ((2400, 2e-3, 3e-5), (1500, 1e-3, 5e-4))
L1_WEIGHT = 0.1  # of the absolute beside the squared error: it learns sharp edges sooner
BACKGROUNDS = ["#ffffff", "#bfe3ff", "#c9f2c7", "#fff3b0", "#ffd1dc", "#d0d0d0", "#e6d5ff", "#ffe0b8"]


def _picture(keys: list[str], rng: random.Random) -> np.ndarray:
    """Draw one training picture: a single emoji, or a window with two or three at random places and sizes."""
    background = "#ffffff" if rng.random() < 0.5 else rng.choice(BACKGROUNDS)
    if rng.random() < 0.6:
        return np.asarray(draw_emoji(rng.choice(keys), SIDE, background))
    placed = [
        (rng.choice(keys), (rng.uniform(8, 56), rng.uniform(8, 56), rng.uniform(22, 60)))
        for _ in range(rng.randint(1, 3))
    ]
    return np.asarray(draw_scene((SIDE, SIDE), background, placed))


def _to_pixels(pictures: list[np.ndarray]) -> Tensor:
    """Stack uint8 (H, W, 3) pictures into (B, 3, H, W) float32 in [-1, 1]."""
    batch = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    return batch.float().div_(127.5).sub_(1).contiguous(memory_format=torch.channels_last)


def validation_psnr(vae: ImageVAE) -> float:
    """Return the PSNR in dB, over all pixels of the held-out emoji drawn on white at 64 px."""
    keys = [e.key for e in load_emoji().values() if e.split == "validation"]
    squared = []
    with torch.inference_mode():
        for start in range(0, len(keys), BATCH):
            pixels = _to_pixels([np.asarray(draw_emoji(k, SIDE)) for k in keys[start : start + BATCH]])
            squared.append((vae.decode(vae.encode_moments(pixels)[0]) - pixels).square().mean(dim=(1, 2, 3)))
    return -10 * math.log10(torch.cat(squared).mean().item() / 4)  # the peak-to-peak range is 2


def _fit(vae: ImageVAE, keys: list[str], rng: random.Random, num_steps: int, peak_lr: float, kl_weight: float) -> None:
    """Train with warm-up and cosine decay."""
    parameters = [p for name, p in vae.named_parameters() if "time_conv" not in name]
    optimizer = torch.optim.AdamW(parameters, lr=peak_lr, betas=(0.9, 0.99), weight_decay=1e-4)
    start = time.time()
    for step in range(num_steps):
        warmup, decay = min(1.0, (step + 1) / 100), 0.5 * (1 + math.cos(math.pi * step / num_steps))
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * warmup * max(decay, 0.01)
        pixels = _to_pixels([_picture(keys, rng) for _ in range(BATCH)])
        with torch.autocast("cpu", torch.bfloat16):
            mean, std = vae.encode_moments(pixels)
            latents = (mean + std * torch.randn_like(std)).unsqueeze(2)
            decoded = vae.vae.decoder(vae.vae.post_quant_conv(latents)).squeeze(2)
        mean, std, error = mean.float(), std.float(), decoded.float() - pixels
        kl = 0.5 * (mean.square() + std.square() - 1 - 2 * std.clamp_min(1e-9).log()).mean()
        loss = error.square().mean() + L1_WEIGHT * error.abs().mean() + kl_weight * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 100 == 0 or step == num_steps - 1:
            psnr = -10 * math.log10(error.square().mean().item() / 4)
            print(
                f"vae step {step}/{num_steps} psnr {psnr:.2f} dB kl {kl.item():.2f} std {std.mean().item():.3f} "
                f"{(step + 1) * BATCH / (time.time() - start):.0f} images/s",
                flush=True,
            )


def train_vae() -> ImageVAE:
    """Train the VAE on the CPU in bfloat16 autocast and measure `latents_mean` and `latents_std`."""
    torch.manual_seed(0)
    vae = ImageVAE(AutoencoderKLQwenImage(**CONFIG, latents_mean=[0.0] * 16, latents_std=[1.0] * 16))
    vae = vae.to(memory_format=torch.channels_last)
    everyone = [e for e in load_emoji().values() if e.split == "train"]
    for seed, phase in enumerate(PHASES):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        # Skin-tone variants are near-copies: a quarter of them is enough.
        keys = [e.key for e in everyone if "skin tone" not in e.en or rng.random() < 0.25]
        _fit(vae, keys, rng, *phase)
        vae.bfloat16().float()  # as it is saved: any phase can start from the folder of the one before
    return measure_latents(vae.eval().requires_grad_(False), keys, rng)


def measure_latents(vae: ImageVAE, keys: list[str], rng: random.Random) -> ImageVAE:
    """Set `latents_mean` and `latents_std` to those of the posteriors of 2048 training pictures.

    Of the posteriors, not of their means: a channel that carries nothing keeps a small mean rather than being blown up.
    """
    moments = [vae.encode_moments(_to_pixels([_picture(keys, rng) for _ in range(BATCH)])) for _ in range(32)]
    means, stds = (torch.cat(m).transpose(0, 1).flatten(1) for m in zip(*moments, strict=True))
    vae.vae.register_to_config(
        latents_mean=[round(v, 4) for v in means.mean(1).tolist()],
        latents_std=[round(v, 4) for v in (means.var(1) + stds.square().mean(1)).sqrt().tolist()],
    )
    return vae


def save_vae(vae: ImageVAE, folder: Path) -> None:
    """Write the released layout: 3-D kernels in bfloat16, whose last temporal tap is the trained 2-D kernel."""
    full = AutoencoderKLQwenImage(**{k: v for k, v in vae.vae.config.items() if not k.startswith("_")})
    state = full.state_dict()
    image_convs = {f"{n}.weight" for n, m in vae.vae.named_modules() if isinstance(m, _ImageConv2d)}
    for name, value in vae.vae.state_dict().items():
        if name in image_convs:
            state[name] = torch.zeros_like(state[name])
            state[name][:, :, -1] = value
        else:
            # Single pictures never reach the temporal layers.
            state[name] = torch.zeros_like(value) if "time_conv" in name else value
    full.load_state_dict(state)
    full.to(torch.bfloat16).save_pretrained(str(folder))
