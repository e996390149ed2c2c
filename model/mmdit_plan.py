"""How the MMDiT is cut for parallel training; `parallel` applies it without knowing the model."""

from torch import Tensor, nn

from model.layout import PackedLayout, shard_rows

# Tensor parallelism: module name pattern → how its weights are split over the `tp` axis (see
# `parallel.tensor_parallel`).  Heads and MLPs follow Megatron-LM (arXiv 1909.08053).  The modulation linears hold a
# third of the weights, so they are split as well and their small outputs gathered.
TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "time_text_embed.timestep_embedder.linear_1": "colwise",
    "time_text_embed.timestep_embedder.linear_2": "rowwise",
    "language_embed": "replicate",
    "txt_norm": "replicate",
    "img_in": "colwise_gather",
    "txt_in": "colwise_gather",
    "transformer_blocks.*.img_mod.1": "colwise_gather",
    "transformer_blocks.*.txt_mod.1": "colwise_gather",
    "transformer_blocks.*.attn": "joint_input",
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.add_q_proj": "colwise",
    "transformer_blocks.*.attn.add_k_proj": "colwise",
    "transformer_blocks.*.attn.add_v_proj": "colwise",
    # Replicated weights that see only the local heads: each rank's gradient is one part of the sum.
    "transformer_blocks.*.attn.norm_q": "head_norm",
    "transformer_blocks.*.attn.norm_k": "head_norm",
    "transformer_blocks.*.attn.norm_added_q": "head_norm",
    "transformer_blocks.*.attn.norm_added_k": "head_norm",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.attn.to_add_out": "rowwise",
    "transformer_blocks.*.img_mlp.net.0.proj": "colwise",
    "transformer_blocks.*.img_mlp.net.2": "rowwise",
    "transformer_blocks.*.txt_mlp.net.0.proj": "colwise",
    "transformer_blocks.*.txt_mlp.net.2": "rowwise",
    "norm_out.linear": "colwise_gather",
    "proj_out": "replicate",
}

# The same with sequence parallelism (arXiv 2205.05198): between the layers each rank keeps its share of the tokens.
SEQUENCE_PARALLEL_PLAN: dict[str, str] = TENSOR_PARALLEL_PLAN | {
    "txt_norm": "replicate_rows",
    "img_in": "replicate_rows",
    "txt_in": "replicate_rows",
    "transformer_blocks.*.img_mod.1": "colwise_gather_rows",
    "transformer_blocks.*.txt_mod.1": "colwise_gather_rows",
    "transformer_blocks.*.attn": "joint_input_rows",
    "transformer_blocks.*.attn.to_out.0": "rowwise_rows",
    "transformer_blocks.*.attn.to_add_out": "rowwise_rows",
    "transformer_blocks.*.img_mlp.net.0.proj": "colwise_rows",
    "transformer_blocks.*.img_mlp.net.2": "rowwise_rows",
    "transformer_blocks.*.txt_mlp.net.0.proj": "colwise_rows",
    "transformer_blocks.*.txt_mlp.net.2": "rowwise_rows",
    "norm_out.linear": "colwise_gather_rows",
    "proj_out": "replicate_rows",
}

# Context parallelism: the modules that exchange tokens for heads, and how the network's inputs are cut by tokens.
ATTENTIONS: tuple[str, ...] = ("transformer_blocks.*.attn",)


def shard_inputs(
    num_groups: int,
    group_size: int,
    index: int,
    img: Tensor,
    txt: Tensor,
    t: Tensor,
    layout: PackedLayout,
    language: Tensor | None = None,
) -> tuple:
    """Return the inputs of `MMDiT.forward` for one piece of the tokens; see `PackedLayout.shard`."""
    num_pieces = num_groups * group_size
    return (
        shard_rows(img, num_pieces, index),
        shard_rows(txt, num_pieces, index),
        t,
        layout.shard(num_groups, group_size, index),
        language,
    )


# Fully sharded data parallelism: each match is one unit, gathered and freed as a whole; the rest is the last unit.
FSDP_UNITS: tuple[str, ...] = ("transformer_blocks.*",)

# Float8: the parts whose matrix products may be rounded.  The modulation, few rows at a time, would gain nothing.
FLOAT8_PARTS: tuple[str, ...] = (
    "transformer_blocks.*.attn",
    "transformer_blocks.*.img_mlp",
    "transformer_blocks.*.txt_mlp",
)

# Low-rank adapters: the linear layers that get one unless others are named, all that work on single tokens.
LORA_TARGETS: tuple[str, ...] = (
    "transformer_blocks.*.attn.to_q",
    "transformer_blocks.*.attn.to_k",
    "transformer_blocks.*.attn.to_v",
    "transformer_blocks.*.attn.add_q_proj",
    "transformer_blocks.*.attn.add_k_proj",
    "transformer_blocks.*.attn.add_v_proj",
    "transformer_blocks.*.attn.to_out.0",
    "transformer_blocks.*.attn.to_add_out",
    "transformer_blocks.*.img_mlp.net.0.proj",
    "transformer_blocks.*.img_mlp.net.2",
    "transformer_blocks.*.txt_mlp.net.0.proj",
    "transformer_blocks.*.txt_mlp.net.2",
)


def without_gradient(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of which no output is made, those after the last block's text attention.

    A reduction that waits for every parameter's gradient, as DDP's does, must not wait for these.
    """
    last = model.transformer_blocks[-1]
    return [*last.attn.to_add_out.parameters(), *last.txt_mlp.parameters()]
