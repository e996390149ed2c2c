"""The `diffusers` edit pipelines on the tiny model, with what they need and cannot build here."""

from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
)
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from model.mmdit import MMDiTConfig
from tests.released_folder import TINY, make_released


class Processor:
    """Stands in for Qwen2VLProcessor, whose video part needs torchvision: the library's picture processor, and tokens.

    It gives the tokens' kinds too, as the library's does.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.image_processor = tokenizer, Qwen2VLImageProcessorPil()

    def __call__(self, text, images=None, padding=True, return_tensors="pt", **unused):
        features, counts = {}, []
        if images is not None:
            images = images if isinstance(images, list) else [images]
            features = dict(self.image_processor(images=images, return_tensors=return_tensors))
            counts = [int(grid.prod()) // 4 for grid in features["image_grid_thw"]]
        filled = []
        for one in text:
            for count in counts:
                one = one.replace("<|image_pad|>", "<|holder|>" * count, 1)
            filled.append(one.replace("<|holder|>", "<|image_pad|>"))
        features |= self.tokenizer(filled, padding=padding, return_tensors=return_tensors, padding_side="left")
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        features["mm_token_type_ids"] = (features["input_ids"] == pad).int()
        return BatchFeature(features)


def tell_kinds(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """Let a model work out the tokens' kinds if its caller leaves them out (diffusers #14194), as it once did."""
    forward = model.forward

    def with_kinds(input_ids=None, **inputs):
        if inputs.get("mm_token_type_ids") is None and input_ids is not None:
            inputs["mm_token_type_ids"] = (input_ids == model.config.image_token_id).int()
        return forward(input_ids=input_ids, **inputs)

    model.forward = with_kinds


def text_pipeline(kind=QwenImageEditPlusPipeline, with_kinds: bool = True, folder: Path = TINY, **parts):
    """Return a pipeline that can encode text and pictures; parts: what it needs for more."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    if with_kinds:
        tell_kinds(model)
    parts = dict.fromkeys(("scheduler", "vae", "transformer")) | parts
    pipeline = kind(text_encoder=model.eval(), tokenizer=tokenizer, processor=None, **parts)
    pipeline.processor = Processor(tokenizer)
    return pipeline


def picture_pipeline(folder: Path, kind=QwenImageEditPlusPipeline):
    """Return the whole pipeline of a released folder, in float32."""
    pipeline = text_pipeline(
        kind,
        folder=folder,
        vae=AutoencoderKLQwenImage.from_pretrained(folder / "vae", torch_dtype=torch.float32),
        transformer=QwenImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_edit_folder(folder: Path, config: MMDiTConfig) -> Path:
    """Make a released folder whose random transformer draws what depends on each reference and on their order."""
    make_released(folder, config)
    network = QwenImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    torch.manual_seed(0)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.xavier_normal_(parameter, gain=2.0 if ".attn." in name else 1.0)
        else:
            torch.nn.init.constant_(parameter, 2.0 if "norm" in name else 0.0)
    network.save_pretrained(folder / "transformer", max_shard_size="40KB")
    return folder


def random_picture(height: int, width: int, seed: int) -> Image.Image:
    """Return a picture of coarse random blocks."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def as_tensor(picture: Image.Image) -> torch.Tensor:
    """Return a picture as uint8 (3, H, W)."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
