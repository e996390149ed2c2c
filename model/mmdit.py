"""The Qwen-Image MMDiT over packed tokens: no padding, no mask, no batch axis.

Legend: B samples in the micro-batch, I image tokens, T text tokens, L = I + T, D width, N heads, Dh head dimension.
Parameter names are those of the released checkpoint (`diffusers` QwenImageTransformer2DModel).
Source: Qwen-Image technical report, arXiv 2508.02324.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import JointAttention
from model.layout import PackedLayout
from model.modulation import EPS, Modulation
from model.rope import rotary_factors

_TIME_CHANNELS = 256


@dataclass(frozen=True)
class MMDiTConfig:
    """The released `transformer/config.json`, plus `num_languages`."""

    patch_size: int = 2
    in_channels: int = 64
    out_channels: int = 16
    num_layers: int = 60
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 3584
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)
    zero_cond_t: bool = False  # reference tokens are modulated with t = 0 (the 2511 edit checkpoints)
    num_languages: int = 0  # rows of the language embedding; 0 = none

    def __post_init__(self):
        object.__setattr__(self, "axes_dims_rope", tuple(self.axes_dims_rope))
        if sum(self.axes_dims_rope) != self.attention_head_dim or any(d % 2 for d in self.axes_dims_rope):
            raise ValueError(
                f"axes_dims_rope {self.axes_dims_rope} must be even and sum to attention_head_dim "
                f"{self.attention_head_dim}, got {sum(self.axes_dims_rope)}"
            )
        if self.guidance_embeds:
            raise ValueError("guidance_embeds: guidance-distilled checkpoints cannot be trained here; use the base one")

    @property
    def width(self) -> int:
        """D."""
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def from_folder(cls, folder: str | Path, **overrides) -> "MMDiTConfig":
        """Read a released `transformer/` folder's config.json.

        Raises: ValueError if the file is missing, or holds a switch that this model does not implement.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"no model configuration at {path}; give a folder in the released layout")
        released = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("_")}
        released = {k: v for k, v in released.items() if v is not None} | overrides
        known = {f.name for f in fields(cls)}
        # `pooled_projection_dim` stands in the released file but no class reads it.
        unknown = {k: v for k, v in released.items() if k not in known and k != "pooled_projection_dim" and v}
        if unknown:
            raise ValueError(f"{path} asks for {unknown}, which this model does not implement")
        return cls(**{k: v for k, v in released.items() if k in known})

    def to_json(self) -> dict:
        """Return the content of a config.json that `diffusers` opens; extensions appear only when in use."""
        content = {"_class_name": "QwenImageTransformer2DModel"} | asdict(self)
        if not self.num_languages:
            del content["num_languages"]
        return content


