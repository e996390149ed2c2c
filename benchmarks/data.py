"""How fast samples come off a disk: `python -m benchmarks.data`, our Reader and Loader against other libraries.

Raw shards (256 px JPEG) and encoded ones, the same samples for all, shuffled, same number of workers, turns taken in
one run.  A turn is one epoch, timed after its first batches: what starting costs is not part of it.  The bare loop
reads each sample's bytes at its known place and decodes them, in as many threads, and does nothing else.

The other libraries are not in requirements.txt, and they want other versions of what is: install them where they harm
nothing.  `python -m venv PEERS`; a .pth file in its site-packages with the path of .venv's; `PEERS/bin/pip install
--no-deps litdata mosaicml-streaming` and what importing them then asks for, likewise; run this with PEERS/bin/python.
Those that are not installed are left out and named.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from benchmarks.data_peers import BATCH, PEERS, decode
from benchmarks.data_sets import DataSet, make_data_set
from data.index import build_index
from data.loader import Loader
from data.order import GlobalOrder
from data.plan import BatchPlan
from data.reader import Reader
from utils.config import parse, run_main

_MODULES = {"webdataset": "webdataset", "litdata": "litdata", "mosaicml-streaming": "streaming"}
_WARM_UP = 4  # batches


@dataclass(frozen=True)
class Config:
    kinds: tuple[str, ...] = ("raw", "encoded")
    num_raw: int = 8192  # samples of 256 px JPEG, about 40 KB each
    num_encoded: int = 2048  # samples of about 500 KB
    samples_per_shard: int = 512
    num_workers: int = 2  # threads or processes, whichever a library uses
    turns: int = 5
    output: str = ""  # a JSON file for the figures
    folder: str = ""  # where to put the data for the time being; empty = the system's folder for such


class Ours:
    """Index, BatchPlan, Reader and Loader, as in training."""

    name = "ours"
    version = ""

    def prepare(self, data: DataSet, folder: Path) -> None:
        self.data = data
        self.index = build_index(data.shards, lambda text: len(text.split()) + 5, "words", folder)

    def epoch(self, num_workers: int, seed: int) -> Iterator[int]:
        """Yield the number of samples of each batch of one epoch."""
        num_steps = len(self.index) // BATCH
        plan = BatchPlan(
            self.index, GlobalOrder(len(self.index), BATCH, seed), num_ranks=1, rank=0, max_tokens=BATCH * 512,
            seed=seed, num_empty_tokens=5,
        )  # fmt: skip
        loader = Loader(Reader(self.index), plan, 0, num_workers)
        for _ in range(num_steps):
            yield sum(map(len, loader.next_step()))
        loader.close()


class BareLoop:
    """pread and decode at shuffled known places."""

    name = "bare loop"
    version = ""

    def prepare(self, data: DataSet, folder: Path) -> None:
        index = build_index(data.shards, lambda text: 5, "none", folder)
        self.data, records = data, [index[i] for i in range(len(index))]
        self.places = [
            (r.shard, r.image_offset, r.image_size, r.meta_offset, r.meta_size) for r in records
        ]  # fmt: skip

    def epoch(self, num_workers: int, seed: int) -> Iterator[int]:
        """Yield the number of samples of each batch of one epoch."""
        order = np.random.default_rng(seed).permutation(len(self.places))
        files = [os.open(shard, os.O_RDONLY) for shard in self.data.shards]

        def read_all(numbers: np.ndarray) -> list:
            samples = []
            for shard, offset, size, meta_offset, meta_size in (self.places[i] for i in numbers):
                content = os.pread(files[shard], size, offset)
                samples.append(decode(self.data.kind, content, os.pread(files[shard], meta_size, meta_offset)))
            return samples

        batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        with ThreadPoolExecutor(num_workers) as pool:
            ahead = [pool.submit(read_all, batch) for batch in batches[: 2 * num_workers]]
            for number in range(len(batches)):
                yield len(ahead.pop(0).result())
                if number + 2 * num_workers < len(batches):
                    ahead.append(pool.submit(read_all, batches[number + 2 * num_workers]))
        for file in files:
            os.close(file)


def samples_per_second(contender, num_workers: int, seed: int) -> float:
    """Return the rate of one epoch after its first batches."""
    count, started = 0, 0.0
    for number, size in enumerate(contender.epoch(num_workers, seed)):
        if number >= _WARM_UP:
            count += size
        elif number == _WARM_UP - 1:
            started = time.perf_counter()
    return count / (time.perf_counter() - started)


def measure(cfg: Config, kind: str, folder: Path) -> list[dict]:
    """Return a row for each contender on one kind of shards."""
    num_samples = cfg.num_raw if kind == "raw" else cfg.num_encoded
    data = make_data_set(folder / kind / "shards", kind, num_samples, cfg.samples_per_shard)
    installed = [peer for peer in PEERS if find_spec(_MODULES[peer.name])]
    for peer in PEERS:
        if peer not in installed:
            print(f"{peer.name} is not installed and left out")
    contenders = [make() for make in (BareLoop, Ours, *installed)]
    for contender in contenders:
        own = folder / kind / contender.name.replace(" ", "-")
        own.mkdir()
        contender.prepare(data, own)
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(cfg.turns):
        for contender in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
            rates[contender.name].append(samples_per_second(contender, cfg.num_workers, seed=turn))
    bytes_per_sample = data.num_bytes / data.num_samples
    return [
        {
            "kind": kind, "loader": f"{c.name} {c.version}".strip(), "samples_per_s": statistics.median(rates[c.name]),
            "mb_per_s": statistics.median(rates[c.name]) * bytes_per_sample / 1e6, "turns": rates[c.name],
        }
        for c in contenders
    ]  # fmt: skip


def main(cfg: Config) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=cfg.folder or None) as folder:
        rows = []
        for kind in cfg.kinds:
            rows += (found := measure(cfg, kind, Path(folder)))
            print(f"\n| {kind} | images/s | MB/s | of the bare loop | slowest to fastest turn |\n|---|---|---|---|---|")
            for row in found:
                share, turns = row["samples_per_s"] / found[0]["samples_per_s"], sorted(row["turns"])
                print(
                    f"| {row['loader']} | {row['samples_per_s']:.0f} | {row['mb_per_s']:.0f} | {share:.0%} "
                    f"| {turns[0]:.0f} to {turns[-1]:.0f} |"
                )
    if cfg.output:
        Path(cfg.output).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
