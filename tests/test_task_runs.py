"""train_mmdit.py on edits and on all tasks at once: what the DDP script loses, on any mesh, through any stop."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from data.edit import CATEGORIES
from parallel import checkpoint
from tests.edit_shards import write_edit_shard
from tests.script_runs import run_script
from tests.shards import simple_samples, write_shard
from tools import evaluate, evaluate_edit, sample
from tools.edit import QwenImageEditor

FAST = [
    "--global_batch_size", "10", "--lr_schedule", "constant", "--warmup_steps", "1", "--eval_every", "0",
    "--sample_every", "0", "--log_every", "1", "--log_samples", "--eval_samples", "4", "--optimizer", "adamw", "--lr",
    "4e-3", "--ema_decay", "0.99", "--region_weight", "3", "--num_steps", "3", "--save_every", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_edit_shard(folder / "edits-train.tar", 22)
    write_edit_shard(folder / "edits-held-out.tar", 11, seed=2)
    write_shard(folder / "plain-train.tar", simple_samples(12))
    write_shard(folder / "plain-held-out.tar", simple_samples(4, "h"))
    return folder


def train(folder: Path, run: Path, *flags: str, script="train_mmdit.py", data="edits", ranks: int = 1) -> Path:
    arguments = ["--run_folder", str(run), "--cache_folder", str(folder / "cache"), *FAST]
    arguments += [
        "--data",
        str(folder / f"{data}-train.tar"),
        "--validation_data",
        str(folder / f"{data}-held-out.tar"),
    ]
    code, printed = run_script(script, [*arguments, *flags], ranks)
    assert code == 0, printed
    return run


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def weights(run: Path, prefix: str) -> dict[str, torch.Tensor]:
    stored = checkpoint.load_tensors(run / "checkpoints", 3, prefix)
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items()}


def assert_same_losses(run: Path, expected: Path, norm: str = "grad_norm", rel: float = 1e-5) -> None:
    assert lines(run, "samples_seen.jsonl") == lines(expected, "samples_seen.jsonl")
    for mine, theirs in zip(lines(run), lines(expected), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=rel), mine["step"]
        assert mine["grad_norm"] == pytest.approx(theirs[norm], rel=10 * rel), mine["step"]


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Three steps on edits, one rank."""
    return train(folder, tmp_path_factory.mktemp("runs") / "alone", "--task", "edit")


def test_an_edit_costs_what_it_costs_the_ddp_script(folder, alone, tmp_path):
    flags = ["--train", "renderer", "--instruction_dropout", "0.1"]
    ddp = train(folder, tmp_path / "ddp", *flags, script="train_edit_ddp.py")
    assert_same_losses(alone, ddp, "renderer_grad_norm")
    mine, theirs = weights(alone, "model."), weights(ddp, "renderer.")
    assert mine.keys() == theirs.keys() and len(mine) > 50
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).abs().mean() <= 1e-5 * tensor.abs().mean() + 1e-6, name


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, ["--max_tokens_per_micro_batch", "450"]),
        (2, ["--tp", "2", "--sample_every", "3", "--sample_steps", "2", "--num_examples", "5"]),
        (4, ["--cp", "2", "--dp_shard", "2", "--shard_text_encoder", "--sample_every", "3", "--sample_steps", "1"]),
    ],
    ids=["2 shards, accumulation", "tp 2", "2 shards, cp 2"],
)
def test_every_mesh_loses_the_same_on_edits(folder, alone, tmp_path, ranks, mesh):
    run = train(folder, tmp_path / "run", "--task", "edit", *mesh, ranks=ranks)
    assert_same_losses(run, alone, rel=2e-5)
    if "--sample_every" in mesh:
        assert Image.open(run / "samples/step-00000003.png").width > 3 * 96  # reference | result | target


@pytest.fixture(scope="module")
def mixed(folder, tmp_path_factory):
    """Four steps of all tasks on two ranks: undisturbed, and stopped after two."""
    runs, file = tmp_path_factory.mktemp("mixed"), folder / "all-train.tar"
    train(folder, runs / "whole", *mixed_flags(folder), "--num_steps", "4", "--save_every", "4", ranks=2)
    train(folder, runs / "part", *mixed_flags(folder), "--num_steps", "2", "--save_every", "2", ranks=2)
    assert not file.exists()
    return runs


def mixed_flags(folder: Path) -> list[str]:
    shares = ["t2i=5", "edit=3", "reconstruction=2"]
    return ["--task", "mixed", "--task_shares", *shares, "--data", str(folder / "*-train.tar"), "--validation_data",
            str(folder / "*-held-out.tar")]  # fmt: skip


