"""The index and the order at 10^8 samples in 10^4 shards: `./launch.sh -m benchmarks.index_scale`.

Writes the parts of an index of made-up samples into a folder that it removes again, and opens it as a rank does, in a
process of its own.  Of the parts, `distinct` differ; the others are further names of the same files, to spare the disk.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.index import Index, build_index
from data.index_folder import IndexFolder
from data.index_part import IndexedSample, write_part
from data.mixture import load_mixture
from data.mixture_order import MixtureOrder
from data.order import GlobalOrder
from data.plan import BatchPlan
from data.versions import shard_versions
from utils.config import parse, run_main

LANGUAGES = [("en", "zh"), ("en",), ("zh",), ("en", "zh")]


@dataclass(frozen=True)
class Config:
    num_shards: int = 10_000
    samples_per_shard: int = 10_000
    distinct: int = 300  # different parts
    global_batch_size: int = 512
    shuffle_shards: int = 16
    num_positions: int = 20  # random ones, at which the first batch is timed
    folder: str = ""  # internal: the index is there, measure it


def made_up(shard: int, count: int) -> list[IndexedSample]:
    """Return samples of a shard: pictures of some 100 KB, one or two captions, 16 categories."""
    rng, offset, samples = random.Random(shard), 512, []
    for n in range(count):
        size, meta, height, width = (
            rng.randint(30_000, 170_000),
            rng.randint(150, 900),
            512,
            rng.choice([384, 512, 768]),
        )
        after = offset + size + -size % 512 + 512
        captions = [(language, rng.randint(8, 300), 1.0) for language in LANGUAGES[rng.randrange(4)]]
        numbers = (offset, size, rng.getrandbits(32), after, meta, rng.getrandbits(32), height, width)
        samples.append(IndexedSample(f"{shard:05d}{n:05d}", numbers, "json", f"category {n % 16}", captions))
        offset = after + meta + -meta % 512 + 512
    return samples


def resident_mb() -> float:
    """Return the resident memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1e3


def mapped_mb() -> float:
    """Return how much of the parts is mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".part" in line]
    return sum(int(end, 16) - int(start, 16) for line in lines for start, end in [line[0].split("-")]) / 1e6


def measure(cfg: Config) -> None:
    """Print one rank's figures."""
    folder = Path(cfg.folder)
    shards = [str(folder / f"{n:05d}.tar") for n in range(cfg.num_shards)]
    (folder / "m.json").write_text(
        json.dumps({"sources": {"all": str(folder)}, "groups": [
            {"language": "zh", "share": [[0, 0.5], [100_000, 0.67]]},
            {"language": "en", "category": "category 3", "share": 0.1}, {"language": "en", "share": 0.4}]})
    )  # fmt: skip
    for name in (str(folder), str(folder / "m.json")):
        for file in (folder / "index").glob("*.summary"):
            file.unlink()
        before, times = resident_mb(), []
        for _ in range(2):
            started = time.perf_counter()
            index = build_index(shards, len, "t", folder)
            order = MixtureOrder(
                index, load_mixture(name), ["all" if name != str(folder) else ""] * len(shards),
                cfg.global_batch_size, 0, cfg.shuffle_shards,
            )  # fmt: skip
            times.append(time.perf_counter() - started)
        settings = {"num_ranks": 1, "rank": 0, "max_tokens": 10**6, "seed": 0, "num_empty_tokens": 5}
        rng, first, opened = random.Random(0), [], []
        for _ in range(cfg.num_positions):
            index = build_index(shards, len, "t", folder)
            order = MixtureOrder(index, order.mixture, order._sources, cfg.global_batch_size, 0, cfg.shuffle_shards)
            plan, step = BatchPlan(index, order, **settings), rng.randrange(3 * len(index) // cfg.global_batch_size)
            state = plan.state(0)
            if "counts" in state:
                totals = order._interleaver._shares.totals(step * cfg.global_batch_size)
                state |= {"step": step, "counts": [*map(int, totals[:-1])]}
                state["counts"].append(step * cfg.global_batch_size - sum(state["counts"]))
            started = time.perf_counter()
            plan.load_state(state)
            plan.micro_batches(step)
            first.append(time.perf_counter() - started)
            opened.append(len({index[p.index].shard for p in plan.global_batch(step)}))
        kind = "one group" if name == str(folder) else "three groups"
        print(f"{kind}: {len(index):,} samples, {len(shards):,} shards")
        print(f"  start-up {times[0]:.2f} s from parts, {times[1]:.2f} s from the summary")
        print(f"  first batch of {cfg.global_batch_size} at {cfg.num_positions} random positions: median", end=" ")
        print(f"{sorted(first)[len(first) // 2]:.2f} s, worst {max(first):.2f} s; of {max(opened)} shards at most")
        for extra in range(40):
            plan.micro_batches(step + extra * 97)
        print(
            f"  after 40 more: mapped {mapped_mb():.1f} MB, resident {resident_mb() - before:.1f} MB more than", end=" "
        )
        print(f"before the index, {resident_mb():.0f} MB in all; state {len(json.dumps(plan.state(step)))} bytes")
        if name == str(folder):
            print_fetches(GlobalOrder(index.shard_sizes, 4096, 0, cfg.shuffle_shards), index, 2 * cfg.shuffle_shards)


def print_fetches(order: GlobalOrder, index: Index, capacity: int) -> None:
    """Print how often a shard is fetched if the last `capacity` whole ones are kept, over four windows in order."""
    kept, fetched, seen, starts = OrderedDict(), 0, set(), np.cumsum(index.shard_sizes)
    num_steps = 4 * len(index) // order.num_windows // order.global_batch_size
    for step in range(num_steps):
        for shard in starts.searchsorted([ref.index for ref in order.batch(step)], side="right").tolist():
            seen.add(shard)
            fetched += shard not in kept
            kept[shard] = None
            kept.move_to_end(shard)
            if len(kept) > capacity:
                kept.popitem(last=False)
    visits = num_steps * order.global_batch_size
    print(f"  {visits:,} visits in order: {len(seen)} shards, each fetched {fetched / len(seen):.3f} times")


def main(cfg: Config) -> None:
    if cfg.folder:
        measure(cfg)
        return
    with tempfile.TemporaryDirectory(prefix="index-") as name:
        folder = Path(name)
        shards = [folder / f"{n:05d}.tar" for n in range(cfg.num_shards)]
        for shard in shards:
            shard.touch()
        names = [str(shard) for shard in shards]
        paths = IndexFolder(folder / "index", names, shard_versions(names), "t", lambda *_: ([], []))._paths
        for n, path in enumerate(paths):
            if n < cfg.distinct:
                write_part(path, made_up(n, cfg.samples_per_shard), [])
            else:
                os.link(paths[n % cfg.distinct], path)
        size = sum(path.stat().st_size for path in paths)
        print(
            f"parts of {size / 1e9:.2f} GB, {size / cfg.num_shards / cfg.samples_per_shard:.1f} bytes a sample",
            flush=True,
        )
        flags = [f"--{key}={getattr(cfg, key)}" for key in cfg.__dataclass_fields__ if key != "folder"]
        subprocess.run([sys.executable, "-m", "benchmarks.index_scale", *flags, f"--folder={folder}"], check=True)
    print(f"memory of this process at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
