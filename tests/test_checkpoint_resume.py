"""Where a run begins: its own newest checkpoint, else the weights of another run, and nothing else of that."""

import os

import pytest
import torch

from parallel.checkpoint_resume import load_weights, resume
from parallel.checkpoint_saver import CheckpointSaver
from utils.run_state import checkpoint_folder


def run_of(value: float, names: tuple[str, ...] = ("a.weight", "b.weight")) -> dict[str, torch.Tensor]:
    """Return a run's tensors: weights of this value, their average, and the optimizer's state of them."""
    tensors = {f"model.{name}": torch.full((3,), value) for name in names}
    tensors |= {f"ema.{name}": torch.full((3,), -value) for name in names}
    return tensors | {f"optimizer.{name}.exp_avg": torch.full((3,), 10 * value) for name in names}


def save(folder, step: int, tensors: dict, base: dict | None = None) -> None:
    saver = CheckpointSaver(folder, keep_last=9)
    saver.save(step, tensors, {"step": step, "data": "cursor"} | (base or {}))
    saver.close()


def first_values(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: tensor[0].item() for name, tensor in tensors.items()}


def test_a_run_begins_with_anothers_weights_until_it_has_a_checkpoint(tmp_path):
    save(tmp_path / "old/checkpoints", 7, run_of(7.0))
    saver, tensors = CheckpointSaver(tmp_path / "new/checkpoints"), run_of(1.0)
    assert resume(saver, tensors, {}, "model", str(tmp_path / "old")) == (0, None) and saver.saved_step is None
    # The average begins at the weights; the optimizer's state is this run's own.
    weights = {"model.a.weight": 7.0, "model.b.weight": 7.0, "ema.a.weight": 7.0, "ema.b.weight": 7.0}
    assert first_values(tensors) == weights | {"optimizer.a.weight.exp_avg": 10.0, "optimizer.b.weight.exp_avg": 10.0}

    save(tmp_path / "new/checkpoints", 3, run_of(3.0))
    assert resume(saver, tensors, {}, "model", str(tmp_path / "old")) == (3, {"step": 3, "data": "cursor"})
    assert saver.saved_step == 3 and first_values(tensors) == first_values(run_of(3.0))


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, caplog):
    for step in (1, 2):
        save(tmp_path, step, run_of(float(step)))
    (file,) = (tmp_path / "step-00000002").glob("*.bin")
    file.write_bytes(bytes(file.stat().st_size))
    saver, tensors = CheckpointSaver(tmp_path), run_of(9.0)
    assert resume(saver, tensors, {}, "model") == (1, {"step": 1, "data": "cursor"})
    assert first_values(tensors) == first_values(run_of(1.0))
    assert f"skipping damaged checkpoint {tmp_path / 'step-00000002'}" in caplog.text


def test_what_can_be_named(tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        save(run / "checkpoints", step, run_of(float(step)))
    for source, step in ((run, 2), (run / "checkpoints", 2), (run / "checkpoints/step-00000001", 1)):
        tensors = run_of(9.0)
        assert load_weights(str(source), tensors, {}, "model") == step
        assert tensors["model.a.weight"][0] == step
    # A run that keeps its checkpoints elsewhere says so in its config.json.
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "config.json").write_text(f'{{"checkpoint_folder": "{run / "checkpoints"}"}}')
    assert load_weights(str(moved), run_of(9.0), {}, "model") == 2
    assert checkpoint_folder("s3://bucket/run/") == "s3://bucket/run/checkpoints"

    for source in ("none", "run/checkpoints/step-00000005"):
        with pytest.raises(ValueError, match=f"{source}: give a run's folder|step-00000005 is not a valid checkpoint"):
            load_weights(str(tmp_path / source), tensors, {}, "model")
    os.truncate(run / "checkpoints/step-00000001/index.json", 10)
    with pytest.raises(ValueError, match="not a valid checkpoint: index.json has 10 of"):
        load_weights(str(run / "checkpoints/step-00000001"), tensors, {}, "model")


def test_differences_are_named_before_a_tensor_changes(tmp_path):
    save(tmp_path, 1, run_of(1.0), {"base": "of another"})
    saver = CheckpointSaver(tmp_path)
    larger, other_shape = run_of(5.0, ("a.weight", "b.weight", "c.weight")), run_of(5.0)
    other_shape["model.b.weight"] = torch.zeros(4)
    momentum = {name.replace("exp_avg", "momentum_buffer"): tensor for name, tensor in run_of(5.0).items()}
    for tensors, message in (
        (larger, r"another model and optimizer: 3 tensors not in it \(first \['ema.c.weight', 'model.c.weight', "),
        (
            other_shape,
            r"another model: 1 of .*\['model.b.weight is \(3,\) float32 there, \(4,\) float32 here'\]; resume",
        ),
        (momentum, r"optimizer: 2 tensors not in it \(first \['optimizer.a.weight.momentum_buffer'.* 2 only in it"),
    ):
        before = first_values(tensors)
        with pytest.raises(ValueError, match=message):
            resume(saver, tensors, {}, "model")
        assert first_values(tensors) == before
    with pytest.raises(ValueError, match="another base than the weights in model"):
        resume(saver, run_of(5.0), {"base": "of this"}, "model")

    # Weights alone: the optimizer may be another, the model may not.
    assert load_weights(str(tmp_path), momentum, {"base": "of another"}, "model") == 1
    assert momentum["model.a.weight"][0] == 1 and momentum["optimizer.a.weight.momentum_buffer"][0] == 50
    with pytest.raises(ValueError, match=r"another model: 1 tensors not in it \(first \['model.c.weight'\]\)"):
        load_weights(str(tmp_path), larger, {}, "model")
