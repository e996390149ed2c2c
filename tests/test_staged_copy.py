"""A checkpoint is copied while forward and backward go on, and holds what was there at the call."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from parallel import checkpoint, staged_copy
from parallel.checkpoint_saver import MODES, CheckpointSaver
from parallel.fsdp import shard_model
from parallel.init_weights import materialize
from parallel.mesh import build_mesh, data_parallel
from parallel.tensor_parallel import apply_tensor_parallel
from tests.spawn import run_ranks
from tests.toy_model import PLAN, UNITS, Toy, init_toy, toy_batch
from utils.ema import EMA
from utils.optimizer import build_adamw, build_optimizer, build_zero_adamw
from utils.run_state import run_tensors

BACKGROUND = MODES[1:]
HOW = 1e-2, (0.9, 0.99), 1e-8, 0.01  # learning rate, betas, eps, weight decay
fill = staged_copy._fill


class Run:
    """A toy run on this rank, sharded by FSDP; `log` lists what happens in which order."""

    def __init__(self, optimizer: str):
        self.log: list[str] = []
        mesh = build_mesh(
            "cpu", dp_shard=1 if optimizer == "zero" else -1, dp_replicate=-1 if optimizer == "zero" else 1
        )
        self.share = data_parallel(mesh)
        with torch.device("meta"):
            self.model = Toy().float()
        if optimizer != "zero":  # which is for whole copies
            apply_tensor_parallel(self.model, PLAN, mesh["tp"])
            shard_model(self.model, UNITS, mesh, torch.float32, torch.float32, True)
        materialize(self.model, torch.device("cpu"), init_toy, seed=3)
        trained = dict(self.model.named_parameters())
        if optimizer == "zero":
            self.optimizer = build_zero_adamw(trained.items(), *HOW)
        else:
            self.optimizer = build_optimizer(optimizer, trained.items(), *HOW, UNITS)
        self.ema = EMA(trained.items(), 0.9)
        self.tensors = run_tensors(trained, self.ema, self.optimizer)

    def forward_and_backward(self) -> None:
        x, labels, targets = toy_batch(torch.float32)
        for i in range(self.share[0], len(x), self.share[1]):
            (self.model(x[i], labels[i]) - targets[i]).square().sum().backward()
        self.log.append("backward")

    def update(self, step: int) -> None:
        self.optimizer.step()
        self.log.append("step")
        self.ema.update(step)
        self.optimizer.zero_grad()

    def copy_late(self, targets, sources) -> None:
        """Copy long after forward and backward, and in an order that a step under way would show."""
        while "backward" not in self.log:
            time.sleep(0.01)
        time.sleep(0.2)
        for target, source in reversed(list(zip(targets, sources, strict=True))):
            target.copy_(source)
        self.log.append("copied")


def save_beside_a_step(rank, num_ranks, folder, mode, optimizers):
    for optimizer in optimizers:
        run = Run(optimizer)
        for step in range(2):
            run.forward_and_backward()
            run.update(step)
        run.log.clear()
        checkpoint.save(folder / optimizer / "waiting", 2, run.tensors, {"step": 2})
        staged_copy._fill = run.copy_late
        saver = CheckpointSaver(folder / optimizer / "beside", mode)
        saver.save(2, run.tensors, {"step": 2})
        run.forward_and_backward()
        run.update(2)
        assert run.log == ["backward", "copied", "step"]
        saver.close()
        assert saver.num_failures == 0 and 0.1 < saver.last_copy_wait_s < 5
        staged_copy._fill = fill
        run.forward_and_backward()
        run.update(3)
        checkpoint.save(folder / optimizer / "later", 2, run.tensors, {"step": 2})
    return True


@pytest.mark.parametrize("mode", BACKGROUND)
def test_a_save_beside_forward_and_backward_is_that_of_the_step_before(tmp_path, mode):
    """To the byte, for every kind of optimizer; and the step that follows waits for the copy."""
    optimizers = ("adamw", "muon", "zero")
    assert run_ranks(save_beside_a_step, 2, tmp_path, mode, optimizers) == [True, True]
    for optimizer in optimizers:
        waiting, beside, later = (
            {path.name: path.read_bytes() for path in (tmp_path / optimizer / which / "step-00000002").iterdir()}
            for which in ("waiting", "beside", "later")
        )
        for content in (waiting, beside, later):
            content.pop("commit.json")
        assert len(waiting) == 3 and waiting == beside and waiting != later


# ---- Everything that changes the state waits ------------------------------------------------------------------------


class Held:
    """A model, its average, an optimizer and a saver that has just been asked to save; the copy waits for `release`."""

    def __init__(self, folder, monkeypatch, mode="thread"):
        torch.manual_seed(1)
        self.model, self.folder = nn.Linear(3, 4), folder
        self.ema = EMA(self.model.named_parameters(), 0.5)
        with torch.no_grad():
            self.model.weight.mul_(2)
        self.optimizer = build_adamw(self.model.named_parameters(), *HOW)
        self.tensors = run_tensors(dict(self.model.named_parameters()), self.ema, self.optimizer)
        self.model(torch.ones(3)).sum().backward()
        self.release, self.copied = threading.Event(), False
        monkeypatch.setattr(staged_copy, "_fill", self.copy)
        self.saver = CheckpointSaver(folder, mode)
        checkpoint.save(folder / "other", 7, {name: torch.ones_like(t) for name, t in self.tensors.items()}, {})
        self.before = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.saver.save(1, self.tensors, {"step": 1})

    def copy(self, targets, sources):
        assert self.release.wait(20)
        time.sleep(0.1)
        fill(targets, sources)
        self.copied = True

    def validate(self):
        with self.ema.swapped_in(self.model):
            assert self.copied
            self.model(torch.ones(3))

    def load(self):
        checkpoint.load(self.folder / "other", 7, self.tensors)


CHANGES = {
    "optimizer": lambda held: held.optimizer.step(),
    "average": lambda held: held.ema.update(5),
    "validation or samples": Held.validate,
    "load": Held.load,
    "next save": lambda held: held.saver.save(2, {name: -t.detach() for name, t in held.tensors.items()}, {}),
    "roll-back": lambda held: held.saver.wait(),
    "end": lambda held: held.saver.close(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_state_waits_for_the_copy(tmp_path, monkeypatch, change):
    held = Held(tmp_path, monkeypatch)
    threading.Timer(0.1, held.release.set).start()
    assert not held.copied
    change(held)
    assert held.copied
    held.saver.close()
    assert held.saver.num_failures == 0
    stored = {name: torch.zeros_like(tensor) for name, tensor in held.before.items()}
    assert checkpoint.load(tmp_path, 1, stored) == {"step": 1}
    assert all(torch.equal(stored[name], tensor) for name, tensor in held.before.items())


def test_what_changes_no_state_does_not_wait(tmp_path, monkeypatch):
    """Forward, backward, and a step that is not taken."""
    held = Held(tmp_path, monkeypatch)
    for _ in range(3):
        held.model(torch.ones(3)).sum().backward()
        held.optimizer.zero_grad()
    assert not held.copied and held.saver.is_saving
    held.release.set()
    held.saver.close()
    assert held.saver.last_copy_wait_s == 0.0


def test_a_saver_that_is_gone_is_not_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(CheckpointSaver, "wait_for_copy", lambda self: asked.append(self.path(1).parent.name))
    kept, gone = CheckpointSaver(tmp_path / "kept"), CheckpointSaver(tmp_path / "gone")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.step()
    assert {"kept", "gone"} <= set(asked)
    del gone
    asked.clear()
    optimizer.step()
    assert "kept" in asked and "gone" not in asked and kept.mode == "none"


# ---- What fails -----------------------------------------------------------------------------------------------------


def fail_to_copy_on_one_rank(rank, num_ranks, folder, mode):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access")

    saver, tensors = CheckpointSaver(folder, mode), {f"rank{rank}.a": torch.ones(5)}
    saver.save(1, tensors, {"step": 1})
    saver.wait()
    staged_copy._fill = fail if rank else fill
    saver.save(2, tensors, {"step": 2})
    saver.wait_for_copy()
    saver.wait()
    staged_copy._fill = fill
    failed = saver.num_failures, saver._last_failure, saver.saved_step
    saver.save(3, tensors, {"step": 3})
    saver.close()
    return *failed, saver.saved_step


@pytest.mark.parametrize("mode", BACKGROUND)
def test_a_copy_that_fails_on_one_rank_is_a_failed_save_on_all(tmp_path, mode):
    for failures, message, before, after in run_ranks(fail_to_copy_on_one_rank, 2, tmp_path, mode):
        assert (failures, before, after) == (1, 1, 3)
        assert "rank 1: " in message and "could not be copied to host memory" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("mode", BACKGROUND)
def test_a_crash_during_the_copy_leaves_the_last_good_step(tmp_path, mode):
    pid = os.fork()
    if not pid:
        saver = CheckpointSaver(tmp_path, mode)
        saver.save(1, {"a": torch.ones(1000)}, {"step": 1})
        saver.wait()
        staged_copy._fill = lambda targets, sources: (targets[0][:500].copy_(sources[0][:500]), time.sleep(20))
        saver.save(2, {"a": torch.full((1000,), 2.0)}, {"step": 2})
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    tensors = {"a": torch.zeros(1000)}
    assert checkpoint.load_latest(tmp_path, tensors) == (1, {"step": 1}) and torch.equal(tensors["a"], torch.ones(1000))
    saver = CheckpointSaver(tmp_path, mode)  # the same command again
    saver.save(2, {"a": torch.full((1000,), 2.0)}, {"step": 2})
    saver.close()
    assert checkpoint.latest(tmp_path) == 2 and len(list(tmp_path.iterdir())) == 2
