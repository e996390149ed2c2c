"""A run without a model: phases, a sum over ranks each step, stops and a watchdog, to be disturbed by tests.

Run by `tests.script_runs.run_script`; prints a line for each step on rank 0.
"""

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path

from parallel.distributed import all_reduce_sum, init_distributed, is_main, rank, shutdown
from parallel.watchdog import Watchdog
from utils.config import parse, run_main
from utils.phase_timer import PhaseTimer
from utils.stop_signals import StopSignals


@dataclass(frozen=True)
class Config:
    run_folder: str = ""  # where stacks go
    num_steps: int = 20
    hang_s: float = 0.5  # deadline of a phase
    hold_at: int = -1  # step at which a rank sleeps in C, and keeps Python's lock
    hold_rank: int = 1  # which
    step_s: float = 0.02  # time of a step


def main(cfg: Config) -> None:
    device = init_distributed(60.0)
    folder, timer = Path(cfg.run_folder), PhaseTimer(device)
    stop = StopSignals(folder, is_main=is_main())
    watchdog = Watchdog(folder, timer, cfg.hang_s, stop)
    for step in range(cfg.num_steps):
        timer.begin_step(step)
        with timer.phase("forward"):
            time.sleep(cfg.step_s)
            if step == cfg.hold_at and rank() == cfg.hold_rank:
                ctypes.PyDLL(None).sleep(60)
        with timer.phase("backward"):
            (total,) = stop.agree(all_reduce_sum([1.0, *stop.flags()], device))
        if is_main():
            print(f"step {step} sum {total:g}", flush=True)
        if stop.reason:
            break
    stop.close()
    watchdog.close()
    shutdown()


if __name__ == "__main__":
    run_main(main, parse(Config))
