"""The edit script through its command line: any number of ranks gives the same weights, resumes to the bit."""

import dataclasses
import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from data.edit import check_edit_values
from model.mmdit import MMDiTConfig
from parallel import checkpoint
from parallel.weights import read_safetensors
from tests.edit_shards import write_edit_shard
from tests.released_folder import make_released
from tests.script_runs import REPOSITORY, run_script
from tools import evaluate_edit, export
from train_edit_ddp import Config
from utils.config import parse
from utils.run_events import read_events

FAST = [
    "--global_batch_size", "8", "--lr_schedule", "constant", "--warmup_steps", "1", "--eval_every", "0",
    "--sample_every", "0", "--log_every", "1", "--log_samples", "--eval_samples", "4", "--num_steps", "5",
    "--save_every", "5", "--optimizer", "adamw", "--lr", "4e-3", "--planner_lr", "1e-3",
]  # fmt: skip
SMALL = MMDiTConfig(
    num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=128, axes_dims_rope=(2, 2, 4)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edits")
    write_edit_shard(folder / "train-0.tar", 22)
    write_edit_shard(folder / "train-1.tar", 11, seed=1)
    write_edit_shard(folder / "validation.tar", 11, seed=2)
    return folder


def train(folder: Path, run: Path, *flags: str, ranks: int = 1, expect: int = 0) -> str:
    """Run the script and return what it printed; fails the test on another exit code."""
    arguments = ["--run_folder", str(run), "--cache_folder", str(folder / "cache")]
    arguments += ["--data", str(folder / "train-*.tar"), "--validation_data", str(folder / "validation.tar")]
    code, printed = run_script("train_edit_ddp.py", [*arguments, *FAST, *flags], ranks)
    assert code == expect, printed
    return printed


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def state(run: Path, step: int = 5) -> dict[str, torch.Tensor]:
    return checkpoint.load_tensors(run / "checkpoints", step, "")


def averages(run: Path) -> dict[str, torch.Tensor]:
    return {name[4:]: tensor for name, tensor in state(run, 2).items() if name.startswith("ema.")}


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Five steps on one rank."""
    run = tmp_path_factory.mktemp("runs") / "alone"
    train(folder, run)
    return run


@pytest.fixture(scope="module")
def shared_out(folder, tmp_path_factory):
    """The same on two ranks that share the optimizer's state out (ZeRO): all five steps, and three of them."""
    runs = tmp_path_factory.mktemp("runs")
    train(folder, runs / "whole", "--zero", ranks=2)
    train(folder, runs / "part", "--zero", "--num_steps", "3", "--save_every", "3", ranks=2)
    return runs


def assert_same_training(run: Path, expected: Path) -> None:
    """Assert that two runs saw the same samples, and lost and learned the same, to rounding in float32."""
    assert lines(run, "samples_seen.jsonl") == lines(expected, "samples_seen.jsonl")
    for mine, theirs in zip(lines(run), lines(expected), strict=True):
        for name in ("loss", "plan_loss", "renderer_grad_norm", "planner_grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), (mine["step"], name)
    mine, theirs = state(run), state(expected)
    assert mine.keys() == theirs.keys()
    assert {name.split(".")[0] for name in mine} == {"planner", "renderer", "ema", "optimizer"}
    for name, tensor in theirs.items():
        if not name.startswith(
            "optimizer."
        ):  # Adam's first steps turn a gradient that is all rounding into a full step
            assert (mine[name] - tensor).abs().mean() <= 1e-5 * tensor.abs().mean() + 1e-6, name


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(4, []), (1, ["--max_tokens_per_micro_batch", "450"]), (2, ["--max_tokens_per_micro_batch", "450"])],
    ids=["4 ranks", "accumulation", "accumulation on 2 ranks"],
)
def test_any_number_of_ranks_and_micro_batches_gives_the_same(folder, alone, tmp_path, ranks, flags):
    train(folder, tmp_path / "run", *flags, ranks=ranks)
    assert_same_training(tmp_path / "run", alone)


def test_zero_gives_the_same(alone, shared_out):
    assert_same_training(shared_out / "whole", alone)


