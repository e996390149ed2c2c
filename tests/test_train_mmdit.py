"""The training script through its real command line: it runs, resumes to the bit, and says clearly what is wrong."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallel import checkpoint
from tests.script_runs import run_script
from tests.shards import simple_samples, write_shard
from utils.exit_codes import DIVERGED, ROLLED_BACK
from utils.run_events import read_events
from utils.run_state import checkpoint_folder

FAST = [
    "--global_batch_size", "8", "--lr_schedule", "constant", "--eval_every", "0", "--sample_every", "0",
    "--log_every", "1", "--log_samples", "--max_tokens_per_micro_batch", "120", "--eval_samples", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def train(cache: Path, run: Path, *flags: str, ranks: int = 1, script: str = "train_mmdit.py", expect: int = 0) -> str:
    """Run the script and return what it printed; fails the test on another exit code."""
    arguments = ["--run_folder", str(run), "--cache_folder", str(cache), *FAST, *flags]
    code, printed = run_script(script, arguments, ranks)
    assert code == expect, printed
    return printed


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(run: Path) -> list[dict]:
    return lines(run / "metrics.jsonl")


def samples_seen(run: Path) -> dict[int, list[str]]:
    lines = [json.loads(line) for line in (run / "samples_seen.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["samples"] for line in lines}


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.load_tensors(run / "checkpoints", step, "")


@pytest.fixture(scope="module")
def undisturbed(cache, tmp_path_factory):
    """Ten steps on two ranks without a stop."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(cache, run, "--num_steps", "10", "--save_every", "5", ranks=2)
    return run


@pytest.fixture(scope="module")
def stopped(cache, tmp_path_factory):
    """The same run, ended after five steps."""
    run = tmp_path_factory.mktemp("runs") / "stopped"
    train(cache, run, "--num_steps", "5", "--save_every", "5", ranks=2)
    return run


