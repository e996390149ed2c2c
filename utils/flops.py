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


def device_scalars(flops_per_s: float, peak: float | None, device: torch.device) -> dict[str, float]:
    """Return what to log of a device's work: tflops, mfu where its peak is known, and on GPUs the memory's peak."""
    scalars = {"tflops": flops_per_s / 1e12} | ({"mfu": flops_per_s / peak} if peak else {})
    return scalars | ({"mem_gib": torch.cuda.max_memory_allocated(device) / 2**30} if device.type == "cuda" else {})


def mmdit_step_flops(config, img_lens: Sequence[int], txt_lens: Sequence[int], is_frozen: bool = False) -> int:
    """Return the operations of one forward and backward pass; see `mmdit_forward_flops`.

    Backward has two products for each of forward's, but one where a weight is frozen and gets no gradient.
    is_frozen: all weights are; adapters, a few per cent of the work, are not counted.
    """
    products, attention = mmdit_forward_flops(config, img_lens, txt_lens), _attention_flops(config, img_lens, txt_lens)
    return 3 * products - (products - attention if is_frozen else 0)


def _attention_flops(config, img_lens: Sequence[int], txt_lens: Sequence[int]) -> int:
    squares = sum((i + t) ** 2 for i, t in zip(img_lens, txt_lens, strict=True))
    return 2 * config.num_layers * 2 * squares * config.width


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
    modulation = samples * blocks * 2 * 6 * width * width
    out_channels = config.patch_size**2 * config.out_channels
    ends = img * width * (config.in_channels + out_channels) + txt * config.joint_attention_dim * width
    ends += samples * (256 * width + width * width + 2 * width * width)
    return 2 * (tokens + modulation + ends) + _attention_flops(config, img_lens, txt_lens)
