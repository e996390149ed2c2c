"""What a plan of train_edit_ddp.py's step is about: networks, what is trained, and the edits of a micro-batch."""

from dataclasses import dataclass, field

import torch
from transformers import Qwen2_5_VLConfig

from data.reference_size import Size
from model.mmdit import MMDiTConfig
from model.text_encoder import EditTokens
from model.vision_input import VisionGeometry

TRAINABLE = ("planner,renderer", "planner", "renderer")
_PREFIX, _MARKS = 64, 6  # tokens of the edit template: before the states, and around each picture
IMAGE, WORD = 1, 2  # ids that stand for a picture's place and for any other token


def released_vlm() -> Qwen2_5_VLConfig:
    """Return the configuration of the released planner, Qwen2.5-VL 7B: text_encoder/config.json of Qwen-Image-Edit."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False, "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112, "patch_size": 14,
    }  # fmt: skip
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


@dataclass(frozen=True)
class EditSettings:
    """What decides a step's memory."""

    renderer: MMDiTConfig = field(default_factory=MMDiTConfig)
    vlm: Qwen2_5_VLConfig = field(default_factory=released_vlm, compare=False)
    train: str = "planner,renderer"
    freeze_vision: bool = False
    lora_rank: int = 0
    lora_base: str = "auto"
    num_ranks: int = 1
    zero: bool = False
    optimizer: str = "adamw"
    grids: tuple[tuple[tuple[int, int, int], ...], ...] = (
        ((1, 64, 64), (1, 64, 64)),
    )  # target first; see PackedLayout
    num_words: tuple[int, ...] = (60,)  # tokens of each instruction with the end of its turn; pictures' come on top
    conditions: tuple[tuple[Size, ...], ...] = (((384, 384),),)  # each reference as the planner sees it, in pixels
    num_answer: int = 100  # tokens of a plan
    accumulate: int = 1  # micro-batches a step
    dtype: torch.dtype = torch.bfloat16
    activation_checkpointing: str = "none"  # of the renderer
    cuda: bool = True  # branches and kernels of CUDA rather than of a CPU

    @property
    def num_image_tokens(self) -> int:
        """The renderer's image tokens, references included."""
        return sum(f * h * w for images in self.grids for f, h, w in images)

    @property
    def text_lens(self) -> list[int]:
        """The renderer's text tokens of each sample."""
        return [len(row.ids) - _PREFIX for row in self.rows]

    @property
    def rows(self) -> list[EditTokens]:
        """Token ids of each sample, made up."""
        geometry = VisionGeometry.from_config(self.vlm.vision_config.to_dict())
        rows = []
        for sizes, words in zip(self.conditions, self.num_words, strict=True):
            pictures = [[WORD] * _MARKS + [IMAGE] * geometry.num_tokens(*size) for size in sizes]
            row = [WORD] * _PREFIX + sum(pictures, []) + [WORD] * words
            rows.append(EditTokens(row, _PREFIX, len(row)))
        return rows
