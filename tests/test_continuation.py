"""A run that meets faults ends in the undisturbed run's weights, to the bit, however often it has to start again."""

import json
import os
import random

import pytest
import torch

from parallel import checkpoint
from parallel.checked_writer import read_file
from parallel.checkpoint_retention import step_name
from parallel.checkpoint_storage import open_storage
from tests.faults.injected import injected
from tests.s3_server import KEYS, put, s3_server
from tests.script_runs import run_script
from tests.shards import simple_samples, write_shard
from tools.faulty_store import faulty_store
from utils import byte_source
from utils.exit_codes import HANG, UNSAVED
from utils.fault_injection import STORE_VARIABLE

HANG_S = 20
SAVE_EVERY = 5
# Of each kind: the phases it may strike in.
PHASES = {
    "kill": ("data_wait", "forward", "backward", "optimizer", "checkpoint"),
    "term": ("forward", "backward", "optimizer"),
    "full": ("checkpoint",),
    "s3error": ("checkpoint", "data_wait"),
    "hang": ("forward", "backward"),
    "exit": ("optimizer", "checkpoint"),
    "s3cut": ("checkpoint", "data_wait"),
    "slow": ("data_wait", "checkpoint"),
    "badsample": ("forward",),
}
ASKED = ("kill", "term", "full", "s3error", "hang")  # in every run, and the rest in any
VALUES = {"full": 2.0, "slow": 1.5}  # seconds: a save in the background outlasts its phase


