"""A small network with every kind of layer that tensor parallelism has a style for."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLAN = {
    "embed": "replicate",
    "norm_in": "replicate",
    "blocks.*.mod": "colwise_gather",
    "blocks.*.attn": "joint_input",
    "blocks.*.attn.to_q": "colwise",
    "blocks.*.attn.to_k": "colwise",
    "blocks.*.attn.to_v": "colwise",
    "blocks.*.attn.norm_q": "head_norm",
    "blocks.*.attn.to_out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.unused": "colwise",
    "out": "replicate",
}
UNITS = ("blocks.*",)
DIM, HEADS, HEAD_DIM = 12, 4, 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, HEADS * HEAD_DIM) for _ in range(3))
        self.norm_q = nn.RMSNorm(HEAD_DIM, eps=1e-6)
        self.to_out = nn.Linear(HEADS * HEAD_DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1) for project in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(F.scaled_dot_product_attention(self.norm_q(q), k, v).transpose(0, 1).flatten(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mod = nn.Linear(DIM, 2 * DIM)
        self.attn = Attention()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.unused = nn.Linear(DIM, DIM)  # never gets a gradient

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.mod(condition).chunk(2, dim=-1)
        x = x + self.attn(x * (1 + scale) + shift)
        return x + self.down(F.gelu(self.up(x)))


class Toy(nn.Module):
    """Odd sizes on purpose: shards are uneven, and some are empty."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, DIM)
        self.norm_in = nn.RMSNorm(DIM, eps=1e-6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(DIM, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        condition = self.embed(label)
        x = self.norm_in(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


def init_toy(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    nn.init.normal_(parameter, std=0.3, generator=generator)


def toy_batch(dtype: torch.dtype, num: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return (num, 7, DIM) inputs, (num,) labels and (num, 7, 5) targets."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num, 7, DIM, generator=generator, dtype=dtype)
    return x, torch.arange(num) % 5, torch.randn(num, 7, 5, generator=generator, dtype=dtype)
