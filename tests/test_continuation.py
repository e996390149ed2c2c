"""A run that meets faults ends in the undisturbed run's weights, to the bit, however often it has to start again."""

import json
import random

import pytest
import torch

from parallel import checkpoint
from tests.faults.injected import injected
from tests.range_server import range_server
from tests.script_runs import run_script
from tests.shards import simple_samples, write_shard
from utils.exit_codes import HANG, UNSAVED

HANG_S = 20
PHASES = {"kill": "backward", "usr1": "forward", "int": "optimizer", "full": "checkpoint", "hang": "forward"}


@pytest.fixture
def served(tmp_path):
    """A shard behind a store that fails to order."""
    shard = write_shard(tmp_path / "a.tar", simple_samples(24, "a"))
    with range_server({"/a.tar": shard.read_bytes()}) as server:
        yield server


def train(folder, run, server, num_steps, save_every):
    """Run the script again and again until it is complete; return the exit codes and what was printed."""
    arguments = [
        "--run_folder", str(folder / run), "--cache_folder", str(folder / "cache"), "--data", f"{server.url}/a.tar",
        "--validation_data", f"{server.url}/a.tar", "--num_steps", str(num_steps), "--save_every", str(save_every),
        "--global_batch_size", "4", "--lr_schedule", "constant", "--eval_every", "0", "--sample_every", "0",
        "--max_tokens_per_micro_batch", "60", "--log_every", "1", "--log_samples", "--hang_s", str(HANG_S),
    ]  # fmt: skip
    codes, printed = [], ""
    while len(codes) < 25 and f"done: {num_steps} steps" not in printed:
        code, more = run_script("train_mmdit.py", arguments, 2)
        codes, printed = [*codes, code], printed + more
        assert code != 2, printed
    return codes, printed


def last_state(folder, run, step):
    return checkpoint.load_tensors(folder / run / "checkpoints", step, "")


def check_the_same(folder, num_steps):
    expected, actual = (last_state(folder, run, num_steps) for run in ("undisturbed", "disturbed"))
    assert expected.keys() == actual.keys() and any(name.startswith("optimizer.") for name in expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    for name in ("metrics.jsonl", "samples_seen.jsonl"):
        kept = [
            [{key: line.get(key) for key in ("step", "loss", "grad_norm", "samples")} for line in map(json.loads, file)]
            for file in (open(folder / run / name) for run in ("undisturbed", "disturbed"))
        ]
        assert kept[0] == kept[1] and [line["step"] for line in kept[0]] == list(range(num_steps))


def test_four_faults_and_a_store_that_fails(tmp_path, monkeypatch, served):
    train(tmp_path, "undisturbed", served, 9, 3)
    faults = injected(
        monkeypatch, tmp_path,
        "full@rank=1,step=3,phase=checkpoint; kill@rank=1,step=4,phase=backward; usr1@rank=0,step=7,phase=forward; "
        "full@rank=0,step=8,phase=checkpoint",  # the save before that stop
    )  # fmt: skip
    served.faults = [503, "none", "cut", "stall", 503]
    codes, printed = train(tmp_path, "disturbed", served, 9, 3)
    assert codes == [137, UNSAVED, 0] and len(faults.names()) == 4 and not served.faults, printed
    assert "save 1 in a row failed" in printed and "stopping after this step: SIGUSR1" in printed
    check_the_same(tmp_path, 9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1])
def test_sixty_steps_with_twelve_random_faults(tmp_path, monkeypatch, served, seed):
    train(tmp_path, "undisturbed", served, 60, 5)
    draw = random.Random(seed)
    kinds = [*draw.choices(list(PHASES), k=10), "kill", "hang"]
    places = []
    for kind, step in zip(kinds, draw.sample(range(1, 60), len(kinds)), strict=True):
        step = max(5, step // 5 * 5) if kind == "full" else step
        places.append(f"{kind}@rank={draw.randrange(2)},step={step},phase={PHASES[kind]}")
    faults = injected(monkeypatch, tmp_path, "; ".join(places))
    served.faults = draw.choices([503, "cut", "stall", "none", "none"], k=40)
    codes, printed = train(tmp_path, "disturbed", served, 60, 5)
    print(f"{'; '.join(places)}: exit codes {codes}")
    assert faults.names() == set(places) and codes[-1] == 0 and HANG in codes, printed
    check_the_same(tmp_path, 60)
