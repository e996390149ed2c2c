"""Where a step of the default run goes: `./launch.sh benchmarks/step_time.py` (it takes train_mmdit.py's flags).

Runs the real script for some steps, twice: the phases of a step, as the script measures them, are medians over the
second half of the first run; the share of communication comes from PyTorch's profiler in the second, as the time that
rank 0 spends inside gloo or NCCL calls.
"""

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import train_mmdit
from parallel.distributed import is_main
from utils.config import parse, run_main

PHASES = ("data_wait_s", "encode_s", "forward_s", "backward_s", "optimizer_s")


def median_phases(folder: Path) -> dict[str, float]:
    """Return the median of each phase over the second half of a run's logged steps, in seconds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = lines[len(lines) // 2 :]
    return {name: statistics.median(line[name] for line in lines) for name in (*PHASES, "step_s", "samples_per_s")}


def main(cfg: train_mmdit.Config) -> None:
    shared = Path(tempfile.gettempdir()) / f"step-time-{torch.multiprocessing.current_process().pid}"
    quiet = dict(log_every=1, eval_every=0, sample_every=0, save_every=0, num_steps=min(cfg.num_steps, 200))
    train_mmdit.main(replace(cfg, run_folder=str(shared / "phases"), **quiet))
    quiet["num_steps"] //= 4
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train_mmdit.main(replace(cfg, run_folder=str(shared / "profiled"), **quiet))
    if not is_main():
        return
    phases = median_phases(shared / "phases")
    communication_us = sum(
        event.device_time_total or event.cpu_time_total
        for event in profiler.key_averages()
        if event.key.startswith(("gloo:", "nccl:"))
    )
    print(f"{phases['samples_per_s']:.0f} images/s, step {phases['step_s'] * 1e3:.0f} ms")
    for name in PHASES:
        print(f"  {name.removesuffix('_s'):<12}{phases[name] * 1e3:7.1f} ms  {phases[name] / phases['step_s']:5.1%}")
    share = communication_us / 1e6 / quiet["num_steps"] / phases["step_s"]
    print(f"  of which inside collectives (profiled, part of forward and backward): {share:.1%}")


if __name__ == "__main__":
    run_main(main, parse(train_mmdit.Config, __doc__))
