"""Saving in the background: what is saved is what was there at the call, and no failure is lost."""

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from parallel import checkpoint
from parallel.checkpoint_retention import Retention, make_room
from parallel.checkpoint_saver import MODES, CheckpointSaver
from parallel.checkpoint_storage import LocalStorage
from parallel.commit_record import parse_record
from tests.spawn import run_ranks
from utils.config import run_main
from utils.exit_codes import USER_ERROR
from utils.state_changes import before_change

BACKGROUND = MODES[1:]


def tensors_of(step: float) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.arange(12.0).view(3, 4) + step,
        "model.b": torch.full((5,), step).bfloat16(),
        "model.t": (torch.arange(6.0).view(2, 3) + step).T,  # not contiguous
        "step": torch.tensor(step),
    }


def save(saver: CheckpointSaver, step: int) -> None:
    """Save, and change the tensors as soon as that may be, as the next training step does."""
    tensors = tensors_of(float(step))
    saver.save(step, tensors, {"step": step})
    before_change()
    for tensor in tensors.values():
        tensor.fill_(-1)


def assert_loads(folder, step: int) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0.0).items()}
    assert checkpoint.load(folder, step, tensors) == {"step": step}
    assert all(torch.equal(tensors[name], expected) for name, expected in tensors_of(float(step)).items())


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir())


# ---- What is saved --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_save_holds_what_was_there_at_the_call(tmp_path, mode):
    saver = CheckpointSaver(tmp_path, mode, keep_last=3, about={"config": {"lr": 1.0}})
    for step in (1, 2, 3, 4):
        save(saver, step)
    saver.save(4, tensors_of(9.0), {"step": 9})  # a published step is never modified
    saver.close()
    assert steps_in(tmp_path) == [2, 3, 4] and saver.saved_step == 4 and saver.num_failures == 0
    for step in (2, 3, 4):
        assert_loads(tmp_path, step)
    record = parse_record((tmp_path / "step-00000004/commit.json").read_bytes())
    assert record["about"] == {"config": {"lr": 1.0}} and record["versions"]["torch"] == torch.__version__


def save_on_two_ranks(rank, num_ranks, folder, mode):
    saver = CheckpointSaver(folder, mode)
    own = {f"rank{rank}.seed": torch.tensor([rank, 7])} | tensors_of(1.0)
    saver.save(1, own, {"step": 1}, rank_state={"seed": rank})
    with pytest.raises(ValueError, match="the state differs between ranks"):
        saver.save(2, own, {"step": rank})
    own["new"] = torch.ones(3)  # another layout
    saver.save(3, own, {"step": 3})
    if mode == "process" and rank == 1:  # in the middle of a save or after it
        os.kill(saver._writer.pid, signal.SIGKILL) if saver._writer.pid else None
    saver.save(4, own, {"step": 4})
    saver.close()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    step, state = checkpoint.load_latest(folder, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in own.items())
    return step, state, saver.num_failures


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_agree(tmp_path, mode):
    assert run_ranks(save_on_two_ranks, 2, tmp_path, mode) == [(4, {"step": 4}, 0)] * 2
    record = parse_record((tmp_path / "step-00000003/commit.json").read_bytes())
    assert record["num_ranks"] == 2 and len([name for name in record["files"] if name.startswith("rank")]) == 2


def test_state_of_one_rank_is_under_its_number(tmp_path):
    saver = CheckpointSaver(tmp_path)
    saver.save(1, tensors_of(1.0), {"step": 1}, rank_state={"seed": 5})
    assert checkpoint.load(tmp_path, 1, tensors_of(0.0)) == {"step": 1, "ranks": {"0": {"seed": 5}}}


def resident_over_saves(rank, num_ranks, folder, mode):
    saver, process = CheckpointSaver(folder, mode, keep_last=1), psutil.Process()
    tensors, used = {f"rank{rank}.a": torch.zeros(2_000_000)}, []
    for step in range(100):
        saver.save(step + 1, tensors, {})
        saver.wait()
        used.append(sum(p.memory_info().rss for p in (process, *process.children(recursive=True))))
    saver.close()
    return used


@pytest.mark.parametrize("mode", BACKGROUND)
def test_memory_stays_flat(tmp_path, mode):
    """The resident memory of two ranks, each with its writer, over 100 saves of 16 MB, once the first ten are done."""
    for used in run_ranks(resident_over_saves, 2, tmp_path, mode):
        assert max(used[10:]) <= 1.02 * used[10] and min(used[10:]) >= 0.98 * used[10], (used[10], used)


@pytest.mark.parametrize("mode", BACKGROUND)
def test_training_goes_on_while_the_disk_is_slow(tmp_path, mode, monkeypatch):
    release, begin = threading.Event(), LocalStorage.begin
    monkeypatch.setattr(LocalStorage, "begin", lambda self, name: (release.wait(20), begin(self, name)))
    saver = CheckpointSaver(tmp_path, mode)
    save(saver, 1)
    assert saver.is_saving and checkpoint.latest(tmp_path) is None
    release.set()
    saver.close()
    assert_loads(tmp_path, 1)


