"""How fast samples arrive from a web server, with and without injected failures, and from the cache on disk.

    ./launch.sh -m benchmarks.remote

A server in a process of its own on 127.0.0.1 holds shards of JPEG pictures and answers each request after a wait, as an
object store does.  Clean and faulty turns alternate, so that a machine's mood meets both alike.
"""

import io
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset import TarWriter

from data.index import Index, build_index
from data.loader import Loader
from data.order import GlobalOrder
from data.plan import BatchPlan
from data.reader import Reader
from data.shard_cache import ShardCache
from utils.byte_source import Patience
from utils.config import parse, run_main

_PATIENCE = Patience(max_retries=10, first_wait_s=0.02, max_wait_s=1.0, stall_s=1.0)


@dataclass(frozen=True)
class Config:
    num_shards: int = 4
    samples_per_shard: int = 1000
    side: int = 256  # pixels of a picture
    latency_ms: float = 20.0  # before each answer
    fault_rate: float = 0.2  # share of requests that fail
    faults: str = "503,cut,flip,reset"  # in equal parts: a server's error, a cut body, a flipped bit, a reset; stall
    turns: int = 3  # of each kind
    num_workers: int = 2


def write_shards(folder: Path, cfg: Config) -> list[Path]:
    """Write shards of photograph-like JPEG pictures: smooth, with some noise."""
    random_numbers = np.random.default_rng(0)
    shards = [folder / f"{n:03d}.tar" for n in range(cfg.num_shards)]
    for shard in shards:
        with shard.open("wb") as file, TarWriter(file) as writer:
            for i in range(cfg.samples_per_shard):
                coarse = random_numbers.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                picture = np.asarray(Image.fromarray(coarse).resize((cfg.side, cfg.side), Image.Resampling.BICUBIC))
                noise = random_numbers.normal(0, 8, picture.shape)
                jpeg = io.BytesIO()
                Image.fromarray((picture + noise).clip(0, 255).astype(np.uint8)).save(jpeg, "JPEG", quality=90)
                meta = {"captions": {"en": [f"a picture, number {i}"]}}
                writer.write({"__key__": f"{i:05d}", "jpg": jpeg.getvalue(), "json": json.dumps(meta).encode()})
    return shards


def read_epoch(index: Index, cfg: Config, cache: ShardCache | None = None) -> tuple[float, int]:
    """Read every sample once; return the seconds and how many were bad."""
    reader = Reader(index, cache=cache, patience=_PATIENCE)
    plan = BatchPlan(
        index, GlobalOrder(len(index), 40, seed=0), num_ranks=1, rank=0, max_tokens=10**6, seed=0, num_empty_tokens=1
    )
    loader = Loader(reader, plan, 0, cfg.num_workers, 2)
    started = time.perf_counter()
    for _ in range(len(index) // 40):
        loader.next_step()
    elapsed = time.perf_counter() - started
    loader.close()
    return elapsed, len(reader.bad_samples)


class Server:
    """The process that serves a folder; `set_faults` says which share of the requests fails from now on."""

    def __init__(self, folder: Path, latency_ms: float, faults: str):
        command = [sys.executable, "-m", "benchmarks.faulty_server", str(folder), str(latency_ms / 1e3), faults]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def set_faults(self, rate: float) -> None:
        self._process.stdin.write(f"{rate}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main(cfg: Config) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = write_shards(folder, cfg)
        num_bytes = sum(shard.stat().st_size for shard in shards)
        server = Server(folder, cfg.latency_ms, cfg.faults)
        try:
            index = build_index([f"{server.url}/{shard.name}" for shard in shards], len, "t", folder / "index")
            local = build_index([str(shard) for shard in shards], len, "t", folder / "index")
            seconds: dict[str, list[float]] = {}
            num_bad = 0
            for turn in range(cfg.turns):
                cache, faulty_cache = (ShardCache(folder / f"cache-{turn}-{n}", 2**34) for n in range(2))
                kinds = [
                    ("local", local, None, 0.0),
                    ("no cache", index, None, 0.0),
                    ("no cache, failures", index, None, cfg.fault_rate),
                    ("cold cache", index, cache, 0.0),
                    ("cold cache, failures", index, faulty_cache, cfg.fault_rate),
                    ("warm cache", index, cache, 0.0),
                ]
                for kind, of, kept, rate in kinds:
                    server.set_faults(rate)
                    elapsed, bad = read_epoch(of, cfg, kept)
                    seconds.setdefault(kind, []).append(elapsed)
                    num_bad += bad
        finally:
            server.close()
    print(
        f"{len(index)} samples of {num_bytes / len(index) / 1e3:.1f} KB, {cfg.turns} turns each, {num_bad} bad samples"
    )
    for kind, times in seconds.items():
        median = statistics.median(times)
        print(f"{kind:22} {len(index) / median:8.0f} samples/s {num_bytes / median / 1e6:8.1f} MB/s")
    for kind in ("no cache", "cold cache"):
        costs = [1 - a / b for a, b in zip(seconds[kind], seconds[f"{kind}, failures"], strict=True)]
        print(f"{kind}: {cfg.fault_rate:.0%} failures cost {statistics.median(costs):.1%} of the throughput")


if __name__ == "__main__":
    random.seed(0)
    run_main(main, parse(Config, __doc__))
