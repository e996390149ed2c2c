"""Joint attention over packed samples: every token sees exactly the tokens of its own sample.

Legend: I image tokens, T text tokens, L = I + T, N heads (local under tensor parallelism), Dh head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from model.layout import PackedLayout
from model.rope import apply_rotary
from model.segment_attention import segment_attention


class _PermuteRows(torch.autograd.Function):
    """`x[order]` for a permutation; its backward is a gather too, where index_select's would be a slow scatter-add."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _PermuteRows.apply(grad, inverse, order), None, None


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return `x[order]`, x: (L, ...), where `order` and `inverse` (L,) are permutations that undo each other."""
    return _PermuteRows.apply(x, order, inverse)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    """Attend within each sample.

    q, k, v: (L, N, Dh) in joint order.  Returns (L, N, Dh).
    CUDA half precision: one variable-length flash kernel.  Otherwise one scaled-dot-product call for each run of
    samples of equal length; in compiled blocks as one operator, since a graph must not depend on the lengths.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        bounds, longest = layout.cu_seqlens, layout.max_seqlen
        return varlen_attn(q, k, v, bounds, bounds, longest, longest)
    if torch.compiler.is_compiling() and q.device.type == "cpu":
        return segment_attention(q, k, v, layout.cu_seqlens)
    # One split, not a slice a run: a slice's backward would fill a tensor of all tokens for each run.
    sizes = [num_samples * length for num_samples, length in layout.runs]
    pieces = []
    for (_, length), *run in zip(layout.runs, *(x.split(sizes) for x in (q, k, v)), strict=True):
        q_run, k_run, v_run = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in run)
        pieces.append(F.scaled_dot_product_attention(q_run, k_run, v_run).transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces)


class JointAttention(nn.Module):
    """Attention of the image and text streams over each other, with separate weights and q/k norms for each."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, has_txt_output: bool = True):
        super().__init__()
        inner = num_heads * head_dim
        self.head_dim = head_dim
        self.has_txt_output = has_txt_output
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, inner) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(dim, inner) for _ in range(3))
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=1e-6) for _ in range(2))
        self.norm_added_q, self.norm_added_k = (nn.RMSNorm(head_dim, eps=1e-6) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(inner, dim)])
        self.to_add_out = nn.Linear(inner, dim)

    def tokens_to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Where tokens are shared out over ranks, replaced by an exchange: some tokens, all heads → all, some."""
        return tensors

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The way back: all tokens, some heads → some, all."""
        return x

    def forward(self, img: Tensor, txt: Tensor, rotary: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor | None]:
        """img: (I, D), txt: (T, D), rotary: (L, 1, Dh / 2) complex, in joint order.

        Returns (I, D) and (T, D), or None for the text where its output is not needed.
        """
        # Heads under tensor parallelism: the module never learns its rank; the local head count follows from the shape.
        heads = (-1, self.head_dim)
        qkv = []
        for txt_proj, txt_norm, img_proj, img_norm in (
            (self.add_q_proj, self.norm_added_q, self.to_q, self.norm_q),
            (self.add_k_proj, self.norm_added_k, self.to_k, self.norm_k),
            (self.add_v_proj, None, self.to_v, None),
        ):
            txt_heads, img_heads = txt_proj(txt).unflatten(-1, heads), img_proj(img).unflatten(-1, heads)
            if txt_norm is not None:
                txt_heads, img_heads = txt_norm(txt_heads), img_norm(img_heads)
            qkv.append(torch.cat((txt_heads, img_heads)))

        q, k, v = (permute_rows(x, layout.joint_order, layout.joint_inverse) for x in self.tokens_to_heads(*qkv))
        out = packed_attention(apply_rotary(q, rotary), apply_rotary(k, rotary), v, layout)
        out = self.heads_to_tokens(permute_rows(out, layout.joint_inverse, layout.joint_order)).flatten(1)
        txt_out, img_out = out.split((len(txt), len(img)))
        return self.to_out[0](img_out), self.to_add_out(txt_out) if self.has_txt_output else None