# ---- What fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stuck_writer_is_started_again_and_the_save_repeated(tmp_path, how, caplog):
    saver = CheckpointSaver(tmp_path, "process", timeout_s=3.0)
    save(saver, 1)
    saver.wait()
    first = saver._writer.pid
    os.kill(first, how)
    save(saver, 2)
    saver.close()
    assert saver.num_failures == 0 and "it is started again" in caplog.text
    assert ("died" if how == signal.SIGKILL else "gave no answer within 3 s") in caplog.text
    assert not psutil.pid_exists(first)
    assert_loads(tmp_path, 2)


def test_a_writer_that_always_dies_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sys.executable", "/bin/false")
    saver = CheckpointSaver(tmp_path, "process", max_failures=2)
    save(saver, 1)
    save(saver, 2)
    with pytest.raises(ValueError, match="2 saves in a row have failed.*the writer process died with exit code 1"):
        saver.wait()
    assert "save 1 in a row failed, 1 in all; training goes on" in caplog.text
    assert saver.saved_step is None and checkpoint.latest(tmp_path) is None


def test_the_writer_ends_with_its_process(tmp_path):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        saver = CheckpointSaver(tmp_path, "process")
        save(saver, 1)
        saver.wait()
        os.write(writer, str(saver._writer.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    of_writer = int(os.read(reader, 100))
    deadline = time.monotonic() + 10
    while psutil.pid_exists(of_writer) and psutil.Process(of_writer).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the writer lives on"
        time.sleep(0.01)


@pytest.mark.parametrize("mode", MODES)
def test_failures_are_counted_and_raised_after_some_in_a_row(tmp_path, mode, monkeypatch, caplog):
    saver = CheckpointSaver(tmp_path, mode, max_failures=2)
    save(saver, 1)
    saver.wait()
    publish = LocalStorage.publish

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStorage, "publish", fail)
    save(saver, 2)
    saver.wait()
    assert saver.num_failures == 1 and "No space left" in caplog.text and saver.saved_step == 1
    monkeypatch.setattr(LocalStorage, "publish", publish)
    save(saver, 3)  # one success, and the count in a row starts anew
    saver.wait()
    monkeypatch.setattr(LocalStorage, "publish", fail)
    with pytest.raises(ValueError, match="2 saves in a row have failed; the newest checkpoint is that of step 3"):
        save(saver, 4)
        save(saver, 5)
        saver.wait()
    assert saver.num_failures == 3 and steps_in(tmp_path) == [1, 3]


@pytest.mark.parametrize("mode", MODES)
def test_a_last_save_that_fails_is_an_error(tmp_path, mode, monkeypatch):
    monkeypatch.setattr(LocalStorage, "begin", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    saver = CheckpointSaver(tmp_path, mode)
    save(saver, 1)
    with pytest.raises(ValueError, match="Read-only file system"):
        saver.close()


def test_settings_that_make_no_sense(tmp_path):
    with pytest.raises(ValueError, match="--checkpoint_async must be one of none, thread, process, got 'fork'"):
        CheckpointSaver(tmp_path, "fork")
    with pytest.raises(ValueError, match="--keep_checkpoints must be at least 1"):
        CheckpointSaver(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="a local path or to s3://, got gs://x"):
        CheckpointSaver("gs://x/y")
    with pytest.raises(ValueError, match="must be a str, not a Path"):
        CheckpointSaver(Path("s3://x/y"))


def test_an_error_of_all_ranks_lets_a_save_be_published(tmp_path):
    pid = os.fork()
    if not pid:

        def main(config: None) -> None:
            begin = LocalStorage.begin
            LocalStorage.begin = lambda self, name: (time.sleep(0.5), begin(self, name))
            save(CheckpointSaver(tmp_path, "thread"), 1)
            raise ValueError("the loss is not finite")

        run_main(main, None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == USER_ERROR
    assert_loads(tmp_path, 1)


# ---- Ranks stay together ------------------------------------------------------------------------------------------


def save_with_a_folder_that_rank_0_cannot_list(rank, num_ranks, folder, mode):
    saver = CheckpointSaver(folder, mode, timeout_s=20)
    saver.prepare(tensors_of(1.0))
    if rank == 0:
        saver.storage.names = lambda: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    started = time.monotonic()
    saver.save(1, tensors_of(1.0), {"step": 1})
    saver.wait()
    if rank == 0:
        del saver.storage.names
    saver.save(2, tensors_of(2.0), {"step": 2})
    saver.close()
    return saver.num_failures, saver.saved_step, time.monotonic() - started < 10


@pytest.mark.parametrize("mode", MODES[:2])
def test_what_rank_0_alone_cannot_do_fails_the_save_on_all(tmp_path, mode):
    assert run_ranks(save_with_a_folder_that_rank_0_cannot_list, 2, tmp_path, mode) == [(1, 2, True)] * 2


def prepare_without_room_on_one_host(rank, num_ranks, folder):
    saver, tensors = CheckpointSaver(folder, "thread"), {f"rank{rank}.a": torch.zeros(2**20)}
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(ValueError, match="rank 1: .*no room for 0.00 GiB of host memory.*--checkpoint_async none"):
        saver.prepare(tensors)
    return True


def test_no_room_for_the_copy_on_one_rank_is_an_error_on_all(tmp_path):
    assert run_ranks(prepare_without_room_on_one_host, 2, tmp_path) == [True, True]


def test_a_loss_may_be_noted_during_a_save(tmp_path, monkeypatch):
    saver, release, make_ready = CheckpointSaver(tmp_path, "thread", keep_best=1), threading.Event(), LocalStorage.room
    monkeypatch.setattr(LocalStorage, "room", lambda self: (release.wait(20), make_ready(self))[1])
    save(saver, 1)
    for step in range(1000):
        saver.note_loss(step, 1.0 + step)
    release.set()
    saver.close()
    assert saver.num_failures == 0 and steps_in(tmp_path) == [1]


# ---- What stays -----------------------------------------------------------------------------------------------------


def test_what_is_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 1.5, 6: 9.0}
    for restart in range(2):  # the losses are in the records
        saver = CheckpointSaver(tmp_path, keep_last=2, keep_every=4, keep_best=2)
        for step in range(5 * restart, 6 + 5 * restart):
            if step > 5 * restart:
                save(saver, step)
            saver.note_loss(step, losses.get(step, 10.0))  # after the save, and again by the run that resumes there
        saver.close()
    assert steps_in(tmp_path) == [2, 4, 5, 8, 9, 10]  # 2 and 5 the best, 4 and 8 for ever, 9 and 10 the last


def test_only_verified_steps_make_others_unnecessary(tmp_path):
    saver = CheckpointSaver(tmp_path, keep_last=2)
    for step in (1, 2):
        save(saver, step)
    data = tmp_path / "step-00000002/rank-00000-00000.bin"
    data.write_bytes(bytes(data.stat().st_size))  # same size: only its checksum tells
    from parallel import checkpoint_retention

    checkpoint_retention._verified.clear()  # as after a restart
    save(saver, 3)
    assert steps_in(tmp_path) == [1, 2, 3]
    save(saver, 4)
    assert steps_in(tmp_path) == [3, 4]


class Small(LocalStorage):
    """A disk of limited size."""

    size = 0

    def room(self):
        used = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        return self.size - used, 10**6


def test_a_full_disk_loses_the_oldest_unneeded_one_first_and_never_the_last_good_one(tmp_path, caplog):
    saver = CheckpointSaver(tmp_path, keep_last=2)
    for step in (1, 2):
        save(saver, step)
    one = sum(file.stat().st_size for file in (tmp_path / "step-00000001").iterdir())
    storage, rule = Small(tmp_path), Retention(keep_last=2)
    storage.size = 3 * one + 2**20 + 100
    make_room(storage, rule, {}, one, 3)
    assert steps_in(tmp_path) == [1, 2] and not caplog.text
    storage.size = 2 * one + 2**20 + 100
    make_room(storage, rule, {}, one, 3)
    assert steps_in(tmp_path) == [2]
    assert re.search(r"has room for .* GiB .*needs .*Deleted for it: step-00000001\.$", caplog.text, re.MULTILINE)
    caplog.clear()
    storage.size = one
    make_room(storage, Retention(keep_last=1), {}, one, 3)
    assert steps_in(tmp_path) == [2] and "nothing, all are needed" in caplog.text and "probably fail" in caplog.text
    make_room(storage, Retention(keep_last=2, keep_every=1), {}, one, 3)  # for ever is for ever
    assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize("mode", BACKGROUND)
def test_the_state_is_taken_at_the_call(tmp_path, mode, monkeypatch):
    """As `--reweight` changes the order's lists right after the save of the same step has begun."""
    saver, tensors, state = CheckpointSaver(tmp_path, mode), tensors_of(1.0), {"data": {"offsets": [1, 2]}}
    make_ready, go_on = saver._make_ready, threading.Event()
    monkeypatch.setattr(saver, "_make_ready", lambda step: (go_on.wait(20), make_ready(step))[1])
    saver.save(1, tensors, state)
    state["data"]["offsets"][0] = 9
    go_on.set()
    saver.close()
    assert checkpoint.load(tmp_path, 1, tensors) == {"data": {"offsets": [1, 2]}}


def test_what_only_looks_like_a_checkpoint_or_lies_elsewhere_is_left_alone(tmp_path):
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    checkpoint.save(archive, 1, tensors_of(1.0), {"step": 1})
    folder.mkdir()
    (folder / "step-00000001").symlink_to(archive / "step-00000001")
    for name in ("step-5", "step-²", "step-٣", "step-0000000x"):
        (folder / name).mkdir()
    saver = CheckpointSaver(folder, keep_last=1)
    for step in (2, 3):
        save(saver, step)
    saver.close()
    left = sorted(path.name for path in folder.iterdir())
    assert left == sorted(["step-00000003", "step-5", "step-²", "step-٣", "step-0000000x"])
    assert_loads(archive, 1)
