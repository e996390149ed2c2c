"""What Qwen2.5-VL's vision tower takes: pictures of any size as patches.

Legend: N patches of all pictures, P pixels a patch side, M patches a merged token's side.
Source: `transformers` Qwen2VLImageProcessorPil with its own settings.  The released `preprocessor_config.json` has
another upper bound, which no condition picture comes near.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.image_transforms import resize
from transformers.image_utils import ChannelDimension, PILImageResampling

# Means and standard deviations a channel (CLIP's), and bounds on a picture's area.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True)
class VisionGeometry:
    """How a picture is cut: the fields of a `vision_config`."""

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2

    @classmethod
    def from_config(cls, vision_config: Mapping[str, Any]) -> "VisionGeometry":
        """Take the fields of a model's `vision_config`; what it leaves out is as released."""
        names = {
            "patch_size": "patch_size",
            "merge_size": "spatial_merge_size",
            "temporal_patch_size": "temporal_patch_size",
        }
        return cls(**{ours: vision_config[name] for ours, name in names.items() if name in vision_config})

    @property
    def token_pixels(self) -> int:
        """Pixels a side of one token, after merging."""
        return self.patch_size * self.merge_size

    def seen_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size, in multiples of a token, to which a picture is scaled before the tower sees it."""
        side, area = self.token_pixels, height * width
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > _MAX_PIXELS:
            scale = math.sqrt(area / _MAX_PIXELS)
            rows, columns = (max(1, math.floor(n / scale / side)) for n in (height, width))
        elif rows * columns * side**2 < _MIN_PIXELS:
            scale = math.sqrt(_MIN_PIXELS / area)
            rows, columns = (math.ceil(n * scale / side) for n in (height, width))
        return rows * side, columns * side

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the picture's (frames, rows, columns) of patches."""
        height, width = self.seen_size(height, width)
        return 1, height // self.patch_size, width // self.patch_size

    def num_tokens(self, height: int, width: int) -> int:
        """Return how many tokens of the language model the picture becomes."""
        _, rows, columns = self.grid(height, width)
        return rows * columns // self.merge_size**2

    def patches(self, pictures: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Cut pictures, uint8 (3, H, W) each, on the CPU.

        Returns the patches (N, 3 · frames · P²) float32, in the order of merged tokens, and each picture's grid
        (pictures, 3) int64.
        """
        cut = [self._cut(picture) for picture in pictures]
        grids = [self.grid(*picture.shape[1:]) for picture in pictures]
        return torch.cat(cut), torch.tensor(grids)

    def _cut(self, picture: Tensor) -> Tensor:
        height, width = self.seen_size(*picture.shape[1:])
        pixels = picture.cpu()
        if tuple(pixels.shape[1:]) != (height, width):
            first = ChannelDimension.FIRST
            resized = resize(pixels.numpy(), (height, width), PILImageResampling.BICUBIC, input_data_format=first)
            pixels = torch.from_numpy(resized)
        scaled = (pixels.permute(1, 2, 0).float() / 255 - torch.tensor(_MEAN)) / torch.tensor(_STD)
        side, merge = self.patch_size, self.merge_size
        blocks = scaled.reshape(height // side // merge, merge, side, width // side // merge, merge, side, 3)
        patches = blocks.permute(0, 3, 1, 4, 6, 2, 5).flatten(0, 3)  # (N, 3, P, P)
        # A still picture is a film of equal frames.
        return patches[:, :, None].expand(-1, -1, self.temporal_patch_size, -1, -1).flatten(1)
