"""A small network in the released layout's sizes and run folders with checkpoints of it, for tests.

Imports nothing that is slow, for the ranks that load it.
"""

import json
from pathlib import Path

import torch

from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import FSDP_UNITS, SEQUENCE_PARALLEL_PLAN, TENSOR_PARALLEL_PLAN
from parallel import checkpoint
from parallel.fsdp import shard_model
from parallel.mesh import build_mesh, weights_mesh
from parallel.tensor_parallel import apply_tensor_parallel
from parallel.weights import load_weights

# A width of 9 is cut unevenly by any number of ranks.
SMALL = MMDiTConfig(
    num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=9, in_channels=8, out_channels=2,
    axes_dims_rope=(2, 2, 4),
)  # fmt: skip


def make_run(
    run: Path, model: Path, tensors: dict[str, torch.Tensor], state: dict | None = None, steps: tuple[int, ...] = (3,)
) -> Path:
    """Make a run folder with these tensors, and more state, in the checkpoint of every step; all ranks take part."""
    for step in steps:
        checkpoint.save(run / "checkpoints", step, tensors, {"step": step} | (state or {}))
    (run / "config.json").write_text(json.dumps({"model": str(model)}))
    return run


def make_runs_on_meshes(rank, world_size, cases: list[tuple], models: dict[str, Path], folder: Path) -> None:
    """Load each model's transformer on each mesh, as training does, and make the run folder/name-case of it.

    cases: (mesh sizes, whether with sequence parallelism).  The raw weights are what was loaded, the average is its
    negative.
    """
    for case in cases:
        sizes, by_rows = case
        mesh = weights_mesh(build_mesh("cpu", *sizes))
        for name, model in models.items():
            with torch.device("meta"):
                network = MMDiT(SMALL)
            apply_tensor_parallel(network, SEQUENCE_PARALLEL_PLAN if by_rows else TENSOR_PARALLEL_PLAN, mesh["tp"])
            shard_model(network, FSDP_UNITS, mesh, torch.float32, torch.float32, True)
            network.to_empty(device="cpu")
            load_weights(network, model / "transformer")
            tensors = {f"model.{n}": p.detach() for n, p in network.named_parameters()}
            tensors |= {f"ema.{n}": -p.detach() for n, p in network.named_parameters()}
            make_run(folder / f"{name}-{case}", model, tensors)