def test_resumed_run_is_the_undisturbed_one_to_the_bit(folder, shared_out, tmp_path):
    shutil.copytree(shared_out / "part", tmp_path / "run")
    train(folder, tmp_path / "run", "--zero", ranks=2)
    expected, mine = state(shared_out / "whole"), state(tmp_path / "run")
    assert expected.keys() == mine.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items())
    assert lines(tmp_path / "run", "samples_seen.jsonl") == lines(shared_out / "whole", "samples_seen.jsonl")


def test_a_run_with_the_default_optimizer_resumes_to_the_bit(folder, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    muon = ["--optimizer", Config.optimizer, "--lr", str(Config.lr), "--planner_lr", str(Config.planner_lr)]
    train(folder, whole, *muon, "--num_steps", "3", "--save_every", "3", ranks=2)
    train(folder, part, *muon, "--num_steps", "2", "--save_every", "2", ranks=2)
    train(folder, part, *muon, "--num_steps", "3", "--save_every", "2", ranks=2)
    expected, mine = state(whole, 3), state(part, 3)
    assert expected.keys() == mine.keys()
    assert {name.split(".")[1] for name in mine if name.endswith("momentum_buffer")} == {"planner", "renderer"}
    assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items())


def test_resumes_on_another_number_of_ranks_without_zero(folder, alone, shared_out, tmp_path):
    shutil.copytree(shared_out / "part", tmp_path / "run")
    train(folder, tmp_path / "run", ranks=1)
    assert_same_training(tmp_path / "run", alone)


def test_everything_a_run_should_leave(folder, tmp_path, monkeypatch):
    run = tmp_path / "run"
    watch = ["--eval_every", "2", "--sample_every", "2", "--sample_steps", "2", "--num_examples", "5"]
    words = tmp_path / "refused.txt"
    words.write_text("nothing like this\n")
    more = ["--freeze_vision", "--refused_words", str(words), "--region_weight", "3", "--normalize", "1"]
    printed = train(folder, run, "--num_steps", "2", "--save_every", "2", *watch, *more, ranks=2)
    assert "pictures" in printed and "curves" in printed and "checkpoint" in printed
    for name in ("config.json", "train_edit_ddp.py", "train.log", "tb", "samples/step-00000000.png"):
        assert (run / name).exists(), name
    assert Image.open(run / "samples/step-00000002.png").width > 3 * 96
    watched = [line for line in lines(run) if "val_loss" in line]
    assert [line["step"] for line in watched] == [0, 2]
    assert watched[0]["val_loss"] == pytest.approx(2.0, abs=0.5)  # the network says zero
    assert {"val_loss_zh", "val_loss_en", "val_loss_remove", "val_plan_loss", "val_plan_exact"} <= watched[0].keys()
    events = read_events(run)
    assert [e["event"] for e in events] == ["start", "checkpoint", "goodput", "stop"]
    assert min(events[2][state] for state in ("training", "checkpoint", "validation", "restart")) > 0
    assert not any("visual" in name for name in state(run, 2))  # frozen: neither trained nor stored

    export.main(export.Config(run=str(run), output=str(tmp_path / "exported")))
    exported = read_safetensors(tmp_path / "exported/transformer")
    assert all(torch.equal(tensor.bfloat16(), exported[name]) for name, tensor in averages(run).items())

    evaluate_edit.main(evaluate_edit.Config(run=str(run), num_edits=11, num_steps=2))
    report = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["groups"]
    assert {"all", "en", "zh", "remove", "background"} <= report.keys() and (run / "evaluation.png").exists()
    assert report["all"]["edits"] == report["en"]["edits"] + report["zh"]["edits"]
    # A copy is right outside by construction; noise is worse than what the VAE can do.
    assert report["all"]["copy"]["outside"] == 0 < report["all"]["copy"]["inside"]
    assert report["all"]["vae"]["inside"] < report["all"]["untrained"]["inside"]
    assert report["all"]["kept"] == 0

    # A planner that asks for a change in the left half alone: of noise, the right half is spared.
    plan = '[{"action":"remove","target":"dog","bbox":[0,0,500,1000]}]'
    monkeypatch.setattr(evaluate_edit, "generate_plan", lambda *_: plan)
    evaluate_edit.main(evaluate_edit.Config(run=str(run), num_edits=11, num_steps=2, keep="plan"))
    kept = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert kept["keep"] == "plan" and kept["groups"]["all"]["kept"] == 0.5
    assert kept["groups"]["all"]["renderer"]["outside"] < 0.8 * report["all"]["renderer"]["outside"]


