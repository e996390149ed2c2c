"""What watching costs a step of the default run: `torchrun --nproc_per_node=2 -m benchmarks.monitor_cost`.

The default training step in blocks, in turn as with --metrics_port 0 and as with a port: every rank's monitor takes the
step's numbers, the probe measures at every 50th step, and somebody scrapes each rank as often as Prometheus would.
Blocks alternate, so what else the machine does meets both; also the time of each part.
"""

import statistics
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import train_mmdit
from benchmarks.communication import timed_step
from data.index import build_index
from data.order import GlobalOrder
from data.plan import BatchPlan
from data.reader import Reader
from data.shards import expand_shards
from model.encoders import Encoders
from model.mmdit import MMDiT, MMDiTConfig, init_parameter
from model.mmdit_plan import FSDP_UNITS
from parallel.distributed import all_reduce_sum, init_distributed, is_main, shutdown
from parallel.fsdp import shard_model
from parallel.init_weights import materialize
from parallel.mesh import build_mesh, data_parallel
from parallel.probe import Probe
from utils.config import parse, run_main
from utils.monitor import Monitor
from utils.optimizer import build_optimizer
from utils.run_events import RunEvents

PROBE_EVERY = 50  # as the training scripts'


@dataclass(frozen=True)
class Config:
    num_blocks: int = 40  # of each kind; the first fifth warms up
    block_steps: int = 5
    scrape_s: float = 15.0  # between two scrapes of a rank
    port: int = 9880  # of rank 0; the others' follow
    cache_folder: str = ".cache"  # as the training script's


def main(cfg: Config) -> None:
    trained = train_mmdit.Config()
    device = init_distributed(trained.timeout_s)
    mesh = build_mesh(device.type, -1, 1)
    rank, num_ranks = data_parallel(mesh)
    encoders, cache = Encoders(trained.model, device, torch.float32), Path(cfg.cache_folder)
    shards = expand_shards(trained.data, "train", cache)
    index = build_index(shards, encoders.text.count_tokens, encoders.text.tokenizer_id, cache)
    plan = BatchPlan(
        index, GlobalOrder(len(index), trained.global_batch_size, 0), num_ranks=num_ranks, rank=rank,
        max_tokens=trained.max_tokens_per_micro_batch, num_empty_tokens=encoders.text.count_tokens(""), seed=0,
    )  # fmt: skip
    reader = Reader(index)
    with torch.device("meta"):
        model = MMDiT(MMDiTConfig.from_folder(f"{trained.model}/transformer"))
    shard_model(model, FSDP_UNITS, mesh, torch.float32, torch.float32, trained.reshard_after_forward)
    materialize(model, device, init_parameter, seed=0)
    optimizer = build_optimizer("adamw", model.named_parameters(), 1e-4, (0.9, 0.99), 1e-8, 0.01)
    batches = [  # one step's: what differs from step to step would hide what is measured
        train_mmdit.make_batch([reader.read(p, encoders.needs_picture) for p in planned], encoders, trained)
        for planned in plan.micro_batches(0)
    ]

    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor("benchmark", rank, cfg.port, disk=folder)
        events, probe = RunEvents(Path(folder)), Probe(device, PROBE_EVERY)
        scraping, ended, scrape_s = threading.Event(), threading.Event(), []
        scraper = threading.Thread(target=scrape, args=(monitor.port, cfg.scrape_s, scraping, ended, scrape_s))
        scraper.start()
        blocks, probe_s, step_s = {"off": [], "on": []}, [], []
        step = 0
        for _ in range(cfg.num_blocks):
            for kind in ("off", "on"):
                scraping.set() if kind == "on" else scraping.clear()
                dist.barrier()
                started = time.perf_counter()
                for _ in range(cfg.block_steps):
                    begun = time.perf_counter()
                    phases = timed_step(model, optimizer, batches, trained)
                    all_reduce_sum([0.0], device)  # as the script's sums: the ranks meet
                    if kind == "off":
                        continue
                    numbers = {f"{name}_s": seconds for name, seconds in phases.items()}
                    numbers |= {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "samples": 64 * step, "bad_samples": 0}
                    marks = [time.perf_counter()]
                    monitor.step(step, numbers | {"step_s": marks[0] - begun})
                    events.mark(step)
                    marks.append(time.perf_counter())
                    monitor.probe(probe(step))
                    marks.append(time.perf_counter())
                    step_s.append(marks[1] - marks[0])
                    if step % PROBE_EVERY == 0:
                        probe_s.append(marks[2] - marks[1])
                    step += 1
                blocks[kind].append((time.perf_counter() - started) / cfg.block_steps)
        ended.set()
        scraper.join()
        monitor.close()
    if is_main():
        first = cfg.num_blocks // 5
        off, on = (statistics.median(blocks[kind][first:]) * 1e3 for kind in ("off", "on"))
        pairs = [b / a - 1 for a, b in zip(blocks["off"][first:], blocks["on"][first:], strict=True)]
        parts = {
            "numbers of a step": statistics.median(step_s),
            f"probe, a {PROBE_EVERY}th of it": statistics.median(probe_s) / PROBE_EVERY,
            f"scrape every {cfg.scrape_s:g} s": statistics.median(scrape_s) * off / 1e3 / cfg.scrape_s,
        }
        print(f"{num_ranks} ranks, {len(pairs)} pairs of {cfg.block_steps} steps each, {len(scrape_s)} scrapes a rank")
        print(
            f"step without {off:.1f} ms, with {on:.1f} ms; with / without - 1: median {statistics.median(pairs):+.2%}"
        )
        for name, seconds in parts.items():
            print(f"  {name:<22}{seconds * 1e6:8.1f} µs a step  {seconds * 1e3 / off:7.3%}")
        print(f"  {'together':<22}{sum(parts.values()) * 1e6:8.1f} µs a step  {sum(parts.values()) * 1e3 / off:7.3%}")
    shutdown()


def scrape(
    port: int, every_s: float, scraping: threading.Event, ended: threading.Event, seconds: list[float]
) -> None:  # fmt: skip
    """Ask for all metrics now and then, while `scraping`, and note how long each answer took."""
    while not ended.wait(every_s):
        if scraping.wait(10.0):
            started = time.perf_counter()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                answer.read()
            seconds.append(time.perf_counter() - started)


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