def test_a_mixed_run_resumes_to_the_bit(folder, mixed, tmp_path):
    shutil.copytree(mixed / "part", tmp_path / "run")
    train(folder, tmp_path / "run", *mixed_flags(folder), "--num_steps", "4", "--save_every", "4", ranks=2)
    expected, mine = (
        checkpoint.load_tensors(run / "checkpoints", 4, "") for run in (mixed / "whole", tmp_path / "run")
    )
    assert expected.keys() == mine.keys() and all(torch.equal(mine[name], tensor) for name, tensor in expected.items())
    assert lines(tmp_path / "run", "samples_seen.jsonl") == lines(mixed / "whole", "samples_seen.jsonl")


def test_a_mixed_run_is_the_same_on_one_rank_and_keeps_its_shares(folder, mixed, tmp_path):
    watched = [
        "--eval_every",
        "4",
        "--sample_every",
        "4",
        "--sample_steps",
        "1",
        "--sample_prompts",
        "cat",
        "--eval_samples",
        "15",
    ]
    run = train(folder, tmp_path / "run", *mixed_flags(folder), *watched, "--num_steps", "4", "--num_examples", "2")
    trained = [line for line in lines(run) if "loss" in line]
    for mine, theirs in zip(trained, lines(mixed / "whole"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        for task, share in (("t2i", 5), ("edit", 3), ("reconstruction", 2)):
            assert mine[f"samples_{task}"] == share * (mine["step"] + 1)
            assert mine[f"loss_{task}"] == pytest.approx(theirs[f"loss_{task}"], rel=1e-5)
    assert {"val_loss_t2i", "val_loss_edit", "val_loss_reconstruction"} <= {
        name for line in lines(run) for name in line
    }
    for name in ("samples", "edits"):
        assert (run / name / "step-00000004.png").exists(), name


def test_edits_are_told_apart_by_category(alone):
    """As the DDP script does; the categories' losses, by their samples, add up to the whole."""
    for line in lines(alone):
        by_category = {name: loss for name, loss in line.items() if name[:5] == "loss_" and name[5:] in CATEGORIES}
        assert len(by_category) > 3 and min(by_category.values()) <= line["loss"] <= max(by_category.values())


def test_refused_words_hold_for_both_tasks(folder, tmp_path):
    """Every rank counts its own; what is refused is named by its first letter, and nothing trains on it."""
    words = tmp_path / "words.txt"
    words.write_text("remove\n")
    for task, flags in (("edit", []), ("mixed", mixed_flags(folder))):
        run = train(folder, tmp_path / task, "--task", task, *flags, "--refused_words", str(words), ranks=2)
        assert lines(run)[-1]["refused"] > 0 and lines(run)[-1]["bad_samples"] == lines(run)[-1]["refused"], task
        logged = (run / "train.log").read_text()
        assert "of the refused words (" in logged and "r***" in logged and "refused words (remove" not in logged


def test_data_of_another_task_is_named_with_a_hint(folder, tmp_path):
    flags = ["--run_folder", str(tmp_path / "run"), "--cache_folder", str(folder / "cache"), *FAST]
    for task in ("edit", "mixed"):
        code, printed = run_script(
            "train_mmdit.py", [*flags, "--data", str(folder / "plain-train.tar"), "--task", task]
        )
        assert code == 2 and "--data emoji-edits" in printed and "Traceback" not in printed, printed


def test_tools_say_which_task_a_run_is_of(alone, tmp_path):
    with pytest.raises(ValueError, match=r"was trained for --task edit, and this is for t2i or mixed; use tools.edit"):
        sample.main(sample.Config(run=str(alone), prompt=("cat",), output=str(tmp_path)))
    with pytest.raises(ValueError, match="was trained for --task edit"):
        evaluate.main(evaluate.Config(run=str(alone)))
    shutil.copytree(alone, tmp_path / "t2i")
    config = json.loads((alone / "config.json").read_text())
    (tmp_path / "t2i/config.json").write_text(json.dumps(config | {"task": "t2i"}))
    for tool in (
        lambda: QwenImageEditor(tmp_path / "t2i"),
        lambda: evaluate_edit.main(evaluate_edit.Config(run=str(tmp_path / "t2i"))),
    ):
        with pytest.raises(ValueError, match="was trained for --task t2i, and this is for edit or mixed"):
            tool()
