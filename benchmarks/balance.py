"""Whether a rare category is learned beside a frequent one: `./launch.sh -m benchmarks.balance`.

Makes a set of the default edits' scenes in which `frequent_share` are "text" and all other kinds alike, trains twice on
it for the same number of steps, once with all categories alike (the default) and once as they come, and measures both
runs on the same held-out "remove" edits (`tools.evaluate_edit`).
"""

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from webdataset import TarWriter

from data.edit_scenes import CATEGORY, KINDS, EditPair, scene_edit
from data.emoji_edits import pair_members
from utils.config import parse, run_main

_FREQUENT, _RARE = "text", "remove"


@dataclass(frozen=True)
class Config:
    folder: str = "runs/balance"  # the set and both runs
    num_scenes: int = 3000  # of the training set
    frequent_share: float = 0.8  # of them "text"
    num_steps: int = 250  # of each run
    num_ranks: int = 2  # processes of each run
    num_held_out: int = 40  # "remove" edits of other scenes, each measured in both languages


def scenes(kind: str, held_out: bool, count: int) -> Iterator[EditPair]:
    """Draw scenes that are, or are not, held out of the default set's training."""
    rng = random.Random(f"balance {kind} {held_out}")
    drawn = (scene_edit(rng, kind) for _ in itertools.count())
    return itertools.islice((pair for pair in drawn if pair.held_out == held_out), count)


def write_shard(path: Path, pairs: list[EditPair]) -> None:
    """Write edits as a shard, unless it is there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, TarWriter(file, user="", group="", mtime=0.0) as writer:
        for number, pair in enumerate(pairs):
            writer.write({"__key__": f"{pair.category}-{number:05d}", **pair_members(pair)})


def scene_counts(cfg: Config) -> dict[str, int]:
    """Return how many training scenes there are of each kind."""
    frequent = round(cfg.frequent_share * cfg.num_scenes)
    each = (cfg.num_scenes - frequent) // (len(KINDS) - 1)
    return {kind: frequent if kind == _FREQUENT else each for kind in KINDS}


def main(cfg: Config) -> None:
    folder, counts = Path(cfg.folder), scene_counts(cfg)
    write_shard(folder / "train.tar", [pair for kind, n in counts.items() for pair in scenes(kind, False, n)])
    write_shard(folder / "held-out.tar", list(scenes(_RARE, True, cfg.num_held_out)))
    categories: dict[str, int] = {}
    for kind, count in counts.items():
        categories[CATEGORY[kind]] = categories.get(CATEGORY[kind], 0) + count
    print("scenes: " + ", ".join(f"{name} {count}" for name, count in categories.items()))
    as_they_come = ["--shares", *(f"{name}={count}" for name, count in categories.items())]
    rows = {}
    for name, shares in (("alike", []), ("as they come", as_they_come)):
        run = folder / name.replace(" ", "-")
        command = [sys.executable, "-m", "utils.torchrun", "--nnodes=1", f"--nproc_per_node={cfg.num_ranks}"]
        command += ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0", "--local_addr=127.0.0.1"]
        command += ["train_edit_ddp.py", "--data", str(folder / "train.tar"), "--run_folder", str(run), *shares]
        command += ["--validation_data", str(folder / "held-out.tar"), "--num_steps", str(cfg.num_steps)]
        command += ["--eval_every", "0", "--sample_every", "0", "--save_every", str(cfg.num_steps)]
        subprocess.run(command, check=True)
        subprocess.run([sys.executable, "-m", "tools.evaluate_edit", "--run", str(run)], check=True)
        rows[name] = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["groups"][_RARE]
    print(f'| shares | "{_RARE}": plans right | inside: ours | copy | outside: ours |\n|---|---|---|---|---|')
    for name, row in rows.items():
        inside, outside = row["renderer"]["inside"], row["renderer"]["outside"]
        print(f"| {name} | {row['plan_exact']:.1%} | {inside:.1f} | {row['copy']['inside']:.1f} | {outside:.1f} |")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
