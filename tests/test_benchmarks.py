"""Benchmarks start from their command lines and give their figures, here on settings too small to mean anything.

Those that take long or start many processes are in the exhaustive run.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.script_runs import REPOSITORY

NUMBER = r"\d[\d,.]*"
SLOW = pytest.mark.exhaustive


def case(name: str, flags: list[str], *expected: str, marks: tuple = ()):
    """FOLDER in a flag stands for a temporary folder; expected: patterns of what is printed."""
    return pytest.param(name, flags, expected, marks=marks, id=name)


CASES = [
    case(
        "index_scale",
        ["--num_shards", "40", "--samples_per_shard", "100", "--distinct", "3", "--global_batch_size", "16",
         "--num_positions", "2"],
        r"one group: 4,000 samples, 40 shards", "three groups", rf"mapped {NUMBER} MB, resident {NUMBER} MB",
        rf"first batch of 16 at 2 random positions: median {NUMBER} s", rf"state {NUMBER} bytes",
    ),
    case(
        "prepare", ["--num_pictures", "2", "--width", "160", "--height", "96", "--areas", "64"],
        rf"{NUMBER} pictures/s a core", "2 pictures of 160 x 96",
    ),
    case(
        "remote",
        ["--num_shards", "1", "--samples_per_shard", "80", "--side", "16", "--turns", "1", "--latency_ms", "1"],
        rf"warm cache +{NUMBER} samples/s", r"no cache: 20% failures cost -?\d", "80 samples .* 0 bad samples",
    ),
    case(
        "checkpoint_stall",
        ["--num_parameters_m", "1", "--repeats", "1", "--num_tokens", "8", "--memory_saves", "2",
         "--memory_parameters_m", "1", "--folder", "FOLDER"],
        rf"checksums +{NUMBER} s, {NUMBER}%", rf"thread: copy alone {NUMBER} s",
        rf"blocked {NUMBER} s: {NUMBER}% of a save, {NUMBER} x a copy", rf"until published, {NUMBER} s and \d+ more",
        r"resident memory, process, rank 1 and its writer", marks=SLOW,
    ),
    case(
        "checkpoints", ["--num_parameters_m", "1", "--repeats", "1", "--methods", "ours", "dcp", "--folder", "FOLDER"],
        rf"save ours +{NUMBER} .* x", rf"load dcp +{NUMBER} .* 1.00 x", marks=SLOW,
    ),
    case(
        "matmul_rate", ["--width", "64", "--side", "2", "--txt_len", "4", "--repeats", "1", "--num_samples", "1"],
        rf"MMDiT step +{NUMBER} GFLOP/s",
    ),
    case(
        "data",
        ["--num_raw", "192", "--num_encoded", "192", "--samples_per_shard", "48", "--turns", "1", "--folder", "FOLDER"],
        rf"\| bare loop \| {NUMBER} \| {NUMBER} \| 100% \|", rf"\| ours \| {NUMBER} \|", r"\| encoded \|", marks=SLOW,
    ),
    case(
        "packing", ["--samples_per_rank", "2", "--num_batches", "1"], rf"mixed +256 .*{NUMBER}% .*\[\(", marks=SLOW,
    ),
    case(
        "switches", ["--width", "32", "--num_layers", "2", "--side", "2", "--txt_len", "4", "--repeats", "1"],
        rf"optimizer muon +{NUMBER} +{NUMBER}", marks=SLOW,
    ),
    case("memory", ["--model", "tiny", "--side", "2", "--txt_len", "4"], "rank 0 parameters .* exact", marks=SLOW),
    case("communication", ["--num_steps", "4", "--cache_folder", "FOLDER"], rf"together +{NUMBER} ms", marks=SLOW),
    case(
        "balance",
        ["--folder", "FOLDER/b", "--num_scenes", "40", "--num_steps", "1", "--num_ranks", "1", "--num_held_out", "2"],
        rf"\| alike \| {NUMBER}% \|", rf"\| as they come \| {NUMBER}% \|", marks=SLOW,
    ),
]  # fmt: skip


def run(name: str, flags: list[str]) -> tuple[int, str]:
    """Run a benchmark as its docstring says, but in one process."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *flags],
        cwd=REPOSITORY, env=environment, timeout=500, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(("name", "flags", "expected"), CASES)
def test_it_starts_and_gives_its_figures(tmp_path, name, flags, expected):
    code, printed = run(name, [flag.replace("FOLDER", str(tmp_path)) for flag in flags])
    assert code == 0, printed
    assert [pattern for pattern in expected if not re.search(pattern, printed)] == [], printed


def test_the_phases_of_a_step_are_those_of_the_metrics(tmp_path):
    line = {"data_wait_s": 0.1, "encode_s": 0.2, "forward_s": 0.3, "backward_s": 0.4, "optimizer_s": 0.5}
    lines = [json.dumps(line | {"step_s": 2.0, "samples_per_s": 8.0})] * 3
    Path(tmp_path, "metrics.jsonl").write_text("\n".join(lines))
    code, printed = run("step_time", ["--run", str(tmp_path)])
    assert code == 0 and "8 images/s, step 2000 ms, 2 logged steps" in printed, printed
    assert re.search(r"backward +400.0 ms +20.0%", printed), printed
