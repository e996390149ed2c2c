"""Draw pictures from prompts: `python -m tools.sample --run runs/mmdit --prompt "dog face" --prompt 狗脸`.

Takes the newest checkpoint of a run, or a folder in the released layout with weights in `transformer/`.  Writes one
PNG a prompt and a labelled grid.  A prompt may name its own size: "a dog on the left, a cat on the right @128x64"
(width x height in pixels).
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from data.captions import language_of, language_row
from data.tasks import MIXED, T2I, check_task
from model.encoders import Encoders
from model.latents import PATCH
from model.mmdit import MMDiT, MMDiTConfig
from model.sampling import SamplerSettings, generate
from parallel import checkpoint
from parallel.weights import read_safetensors
from tools.adapter import Adapter, load_adapted
from utils.config import parse, run_main
from utils.picture_grid import labelled_grid
from utils.random_streams import torch_generator
from utils.run_state import checkpoint_folder

log = logging.getLogger("sample")
_SIZE = re.compile(r"\s*@(\d+)x(\d+)\s*$")
# Our settings' names in scheduler_config.json, and what FlowMatchEulerDiscreteScheduler takes for those not in it.
_SCHEDULER_FIELDS = {
    "base_tokens": "base_image_seq_len", "max_tokens": "max_image_seq_len", "base_shift": "base_shift",
    "max_shift": "max_shift", "shift_terminal": "shift_terminal",
}  # fmt: skip
_SCHEDULER_DEFAULTS = {
    "base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15,
    "time_shift_type": "exponential",
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    run: str = ""  # a run folder: its newest valid checkpoint is used
    model: str = ""  # instead of a run: a folder in the released layout, with weights in transformer/
    step: int = -1  # which checkpoint of the run; -1 = the newest valid one
    weights: str = "ema"  # of a run's checkpoint: ema or raw
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()  # repeat the flag for more prompts
    prompts_file: str = ""  # one prompt a line, UTF-8
    negative_prompt: str = " "
    width: int = 64  # pixels, a multiple of 16
    height: int = 64
    num_steps: int = 30  # sampler steps
    cfg_scale: float = 2.0  # 1 = no guidance; the released pipelines use 4
    seed: int = 0
    max_tokens_per_pack: int = 8192  # image and text tokens in the network at once, both guidance halves counted
    output: str = "samples"  # folder
    dtype: str = "auto"  # float32, bfloat16; auto = bfloat16 on GPUs


def split_size(prompt: str, width: int, height: int) -> tuple[str, int, int]:
    """Split "text @128x64" into its text, width and height in pixels; the default size without the suffix.

    Raises: ValueError for a side that is not a positive multiple of 16.
    """
    if match := _SIZE.search(prompt):
        prompt, width, height = prompt[: match.start()], int(match[1]), int(match[2])
    if width % 16 or height % 16 or not width or not height:
        raise ValueError(f"a picture's sides must be positive multiples of 16 pixels, got {width} x {height}")
    return prompt, width, height


def find_model(run: str, model: str) -> tuple[Path, dict]:
    """Return the folder in the released layout that is behind a run or a folder, and the run's configuration, or {}.

    Raises: ValueError if neither or both are given, or the run folder is none.
    """
    if bool(run) == bool(model):
        raise ValueError("give either --run, a run folder, or --model, a folder in the released layout")
    if model:
        return Path(model), {}
    config_path = Path(run) / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{run} is no run folder: it has no config.json")
    trained = json.loads(config_path.read_text(encoding="utf-8"))
    return Path(trained["model"]), trained


def sampler_settings(model: Path, num_steps: int, cfg_scale: float) -> SamplerSettings:
    """Return the settings with which `diffusers` would sample from a folder; without a scheduler/, the released ones.

    Raises: ValueError if its scheduler does what ours does not.
    """
    path = model / "scheduler/scheduler_config.json"
    if not path.is_file():
        return SamplerSettings(num_steps, cfg_scale)
    scheduler = {k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if v is not None}
    needed = {
        "_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True,
        "time_shift_type": "exponential", "invert_sigmas": False, "stochastic_sampling": False,
        "use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False,
    }  # fmt: skip
    given = {k: scheduler.get(k, _SCHEDULER_DEFAULTS.get(k, False)) for k in needed}
    if given != needed:
        wrong = {k: v for k, v in given.items() if v != needed[k]}
        raise ValueError(f"{path} asks for {wrong}, which this sampler does not implement; it needs {needed}")
    fields = {name: scheduler.get(key, _SCHEDULER_DEFAULTS.get(key)) for name, key in _SCHEDULER_FIELDS.items()}
    return SamplerSettings(num_steps, cfg_scale, **fields)


def load_model(run: str, model: str, step: int, weights: str, device: torch.device, dtype: torch.dtype):
    """Load a transformer and its encoders from a run or a released folder.

    Returns (MMDiT in eval mode, Encoders, "where the weights came from").
    Raises: ValueError if neither or both are given, or nothing valid is there.
    """
    folder, trained = find_model(run, model)
    check_task(trained, run, (T2I, MIXED), "tools.edit or tools.evaluate_edit")
    overrides = {"num_languages": trained.get("num_languages", 0)} if run else {}
    mmdit_config = MMDiTConfig.from_folder(folder / "transformer", **overrides)
    with torch.device("meta"):
        network = MMDiT(mmdit_config)
    if run:
        checkpoints = checkpoint_folder(Path(run))
        step = checkpoint.latest(checkpoints) if step < 0 else step
        if step is None:
            raise ValueError(f"no valid checkpoint in {checkpoints}; has the run saved one yet?")
        prefix = {"ema": "ema.", "raw": "model."}.get(weights)
        if prefix is None:
            raise ValueError(f"--weights must be ema or raw, got {weights!r}")
        source = f"{checkpoints} step {step} ({weights})"
        if trained.get("lora_rank", 0):
            adapter = Adapter.from_run(checkpoint.StoredTensors(checkpoints, step), weights, trained)
            load_adapted(network, adapter, folder / "transformer")
            network.to(device, dtype).eval().requires_grad_(False)
            return network, Encoders(folder, device, dtype), f"{source}, adapters on {folder}"
        tensors = checkpoint.load_tensors(checkpoints, step, prefix)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    else:
        tensors, source = read_safetensors(folder / "transformer"), model
    network.load_state_dict(tensors, strict=True, assign=True)
    network.to(device, dtype).eval().requires_grad_(False)
    return network, Encoders(folder, device, dtype), source


def draw_pictures(
    network: nn.Module,
    encoders: Encoders,
    prompts: Sequence[str],
    noise: Sequence[Tensor],
    settings: SamplerSettings,
    negative_prompt: str = " ",
    max_tokens: int = 8192,
    languages: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """Generate one uint8 (H, W, 3) picture a prompt, several in a pack; noise: latents (C, h, w) on any device."""
    states, negative = [encoders.prompt(p) for p in prompts], encoders.prompt(negative_prompt)
    pictures: list[np.ndarray] = []
    with tqdm(total=len(prompts), unit="picture", disable=None) as progress:
        while (start := len(pictures)) < len(prompts):
            stop, used = start, 0
            while stop < len(prompts):
                grid_tokens = noise[stop].shape[1] * noise[stop].shape[2] // PATCH**2
                used += 2 * grid_tokens + len(states[stop]) + len(negative)
                if stop > start and used > max_tokens:
                    break
                stop += 1
            pack = slice(start, stop)
            latents = generate(
                network, states[pack], negative, [n.to(encoders.device) for n in noise[pack]], settings,
                languages[pack] if languages is not None else None,
            )  # fmt: skip
            pictures += [encoders.picture(x) for x in latents]
            progress.update(stop - start)
    return pictures


def main(cfg: Config) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, cfg.dtype) if cfg.dtype != "auto" else torch.float32
    if cfg.dtype == "auto" and device.type == "cuda":
        dtype = torch.bfloat16
    prompts = list(cfg.prompt)
    if cfg.prompts_file:
        prompts += [line for line in Path(cfg.prompts_file).read_text("utf-8-sig").splitlines() if line.strip()]
    if not prompts:
        raise ValueError("no prompt: give --prompt (repeatable) or --prompts_file")
    sized = [split_size(prompt, cfg.width, cfg.height) for prompt in prompts]
    settings = sampler_settings(find_model(cfg.run, cfg.model)[0], cfg.num_steps, cfg.cfg_scale)
    network, encoders, source = load_model(cfg.run, cfg.model, cfg.step, cfg.weights, device, dtype)
    print(f"weights: {source}")

    factor, channels = encoders.vae.scale_factor, encoders.vae.num_channels
    noise = [
        torch.randn(channels, height // factor, width // factor, generator=torch_generator(cfg.seed, 0, i, "sample"))
        for i, (_, width, height) in enumerate(sized)
    ]
    texts = [text for text, _, _ in sized]
    languages = [language_row(language_of(text)) for text in texts] if network.config.num_languages else None
    pictures = draw_pictures(
        network, encoders, texts, noise, settings, cfg.negative_prompt, cfg.max_tokens_per_pack, languages
    )
    output = Path(cfg.output)
    output.mkdir(parents=True, exist_ok=True)
    for i, picture in enumerate(pictures):
        Image.fromarray(picture).save(output / f"{i:03d}.png")
    scale = max(1, 128 // max(p.shape[0] for p in pictures))
    Image.fromarray(labelled_grid(pictures, texts, min(8, len(pictures)), scale)).save(output / "grid.png")
    print(f"{len(pictures)} pictures and grid.png in {output}/")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
