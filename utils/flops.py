"""Counting the arithmetic of an MMDiT step, and what a device could do at best.

One multiply-add counts as two operations.  Recomputation (activation checkpointing) does not count: it is no progress.
"""

from collections.abc import Sequence

import torch

from utils.devices import find_device


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the device's peak in FLOP/s for `dtype`, or None if it is not known: better no MFU than a wrong one."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    known = find_device(torch.cuda.get_device_name(device))
    return known.bf16_flops if known else None


def mmdit_forward_flops(config, img_lens: Sequence[int], txt_lens: Sequence[int]) -> int:
    """Return the operations of one forward pass over samples of these image and text tokens.

    config: an `MMDiTConfig`.  Matrix products only: projections, MLPs, modulations and the two attention products,
    whose score matrix has a row and a column for every token of the sample (it is not causal).
    """
    width, blocks = config.width, config.num_layers
    img, txt, samples = sum(img_lens), sum(txt_lens), len(img_lens)
    per_token = 12 * width * width  # q, k, v, out: 4; the MLP: 8
    # The last block computes no text output and no text MLP.
    tokens = blocks * img * per_token + (blocks - 1) * txt * per_token + txt * 3 * width * width
    attention = blocks * sum(2 * (i + t) ** 2 * width for i, t in zip(img_lens, txt_lens, strict=True))
    modulation = samples * blocks * 2 * 6 * width * width
    out_channels = config.patch_size**2 * config.out_channels
    ends = img * width * (config.in_channels + out_channels) + txt * config.joint_attention_dim * width
    ends += samples * (256 * width + width * width + 2 * width * width)
    return 2 * (tokens + attention + modulation + ends)
