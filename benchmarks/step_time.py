"""Where the steps of a run went: `./launch.sh -m benchmarks.step_time --run runs/mmdit`.

Prints the phases that the script measured itself, as medians over the second half of the run's logged steps (in the
first half the encoders still fill their memories).  FSDP's collectives are part of forward and backward.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from utils.config import parse, run_main

PHASES = ("data_wait_s", "encode_s", "forward_s", "backward_s", "optimizer_s")


@dataclass(frozen=True)
class Config:
    run: str = "runs/mmdit"  # a run folder


def main(cfg: Config) -> None:
    path = Path(cfg.run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{cfg.run} is no run folder: it has no metrics.jsonl")
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if "step_s" in line]
    lines = lines[len(lines) // 2 :]
    if not lines:
        raise ValueError(f"{path} has no logged step; was the run started with --log_every 0?")
    median = {name: statistics.median(line[name] for line in lines) for name in (*PHASES, "step_s", "samples_per_s")}
    print(f"{median['samples_per_s']:.0f} images/s, step {median['step_s'] * 1e3:.0f} ms, {len(lines)} logged steps")
    for name in PHASES:
        print(f"  {name.removesuffix('_s'):<12}{median[name] * 1e3:7.1f} ms  {median[name] / median['step_s']:5.1%}")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