@pytest.mark.parametrize("part", ["planner", "renderer", "planner of a model with a renderer"])
def test_trains_either_alone_and_names_a_command_that_works(folder, tmp_path, monkeypatch, part):
    part, *with_renderer = part.split(" of ")
    flags = ["--model", str(make_released(tmp_path / "model", SMALL))] if with_renderer else []
    flags += ["--train", part, "--num_steps", "2", "--save_every", "2"]
    printed = train(folder, tmp_path / "run", *flags, ranks=2)
    parts = {name.split(".")[0] for name in state(tmp_path / "run", 2)} - {"optimizer"}
    assert parts == ({"planner"} if part == "planner" else {"renderer", "ema"})

    name, arguments = re.search(r"try it +\./launch\.sh -m (\S+) (.*)", printed).groups()
    assert name == ("tools.edit" if "renderer" in parts or with_renderer else "tools.report")
    arguments = shlex.split(arguments)
    if name == "tools.edit":
        Image.new("RGB", (96, 96)).save(tmp_path / "a.png")
        arguments += ["--num_steps", "1", "--no_plan"]
    tool = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    if not with_renderer:  # the run names its model folder from the repository
        (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    tool.main(parse(tool.Config, args=arguments))
    assert (tmp_path / ("edits/grid.png" if name == "tools.edit" else "run/report.html")).is_file()


def test_adapters_of_the_renderer(folder, tmp_path):
    """DDP with adapters: what is stored is theirs alone, the same on 1 rank and, resumed, on 2."""
    model = make_released(tmp_path / "model", SMALL)
    flags = ["--model", str(model), "--train", "renderer", "--lora_rank", "2", "--save_every", "2"]
    train(folder, tmp_path / "one", *flags, "--num_steps", "4")
    train(folder, tmp_path / "two", *flags, "--num_steps", "2", ranks=2)
    train(folder, tmp_path / "two", *flags, "--num_steps", "4", ranks=2)
    expected, mine = state(tmp_path / "one", 4), state(tmp_path / "two", 4)
    weights = {name for name in expected if not name.startswith("optimizer.")}
    assert expected.keys() == mine.keys() and all(".lora_" in name for name in weights)
    for name in weights:
        assert (mine[name] - expected[name]).abs().mean() <= 1e-5 * expected[name].abs().mean() + 1e-6, name
    assert any(expected[name].abs().max() > 0 for name in weights if ".lora_B." in name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train", "editor"], "--train must be one of planner,renderer, planner, renderer, got 'editor'"),
        (["--shares", "remove"], "--shares takes name=number"),
        (["--shares", "paint=1"], "paint"),
        (["--lora_rank", "4"], "--lora_rank adapts released weights"),
        (["--static_graph", "--max_tokens_per_micro_batch", "450"], "--static_graph needs one micro-batch a step"),
        (["--data", "assets/tiny"], "no shards match"),
    ],
)
def test_what_a_user_can_get_wrong(folder, tmp_path, flags, message):
    printed = train(folder, tmp_path / "run", *flags, expect=2)
    assert message in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"normalize": 2.0}, "--normalize is a probability, got 2.0"),
        ({"instruction_dropout": -0.1}, "--instruction_dropout is a probability, got -0.1"),
        ({"condition_pixels": 100}, "--condition_pixels is an area in pixels, at least 8192, got 100"),
        ({"region_weight": 0.0}, "--region_weight must be above 0, got 0.0"),
        ({"zero": True}, "--zero shares out AdamW's state: add --optimizer adamw"),
        ({"lora_rank": 4, "train": "planner"}, "--lora_rank is for the renderer, and --train leaves it out"),
    ],
)
def test_values_that_no_later_check_would_explain(wrong, message):
    with pytest.raises(ValueError, match=message):
        check_edit_values(dataclasses.replace(Config(), **wrong))
    check_edit_values(Config())
