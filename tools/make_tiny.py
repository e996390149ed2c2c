"""Make the tiny model of `assets/tiny`, in the released folder layout: `python -m tools.make_tiny`.

More than an hour on two cores: the VAE (`tools.tiny_vae`), the text encoder (`tools.tiny_text`) and its vision tower
(`tools.tiny_vision`) are really trained, on the emoji, and the text encoder again, to find in pictures what it reads of
(`tools.tiny_grounding`).  `transformer/` holds a configuration only, since training it is what `train_mmdit.py` is for.
Seeded: the same machine and thread count give the same files.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from data.emoji import small_list
from data.emoji_table import load_emoji
from model.text_encoder import TextEncoder
from tools.tiny_grounding import pointing, train_grounding
from tools.tiny_scenes import emoji_lists
from tools.tiny_text import WIDTH, retrieval, save_text, train_text_encoder, train_tokenizer
from tools.tiny_vae import save_vae, train_vae, validation_psnr
from tools.tiny_vision import picture_retrieval, train_vision
from utils.config import parse, run_main

TRANSFORMER = {
    "_class_name": "QwenImageTransformer2DModel",
    "attention_head_dim": 32,
    "axes_dims_rope": [8, 12, 12],
    "guidance_embeds": False,
    "in_channels": 64,
    "joint_attention_dim": WIDTH,
    "num_attention_heads": 4,
    "num_layers": 4,
    "out_channels": 16,
    "patch_size": 2,
}
# The values of the released scheduler/scheduler_config.json.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
PIPELINE = {
    "_class_name": "QwenImagePipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}


@dataclass(frozen=True)
class Config:
    output: str = "assets/tiny"  # folder
    # What to make again.  text: tokenizer, language model and what builds on them; vision: the tower and what follows;
    # grounding: the text encoder's last lesson alone
    part: Literal["all", "vae", "text", "vision", "grounding", "configs"] = "all"


def main(cfg: Config) -> None:
    folder = Path(cfg.output)
    for name, content in (
        ("transformer/config.json", TRANSFORMER),
        ("scheduler/scheduler_config.json", SCHEDULER),
        ("model_index.json", PIPELINE),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
    if cfg.part in ("all", "text"):
        tokenizer = train_tokenizer()
        model = train_text_encoder(tokenizer)
        everyone = load_emoji()
        for name, chars in (("curated", small_list()), ("all", everyone)):
            names = [(everyone[c].en, everyone[c].zh) for c in chars]
            print(
                f"text: nearest name in the other language, {name} {len(names)}: {retrieval(model, tokenizer, names)}"
            )
        save_text(model, tokenizer, folder)
    if cfg.part in ("all", "text", "vision"):
        tokenizer = TextEncoder.tokenizer_only(folder).tokenizer
        train_vision(folder, tokenizer)
        model = TextEncoder.from_folder(folder, torch.device("cpu"), with_vision=True).vlm
        for name, emoji in zip(("curated", "in scenes", "all"), emoji_lists(), strict=True):
            print(f"vision: picture to name, {name} {len(emoji)}: {picture_retrieval(model, tokenizer, emoji)}")
    if cfg.part in ("all", "text", "vision", "grounding"):
        train_grounding(folder, TextEncoder.tokenizer_only(folder).tokenizer)
        text = TextEncoder.from_folder(folder, torch.device("cpu"), with_vision=True)
        print(f"grounding: the right one of two boxes, by name: {pointing(text)}")
    if cfg.part in ("all", "vae"):
        vae = train_vae()
        print(f"vae: {validation_psnr(vae):.2f} dB on the held-out emoji")
        save_vae(vae, folder / "vae")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