@pytest.fixture
def store(monkeypatch, tmp_path):
    """An S3 store that fails to order, with a bucket and a shard in it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    shard = write_shard(tmp_path / "a.tar", simple_samples(24, "a"))
    with s3_server(1800.0) as moto, faulty_store(moto) as proxy:
        put(moto, "/bucket")
        put(moto, "/bucket/a.tar", shard.read_bytes())
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": proxy.url, STORE_VARIABLE: proxy.url}).items():
            monkeypatch.setenv(name, value)
        byte_source._store.cache_clear()
        yield proxy
    byte_source._store.cache_clear()


def checkpoints(folder, run, where):
    return f"s3://bucket/{run}" if where == "s3" else str(folder / run / "checkpoints")


def train(folder, run, num_steps, where, mode, save_every, eval_every=0):
    """Run the script again and again until it is complete; return the exit codes and what was printed."""
    arguments = [
        "--run_folder", str(folder / run), "--cache_folder", str(folder / "cache"), "--data", "s3://bucket/a.tar",
        "--validation_data", "s3://bucket/a.tar", "--num_steps", str(num_steps), "--save_every", str(save_every),
        "--global_batch_size", "4", "--lr_schedule", "constant", "--eval_every", str(eval_every),
        "--eval_samples", "4", "--sample_every", "0",
        "--max_tokens_per_micro_batch", "60", "--log_every", "1", "--log_samples", "--hang_s", str(HANG_S),
        "--checkpoint_folder", checkpoints(folder, run, where), "--checkpoint_async", mode,
    ]  # fmt: skip
    codes, printed = [], ""
    while len(codes) < 25 and f"done: {num_steps} steps" not in printed:
        code, more = run_script("train_mmdit.py", arguments, 2, timeout_s=900)
        codes, printed = [*codes, code], printed + more
        assert code != 2, printed
    return codes, printed


def last_tensors(folder, run, step, where):
    """Return the tensors of a checkpoint; one in the store is fetched first, for it is read in small pieces."""
    storage = open_storage(checkpoints(folder, run, where))
    if where == "s3":
        fetched = folder / "fetched" / run / step_name(step)
        fetched.mkdir(parents=True)
        for file in storage.sizes(step_name(step)):
            (fetched / file).write_bytes(read_file(storage, step_name(step), file))
        storage = open_storage(fetched.parent)
    return checkpoint.load_tensors(storage.folder, step, "")


def check_the_same(folder, num_steps, where):
    expected, actual = (last_tensors(folder, run, num_steps, where) for run in ("undisturbed", "disturbed"))
    assert expected.keys() == actual.keys() and any(name.startswith("optimizer.") for name in expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    for name in ("metrics.jsonl", "samples_seen.jsonl"):
        kept = [
            [
                {key: line.get(key) for key in ("step", "loss", "grad_norm", "samples")}
                for line in map(json.loads, file)
                if "val_loss" not in line
            ]
            for file in (open(folder / run / name) for run in ("undisturbed", "disturbed"))
        ]
        assert kept[0] == kept[1] and [line["step"] for line in kept[0]] == list(range(num_steps))


def drawn(seed, num_steps=60, count=12):
    """Return `count` faults, at steps of their own, of every kind that is asked for and of some others."""
    draw = random.Random(seed)
    kinds = [*ASKED, *draw.choices(list(PHASES), k=count - len(ASKED))]
    places, taken = [], set()
    for kind in kinds:
        phase = draw.choice(PHASES[kind])
        if phase == "checkpoint":
            steps = range(SAVE_EVERY, num_steps, SAVE_EVERY)
        else:  # a bad step before a save would put it off
            steps = [s for s in range(1, num_steps) if kind != "badsample" or (s + 1) % SAVE_EVERY]
        # A stop is agreed on in this step or the next, which must be there and undisturbed.
        needs = [0, 1] if kind == "term" else [0]
        step = draw.choice([s for s in steps if all(s + n not in taken and s + n < num_steps for n in needs)])
        taken |= {step + n for n in needs}
        value = f"={VALUES[kind]:g}" if kind in VALUES else ""
        places.append(f"{kind}{value}@rank={draw.randrange(2)},step={step},phase={phase}")
    return places


def check_continuation(folder, monkeypatch, places, num_steps, where, mode, save_every=SAVE_EVERY, eval_every=0):
    """Compare a run with these faults with one that meets bad samples only, which belong to the data."""
    injected(monkeypatch, folder / "samples", "; ".join(p for p in places if p.startswith("badsample")))
    train(folder, "undisturbed", num_steps, where, "none", save_every, eval_every)
    faults = injected(monkeypatch, folder, "; ".join(places))
    codes, printed = train(folder, "disturbed", num_steps, where, mode, save_every, eval_every)
    print(f"{'; '.join(places)}: exit codes {codes}")
    assert faults.names() == set(places) and codes[-1] == 0, printed
    check_the_same(folder, num_steps, where)
    return codes, printed


def test_five_faults_with_checkpoints_in_a_store_that_fails(tmp_path, monkeypatch, store):
    places = [
        "s3error@rank=1,step=3,phase=checkpoint", "kill@rank=1,step=4,phase=backward",
        "badsample@rank=0,step=6,phase=forward", "term@rank=0,step=7,phase=forward",
        "s3denied@rank=0,step=8,phase=checkpoint",  # the save before that stop
    ]  # fmt: skip
    codes, printed = check_continuation(tmp_path, monkeypatch, places, 9, "s3", "none", save_every=3)
    assert codes == [137, UNSAVED, 0] and store.struck[:3] == ["503"] * 3 and "403" in store.struck, printed
    assert "stopping after this step: SIGTERM" in printed


RUNS = [(0, "local", "none"), (1, "s3", "none"), (2, "local", "none"), (3, "s3", "none"), (4, "local", "none")]
RUNS += [(5, "local", "thread"), (6, "s3", "thread"), (7, "local", "process"), (8, "s3", "process")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed, where, mode", RUNS)
def test_sixty_steps_with_twelve_random_faults(tmp_path, monkeypatch, store, seed, where, mode):
    codes, printed = check_continuation(tmp_path, monkeypatch, drawn(seed), 60, where, mode)
    assert HANG in codes and 137 in codes and "503" in store.struck, printed
    assert "stopping after this step: SIGTERM" in printed


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["none", "thread"])
def test_faults_at_the_end_of_a_run(tmp_path, monkeypatch, store, mode):
    """In a validation, in the last step, in the last save and after it."""
    places = [
        "kill@rank=1,step=3,phase=validation", "kill@rank=0,step=5,phase=optimizer",
        "exit@rank=1,step=6,phase=checkpoint", "full=3@rank=0,step=6,phase=checkpoint",
        "kill@rank=0,step=6,phase=validation",
    ]  # fmt: skip
    check_continuation(tmp_path, monkeypatch, places, 6, "local", mode, save_every=3, eval_every=3)