class _GELU(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(dim, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class _MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        # Index 1 is a dropout without weights in the released checkpoint's class.
        self.net = nn.ModuleList([_GELU(dim, 4 * dim), nn.Identity(), nn.Linear(4 * dim, dim)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[0](x))


class MMDiTBlock(nn.Module):
    """One double-stream block: joint attention, then an MLP in each stream."""

    def __init__(self, config: MMDiTConfig, is_last: bool):
        super().__init__()
        dim = config.width
        self.is_last = is_last  # nothing reads the last block's text, so it is not computed
        self.img_mod = nn.Sequential(nn.Identity(), nn.Linear(dim, 6 * dim))  # index 0 is the released SiLU
        self.txt_mod = nn.Sequential(nn.Identity(), nn.Linear(dim, 6 * dim))
        self.attn = JointAttention(dim, config.num_attention_heads, config.attention_head_dim, not is_last)
        self.img_mlp = _MLP(dim)
        self.txt_mlp = _MLP(dim)

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        img_modulation: Modulation,
        txt_modulation: Modulation,
        rotary: Tensor,
        layout: PackedLayout,
    ) -> tuple[Tensor, Tensor | None]:
        """img: (I, D), txt: (T, D) → the same; None for the last block's text."""
        img_mod, txt_mod = img_modulation, txt_modulation
        shift1, scale1, gate1, shift2, scale2, gate2 = img_mod.rows(self.img_mod, 6)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = txt_mod.rows(self.txt_mod, 6)

        img_attn, txt_attn = self.attn(
            img_mod.norm(img, shift1, scale1), txt_mod.norm(txt, txt_shift1, txt_scale1), rotary, layout
        )
        img = img_mod.add_gated(img, gate1, img_attn)
        img = img_mod.add_gated(img, gate2, self.img_mlp(img_mod.norm(img, shift2, scale2)))
        if self.is_last:
            return img, None
        txt = txt_mod.add_gated(txt, txt_gate1, txt_attn)
        txt = txt_mod.add_gated(txt, txt_gate2, self.txt_mlp(txt_mod.norm(txt, txt_shift2, txt_scale2)))
        return img, txt


class _TimestepEmbedder(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.linear_1 = nn.Linear(_TIME_CHANNELS, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, t: Tensor) -> Tensor:
        """t: (B,) float32 in [0, 1] → (B, D) in the weights' dtype."""
        half = _TIME_CHANNELS // 2
        frequencies = torch.exp(-math.log(10_000) * torch.arange(half, dtype=t.dtype, device=t.device) / half)
        angles = 1000 * (t[:, None] * frequencies)  # the network's timestep runs from 0 to 1000
        embedding = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.linear_2(F.silu(self.linear_1(embedding.to(self.linear_1.weight.dtype))))


class _TimeTextEmbed(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.timestep_embedder = _TimestepEmbedder(dim)

    def forward(self, t: Tensor) -> Tensor:
        return self.timestep_embedder(t)


class _NormOut(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, img: Tensor, modulation: Modulation) -> Tensor:
        scale, shift = modulation.rows(self.linear, 2)
        return modulation.norm(img, shift, scale)


class MMDiT(nn.Module):
    """Multi-modal diffusion transformer that predicts the velocity of packed image tokens."""

    def __init__(self, config: MMDiTConfig):
        super().__init__()
        self.config = config
        dim = config.width
        self.time_text_embed = _TimeTextEmbed(dim)
        self.txt_norm = nn.RMSNorm(config.joint_attention_dim, eps=EPS)
        self.img_in = nn.Linear(config.in_channels, dim)
        self.txt_in = nn.Linear(config.joint_attention_dim, dim)
        if config.num_languages:
            self.language_embed = nn.Embedding(config.num_languages, dim)
        self.transformer_blocks = nn.ModuleList(
            MMDiTBlock(config, is_last=i == config.num_layers - 1) for i in range(config.num_layers)
        )
        self.norm_out = _NormOut(dim)
        self.proj_out = nn.Linear(dim, config.patch_size**2 * config.out_channels)

    def forward(
        self, img: Tensor, txt: Tensor, t: Tensor, layout: PackedLayout, language: Tensor | None = None
    ) -> Tensor:
        """Predict the velocity ε − x0 of every image token (reference tokens' outputs mean nothing).

        img: (I, in_channels), txt: (T, joint_attention_dim), any float dtype.
        t: (B,) in [0, 1], float32 (float64 for a float64 model); 0 is data, 1 is noise.
        language: (B,) int64, needed if and only if the model has a language embedding.
        Returns (I, patch_size² · out_channels) in the dtype of the weights.
        """
        if (language is not None) != bool(self.config.num_languages):
            raise ValueError(f"language given: {language is not None}, but num_languages {self.config.num_languages}")
        dtype = self.img_in.weight.dtype
        t = t.to(torch.float64 if dtype == torch.float64 else torch.float32)

        img_index, img_membership = layout.img_sample, layout.img_membership
        rows = t
        if self.config.zero_cond_t:  # rows B … 2 B − 1 modulate the reference tokens
            rows = torch.cat((t, torch.zeros_like(t)))
            img_index = img_index + layout.num_samples * layout.is_reference
            targets = img_membership * ~layout.is_reference
            img_membership = torch.cat((targets, img_membership - targets))
        embedding = self.time_text_embed(rows)
        if language is not None:
            embedding = embedding + self.language_embed(language).repeat(len(rows) // len(t), 1)
        conditioning = F.silu(embedding)
        img_modulation = Modulation(conditioning, img_index, img_membership)
        own_t = conditioning[: len(t)]
        txt_modulation = Modulation(own_t, layout.txt_sample, layout.txt_membership)

        rotary = rotary_factors(layout.positions[layout.joint_order], self.config.axes_dims_rope, t.dtype)

        img = self.img_in(img.to(dtype))
        txt = self.txt_in(self.txt_norm(txt.to(dtype)))
        for block in self.transformer_blocks:
            img, txt = block(img, txt, img_modulation, txt_modulation, rotary, layout)
        img = self.norm_out(img, Modulation(own_t, layout.img_sample, layout.img_membership))
        return self.proj_out(img)


def init_parameter(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Fill one full parameter in place for training from scratch.

    Modulations and the output start at zero, so that every block begins as the identity (adaLN-zero, arXiv
    2212.09748); biases and the language embedding are zero, norms one, other weights Xavier uniform.
    """
    zero = (
        "img_mod.1.weight",
        "txt_mod.1.weight",
        "norm_out.linear.weight",
        "proj_out.weight",
        "language_embed.weight",
    )
    with torch.no_grad():
        if name.endswith(zero) or name.endswith(".bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)