def test_resumed_run_is_the_undisturbed_one_to_the_bit(cache, undisturbed, stopped, tmp_path):
    resumed = tmp_path / "resumed"
    shutil.copytree(stopped, resumed)
    train(cache, resumed, "--num_steps", "10", "--save_every", "2", "--checkpoint_async", "process", ranks=2)
    expected, actual = state(undisturbed, 10), state(resumed, 10)
    assert expected.keys() == actual.keys() and any(name.startswith("optimizer.") for name in expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert samples_seen(resumed) == samples_seen(undisturbed)
    key = ("step", "loss", "grad_norm", "lr")
    assert [[m[k] for k in key] for m in metrics(resumed)] == [[m[k] for k in key] for m in metrics(undisturbed)]


@pytest.mark.parametrize("ranks, flags", [(1, []), (4, ["--cp", "2", "--tp", "2", "--tp_sequence_parallel"])])
def test_resume_on_another_world_size_and_mesh(cache, undisturbed, stopped, tmp_path, ranks, flags):
    resumed = tmp_path / "resumed"
    shutil.copytree(stopped, resumed)
    train(cache, resumed, "--num_steps", "10", "--save_every", "5", *flags, ranks=ranks)
    assert samples_seen(resumed) == samples_seen(undisturbed)
    losses = [[m["loss"] for m in metrics(run)] for run in (resumed, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_which_checkpoints_stay_where_and_a_run_that_begins_with_their_weights(cache, tmp_path):
    first, second, elsewhere = tmp_path / "first", tmp_path / "second", tmp_path / "elsewhere"
    flags = ["--num_steps", "7", "--save_every", "1", "--eval_every", "1", "--checkpoint_folder", str(elsewhere)]
    kept = ["--keep_checkpoints", "1", "--keep_every", "3", "--keep_best", "1", "--checkpoint_async", "thread"]
    assert str(elsewhere / "step-00000007") in train(cache, first, *flags, *kept)
    losses = {m["step"]: m["val_loss"] for m in metrics(first) if m.get("val_loss") and m["step"]}
    best = min(losses, key=losses.get)
    assert {path.name for path in elsewhere.glob("step-*")} == {f"step-{step:08d}" for step in {3, 6, 7, best}}
    assert not (first / "checkpoints").exists() and checkpoint_folder(first) == str(elsewhere)
    # No learning rate: after a step the weights are still those of the start.
    train(cache, second, "--init_from", str(first), "--num_steps", "1", "--save_every", "1", "--lr", "0")
    before, after = checkpoint.load_tensors(elsewhere, 7, "model."), state(second, 1)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(after[name.replace("model.", "ema.", 1)], before[name]) for name in before)
    assert after["optimizer.proj_out.weight.step"] == 1
    refused = train(cache, tmp_path / "third", "--init_from", str(first), "--num_languages", "3", expect=2)
    assert "1 tensors not in it (first ['model.language_embed.weight'])" in refused


def test_everything_a_run_should_leave(cache, tmp_path):
    run = tmp_path / "run"
    flags = [
        "--num_steps", "4", "--eval_every", "2", "--sample_every", "4", "--sample_steps", "2", "--save_every", "4",
        "--sample_prompts", "dog face", "狗脸", "红苹果", "--num_languages", "3",
    ]  # fmt: skip
    printed = train(cache, run, *flags, ranks=2)
    assert "pictures" in printed and "curves" in printed and "checkpoint" in printed
    for name in ("config.json", "train_mmdit.py", "train.log", "tb", "samples/step-00000000.png"):
        assert (run / name).exists(), name
    assert Image.open(run / "samples/step-00000004.png").width > 3 * 64
    watched = [m for m in metrics(run) if "val_loss" in m]
    assert [m["step"] for m in watched] == [0, 2, 4]
    # At the start the network says zero: its error is the variance of noise plus that of the unit-variance latents.
    assert watched[0]["val_loss"] == pytest.approx(2.0, abs=0.4)
    assert {"val_loss_zh", "val_loss_en"} <= watched[0].keys()
    logged = {k for m in metrics(run) for k in m}
    wanted = "loss grad_norm lr samples tokens step_s data_wait_s samples_per_s tokens_per_s tflops"
    assert set(wanted.split()) <= logged

    events = read_events(run)
    kinds = [(e["event"], e["step"], e.get("reason")) for e in events if e["event"] != "goodput"]
    assert kinds == [("start", 0, "first"), ("checkpoint", 4, None), ("stop", 4, "finished")]
    goodput = [e for e in events if e["event"] == "goodput"][-1]
    assert min(goodput[state] for state in ("training", "checkpoint", "validation", "restart")) > 0
    board = EventAccumulator(str(run / "tb"), size_guidance={"histograms": 0}).Reload()
    tags = board.Tags()
    assert {"data/t", "data/caption_tokens"} == set(tags["histograms"]) and "samples" in tags["images"]
    assert [h.histogram_value.num for h in board.Histograms("data/t")] == [4] * 4  # rank 0's half of each step
    assert {"samples/prompts/text_summary", "run/config/text_summary", "run/summary/text_summary"} <= {*tags["tensors"]}

    before = (run / "metrics.jsonl").read_text()
    again = train(cache, run, *flags)  # nothing is left to do, on any number of ranks
    assert "done" in again and len((run / "metrics.jsonl").read_text().splitlines()) == len(before.splitlines())
    other = train(cache, run, *flags, "--lr", "0.5", expect=2)
    assert "--lr" in other and "another configuration" in other and "Traceback" not in other


def test_switches_through_the_command_line(cache, tmp_path):
    """They learn what a plain run learns, save for rounding; muon, another optimizer, starts from the same loss."""
    plain, switched, muon = (tmp_path / name for name in ("plain", "switched", "muon"))
    train(cache, plain, "--num_steps", "3")
    train(
        cache, switched, "--num_steps", "3", "--activation_checkpointing", "selective", "--num_prefetch", "1",
        "--cpu_offload", "--no_reshard_after_forward", ranks=2,
    )  # fmt: skip
    losses = [[m["loss"] for m in metrics(run)] for run in (plain, switched)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    train(cache, muon, "--num_steps", "2", "--save_every", "2", "--optimizer", "muon", ranks=2)
    assert metrics(muon)[0]["loss"] == pytest.approx(losses[0][0], rel=1e-5)
    assert any(name.endswith("momentum_buffer") for name in state(muon, 2))


def test_a_mixture_with_moving_shares_resumes_on_other_ranks(cache, tmp_path):
    mixture = tmp_path / "mixture.toml"
    mixture.write_text("""
        [sources]
        emoji = "emoji-small"
        [[groups]]
        language = "zh"
        category = "scenes"
        share = 0.3
        [[groups]]
        language = "zh"
        share = [[0, 0.3], [6, 0.5]]
        [[groups]]
        language = "en"
        share = 0.4
    """)
    flags = ["--data", str(mixture), "--save_every", "3", "--eval_every", "2", "--reweight", "2"]
    train(cache, tmp_path / "whole", *flags, "--num_steps", "6")
    train(cache, tmp_path / "parts", *flags, "--num_steps", "3")
    train(cache, tmp_path / "parts", *flags, "--num_steps", "6", ranks=2)
    assert samples_seen(tmp_path / "parts") == samples_seen(tmp_path / "whole")
    last = [m for m in metrics(tmp_path / "parts") if "loss" in m][-1]
    names = ("zh-scenes", "zh", "en")
    assert sum(last[f"samples_{name}"] for name in names) == 48 and last["loss_en"] > 0
    assert "shares zh-scenes" in (tmp_path / "whole" / "train.log").read_text()
    printed = train(cache, tmp_path / "whole", *flags, "--eval_every", "3", "--num_steps", "8", expect=2)
    assert "--eval_every: 2 there, 3 here" in printed


def test_own_shards_in_any_number(cache, tmp_path):
    """One shard on two ranks, fewer samples than a batch, a caption that is cut and counted, a bad sample: replaced,
    named, and within its budget.
    """
    *samples, last = simple_samples(6)
    shard = write_shard(tmp_path / "mine.tar", [*samples, last | {"captions": {"en": ["long " * 1200]}}])
    run = tmp_path / "run"
    data = ["--data", str(shard), "--validation_data", str(shard), "--save_every", "0", "--num_steps", "3"]
    data += ["--max_tokens_per_micro_batch", "1200"]
    train(cache, run, *data, "--eval_every", "3", ranks=2)
    counts = [line["cut_captions"] for line in metrics(run) if "loss" in line]
    assert counts == sorted(counts) and 1 <= counts[-1] <= 2  # each rank encodes it once and keeps it
    assert {len(keys) for keys in samples_seen(run).values()} == {8}
    content = bytearray(shard.read_bytes())
    content[content.index(b"IDAT") + 9] ^= 0xFF  # inside the first picture; the cached index keeps its size and time
    times = shard.stat()
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    printed = train(cache, tmp_path / "bad", *data, ranks=2)
    assert "bad sample mine.tar/s000" in printed and "done" in printed
    printed = train(cache, tmp_path / "worse", *data, "--max_bad_samples", "0", expect=2)
    assert "--max_bad_samples" in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--tp", "3", "--dp_shard", "1"], ["3", "ranks"]),
        (["--model", "nowhere"], ["nowhere"]),
        (["--data", "nothing/*.tar"], ["no shards match", "nothing/*.tar"]),
        (["--no_such_flag", "1"], ["no_such_flag"]),
        (["--float8"], ["--float8 needs a GPU", "leave it out"]),
        (["--optimizer", "sgd"], ["--optimizer must be one of", "adamw"]),
        (["--activation_checkpointing", "some"], ["--activation_checkpointing", "some", "selective"]),
        (["--reduce_dtype", "float16"], ["--reduce_dtype", "float16"]),
        (["--lr_schedule", "linear"], ["lr_schedule", "linear", "cosine"]),
        (["--max_tokens_per_micro_batch", "8"], ["8", "max_tokens_per_micro_batch"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_message(cache, tmp_path, flags, words):
    printed = train(cache, tmp_path / "run", *flags, "--num_steps", "1", expect=2)
    assert all(word in printed for word in words), printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_tensor_parallel_must_divide_the_heads(cache, tmp_path):
    printed = train(cache, tmp_path / "run", "--tp", "3", "--num_steps", "1", ranks=3, expect=2)
    assert "--cp 1 × --tp 3 does not divide the model's 4" in printed
    assert "attention heads" in printed


def test_bad_steps_are_not_taken_and_a_run_that_only_has_them_gives_up(cache, tmp_path):
    """With this learning rate the first step makes every later loss infinite."""
    run = tmp_path / "run"
    flags = ["--lr", "1e30", "--warmup_steps", "0", "--max_grad_norm", "1e30", "--save_every", "1"]
    flags += ["--num_steps", "6", "--rollback_after", "3", "--max_rollbacks", "1"]
    printed = train(cache, run, *flags, ranks=2, expect=ROLLED_BACK)
    assert "stopped: step 3: 3 bad steps in a row" in printed and "step 1 is not taken" in printed
    assert checkpoint.latest(run / "checkpoints") == 1  # not of a bad step
    weights = {name: tensor for name, tensor in state(run, 1).items() if name.startswith("model.")}
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert [bad["step"] for bad in lines(run / "bad_steps.jsonl")] == [1, 2, 3]
    seen = samples_seen(run)
    assert [bad["samples"] for bad in lines(run / "bad_steps.jsonl")[:2]] == [seen[1], seen[2]]
    printed = train(cache, run, *flags, ranks=2, expect=DIVERGED)  # after other data, to no avail
    assert "after 1 roll-backs" in printed
    kinds = [(event["event"], event["reason"]) for event in read_events(run) if event["event"] in ("start", "stop")]
    assert kinds == [("start", "first"), ("stop", "rollback"), ("start", "rollback")]
    rows = lines(run / "bad_steps.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] * 2 and rows[0]["samples"] != rows[3]["samples"]
