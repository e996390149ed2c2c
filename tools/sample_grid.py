"""The labelled grid of pictures that a run shows of itself, drawn by all of its ranks together."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from data.captions import language_of, language_row
from data.pack import deal
from model.encoders import Encoders
from model.latents import PATCH
from model.sampling import SamplerSettings, generate
from parallel.distributed import is_main
from parallel.fsdp import gathered
from utils.picture_grid import labelled_grid
from utils.random_streams import torch_generator


@torch.no_grad()
def sample_grid(
    model: nn.Module,
    encoders: Encoders,
    prompts: Sequence[str],
    size: tuple[int, int],
    settings: SamplerSettings,
    seed: int,
    max_tokens: int,
    data_rank: int,
    num_data_ranks: int,
) -> np.ndarray | None:
    """Generate one picture a prompt, shared out over the data ranks; every rank takes part.

    size: height and width in pixels; max_tokens: in the network at once; each prompt's noise is its own.
    Returns the uint8 (H, W, 3) grid on rank 0, else None, and if there is no prompt.
    """
    if not prompts:
        return None
    latent_size = [side // encoders.vae.scale_factor for side in size]
    shape = (encoders.vae.num_channels, *latent_size)
    with gathered(encoders.text.language_model):
        states, negative = [encoders.prompt(p) for p in prompts], encoders.prompt(" ")
    tokens = [2 * math.prod(latent_size) // PATCH**2 + len(s) + len(negative) for s in states]
    languages = [language_row(language_of(p)) for p in prompts] if model.config.num_languages else None
    mine = {}
    for micro in deal(tokens, num_data_ranks, max(max_tokens, *tokens))[data_rank]:
        chosen = micro or [0]  # a rank without work still takes part in every gather
        noise = [torch.randn(shape, generator=torch_generator(seed, 0, i, "sample")) for i in chosen]
        latents = generate(
            model, [states[i] for i in chosen], negative, [n.to(encoders.device) for n in noise], settings,
            languages and [languages[i] for i in chosen],
        )  # fmt: skip
        mine |= {i: encoders.picture(x) for i, x in zip(micro, latents, strict=False)}
    parts = [{}] * dist.get_world_size() if is_main() else None
    dist.gather_object(mine, parts)
    if parts is None:
        return None
    pictures = {i: picture for part in parts for i, picture in part.items()}
    return labelled_grid([pictures[i] for i in range(len(prompts))], prompts, columns=8)
