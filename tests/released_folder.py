"""A folder in the released layout with a small transformer of random weights, made by diffusers, for tests."""

import shutil
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel

from model.mmdit import MMDiTConfig
from parallel.weights import read_safetensors

TINY = Path(__file__).resolve().parent.parent / "assets/tiny"


def make_released(folder: Path, config: MMDiTConfig, dtype: torch.dtype = torch.float32) -> Path:
    """Make a folder in the released layout, its random transformer saved by diffusers in several files."""
    shutil.copytree(TINY, folder)
    torch.manual_seed(0)
    settings = {k: v for k, v in config.to_json().items() if k != "_class_name"}
    network = QwenImageTransformer2DModel(**settings)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    network.to(dtype).save_pretrained(folder / "transformer", max_shard_size="40KB")
    return folder


def weights_of(model: Path, kind: str = "ema") -> dict[str, torch.Tensor]:
    prefix = {"ema": "ema.", "raw": "model."}[kind]
    return {prefix + name: tensor for name, tensor in read_safetensors(model / "transformer").items()}


def same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def content(tensors):
        return {
            n: (t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for n, t in tensors.items()
        }

    return content(a) == content(b)
