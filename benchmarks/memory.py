"""How near a plan comes to real steps: `torchrun --nproc_per_node=4 -m benchmarks.memory --tp 2`.

Each process trains a few steps of a real, randomly filled network with gloo on the CPU, then plans its own rank with
fake tensors and compares.  The truth about memory is the allocator's own report (torch.profiler's memory events): it
also sees what kernels and gloo allocate inside themselves.  Collectives are recorded from the dispatcher in both.
"""

import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from model.mmdit import MMDiTConfig
from parallel.distributed import gather_results, init_distributed, is_main, shutdown
from parallel.mesh import build_mesh
from parallel.step_trace import StepTrace
from tools.plan_depth import plan_step
from tools.plan_step import StepSettings, TrainingState, make_batch, make_trace, trace_step
from utils.config import parse, run_main

MIB = 2**20
TRACED_STEPS = 3
# Width 768, 9 blocks: 197 M parameters, in proportions like the released model's.
MODELS = {
    "tiny": MMDiTConfig(
        num_layers=4, attention_head_dim=32, num_attention_heads=4, joint_attention_dim=128, axes_dims_rope=(8, 12, 12)
    ),
    "200m": MMDiTConfig(num_layers=9, num_attention_heads=6),
}


@dataclass(frozen=True)
class Config:
    model: str = "200m"  # tiny or 200m
    dp_replicate: int = 1
    dp_shard: int = -1  # -1 = all processes that are left
    cp: int = 1
    tp: int = 1
    accumulate: int = 2  # micro-batches a step
    num_samples: int = 2  # a micro-batch
    side: int = 16  # tokens a side of each picture: 16 = 256 pixels
    txt_len: int = 64
    dtype: str = "float32"  # float32 or bfloat16
    reshard_after_forward: bool = True
    activation_checkpointing: str = "none"


@dataclass(frozen=True)
class Measured:
    """What one rank's real step did."""

    num_bytes: dict[str, int]  # parameters, gradients, optimizer, EMA
    collectives: Counter
    traced_peak: int  # bytes that the step adds to what lies between steps, as the dispatcher sees it
    allocator_peak: int  # the same, as the allocator reports it


def measure(settings: StepSettings) -> Measured:
    """Train on this process's part of the mesh: one step to warm up, some traced, one profiled.

    A thread of gloo lets go of a collective's buffers when it next runs, on a busy machine long after the step has gone
    on: what a step holds by itself is the least of several.
    """
    mesh = build_mesh("cpu", settings.dp_replicate, settings.dp_shard, settings.cp, settings.tp)
    state = TrainingState(settings, mesh)
    state.materialize("cpu")
    with torch.no_grad():  # what was in the memory before may be slow to compute with
        for tensor in state.tensors()["parameters"]:
            tensor.normal_(std=0.02)
    state.step(lambda: make_batch(settings))
    traced_peaks = []
    for _ in range(TRACED_STEPS):
        trace = make_trace(state, settings)
        with trace.following():
            num_bytes = state.step(lambda: make_batch(settings), trace)
        traced_peaks.append(step_bytes(trace, num_bytes))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state.step(lambda: make_batch(settings))
    return Measured(num_bytes, sum_collectives(trace), min(traced_peaks), allocator_peak(profiler))


def allocator_peak(profiler: profile) -> int:
    """Return the most bytes that the CPU allocator held at once beyond those at the profile's start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak


def sum_collectives(trace: StepTrace) -> Counter:
    """Return all collectives of the traced step."""
    return sum(trace.collectives.values(), Counter())


def step_bytes(trace: StepTrace, num_bytes: dict[str, int]) -> int:
    """Return the most bytes that the traced step held at once beyond what lies between steps."""
    between_steps = sum(num_bytes[kind] for kind in ("parameters", "optimizer", "EMA"))
    return max(peak.total() for peak in trace.memory.peaks().values()) - between_steps


def main(cfg: Config) -> None:
    if cfg.model not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, got {cfg.model!r}")
    device = init_distributed(600.0)
    if device.type != "cpu":
        raise ValueError("this benchmark compares on the CPU; hide the GPUs with CUDA_VISIBLE_DEVICES=''")
    mesh = build_mesh("cpu", cfg.dp_replicate, cfg.dp_shard, cfg.cp, cfg.tp)
    settings = StepSettings(
        model=MODELS[cfg.model],
        **{axis: mesh[axis].size() for axis in mesh.mesh_dim_names},
        grids=(((1, cfg.side, cfg.side),),) * cfg.num_samples,
        txt_lens=(cfg.txt_len,) * cfg.num_samples,
        accumulate=cfg.accumulate,
        dtype=getattr(torch, cfg.dtype),
        reshard_after_forward=cfg.reshard_after_forward,
        activation_checkpointing=cfg.activation_checkpointing,
        cuda=False,
    )
    main_process = is_main()
    own = measure(settings)
    everyone = gather_results(lambda: own)
    dist.barrier()
    shutdown()
    if not main_process:
        return
    print(f"{cfg.model}, {mesh}, {cfg.dtype}, checkpointing {cfg.activation_checkpointing}")
    print(f"{cfg.accumulate} micro-batches of {sum(settings.attention_lens)} tokens")
    print(f"{'':<34}{'plan':>14}{'real':>14}{'difference':>12}")
    for number, real in enumerate(everyone):
        plan = trace_step(settings, number)
        rows = [(kind, plan.num_bytes[kind], real.num_bytes[kind]) for kind in plan.num_bytes]
        planned = step_bytes(plan.trace, plan.num_bytes)
        rows.append(("step's peak, dispatcher", planned, real.traced_peak))
        rows.append(("step's peak, allocator", planned, real.allocator_peak))
        for name, ours, truth in rows:
            difference = "exact" if ours == truth else f"{ours / truth - 1:+.2%}"
            print(f"rank {number} {name:<27}{ours / MIB:>10.2f} MiB{truth / MIB:>10.2f} MiB{difference:>12}")
        ours, truth = sum_collectives(plan.trace), real.collectives
        same = "exact" if ours == truth else f"{(ours - truth).total() + (truth - ours).total()} differ"
        print(f"rank {number} {'collectives':<27}{ours.total():>14}{truth.total():>14}{same:>12}")
    extrapolated = plan_step(settings)
    same = "exact" if extrapolated.totals("collectives") == everyone[0].collectives else "differ"
    print(f"extrapolated from shallow models: peak {extrapolated.peak()[1].total() / MIB:.2f} MiB, collectives {same}")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
