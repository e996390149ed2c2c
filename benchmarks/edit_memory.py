"""What training the edit model needs, and what a frozen vision tower saves: `./launch.sh -m benchmarks.edit_memory`.

Trains a few real steps of planner and renderer of the tiny model on this process, wrapped in DDP, and plans the same
steps with fake tensors.  The truth about memory is the allocator's own report (torch.profiler's memory events).
"""

from dataclasses import dataclass, replace

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2_5_VLConfig

from benchmarks.memory import allocator_peak
from model.mmdit import MMDiTConfig
from parallel.distributed import init_distributed, shutdown
from tools.plan_edit import EditJob, EditPlan, make_edit_trace, plan_edit
from tools.plan_edit_settings import EditSettings
from utils.config import parse, run_main

MIB = 2**20


@dataclass(frozen=True)
class Config:
    model: str = "assets/tiny"  # folder in the released layout; its configurations alone are read
    num_samples: int = 8  # a micro-batch
    side: int = 96  # pixels a side of targets and references
    lora_rank: int = 8  # of the rows with adapters


def settings(cfg: Config) -> EditSettings:
    """Return a step on `num_samples` edits of one reference each, as the default run has them."""
    grid = (1, cfg.side // 16, cfg.side // 16)
    return EditSettings(
        renderer=MMDiTConfig.from_folder(f"{cfg.model}/transformer"),
        vlm=Qwen2_5_VLConfig.from_pretrained(f"{cfg.model}/text_encoder"),
        grids=((grid, grid),) * cfg.num_samples,
        num_words=tuple(range(12, 12 + cfg.num_samples)),
        conditions=(((cfg.side, cfg.side),),) * cfg.num_samples,
        num_answer=40,
        dtype=torch.float32,
        cuda=False,
    )


@dataclass(frozen=True)
class Measured:
    """What one process's real steps held."""

    num_bytes: dict[str, int]  # between steps: parameters, gradients, optimizer, EMA
    allocator_peak: int  # bytes that a step adds to them
    kept: dict[str, int]  # by network: what the forward leaves for the backward, beyond what was there before


def measure(chosen: EditSettings) -> Measured:
    """Train three steps: one to warm up, one whose tensors are followed, one that the allocator reports on."""
    job = EditJob(chosen)
    job.materialize(with_ddp=True)
    with torch.no_grad():  # what was in the memory before may be slow to compute with
        for tensor in job.networks.parameters():
            tensor.normal_(std=0.02)
        for tensor in job.networks.buffers():
            tensor.fill_(0.1)
    job.step()
    trace = make_edit_trace(job)
    with trace.following():
        num_bytes = job.step(trace)
    kept = EditPlan(chosen, num_bytes, trace.memory.peaks()).kept()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job.step()
    return Measured(num_bytes, allocator_peak(profiler), kept)


def rows(cfg: Config) -> dict[str, EditSettings]:
    """Return what is compared, by name."""
    both = settings(cfg)
    adapters = replace(both, lora_rank=cfg.lora_rank)
    return {
        "both networks": both,
        "both, vision tower frozen": replace(both, freeze_vision=True),
        "planner": replace(both, train="planner"),
        "planner, vision tower frozen": replace(both, train="planner", freeze_vision=True),
        "renderer": replace(both, train="renderer"),
        f"renderer, LoRA {cfg.lora_rank}": replace(adapters, train="renderer"),
        f"renderer, LoRA {cfg.lora_rank}, base int8": replace(adapters, train="renderer", lora_base="int8"),
        f"renderer, LoRA {cfg.lora_rank}, base nf4": replace(adapters, train="renderer", lora_base="nf4"),
    }


def main(cfg: Config) -> None:
    if init_distributed(600.0).type != "cpu":
        raise ValueError("this benchmark compares on the CPU; hide the GPUs with CUDA_VISIBLE_DEVICES=''")
    real = {name: measure(chosen) for name, chosen in rows(cfg).items()}
    shutdown()
    print("MiB; plan / measured where both are there; activations: left by a forward pass for its backward pass")
    print(f"{'trained':<34}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'activations':>13}{'step adds':>20}")
    for name, chosen in rows(cfg).items():
        plan, found = plan_edit(chosen), real[name]
        assert plan.num_bytes == found.num_bytes, (name, plan.num_bytes, found.num_bytes)
        weights, gradients, optimizer = (found.num_bytes[k] / MIB for k in ("parameters", "gradients", "optimizer"))
        kept = " + ".join(f"{n / MIB:.1f}" for n in found.kept.values())
        adds = f"{plan.step_adds() / MIB:.1f} / {found.allocator_peak / MIB:.1f}"
        print(f"{name:<34}{weights:>9.1f}{gradients:>11.1f}{optimizer:>11.1f}{kept:>13}{adds:>20}")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
