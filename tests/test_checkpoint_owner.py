"""Two runs never share a folder of checkpoints, two starts of one run never both save, and every restart goes on."""

import json
import shutil

import pytest
import torch

from parallel import checkpoint, checkpoint_owner
from parallel.checkpoint_owner import OWNER, claim
from parallel.checkpoint_resume import resume
from parallel.checkpoint_saver import CheckpointSaver
from parallel.checkpoint_storage import open_storage
from parallel.commit_record import parse_record
from tests.spawn import run_ranks
from tests.test_checkpoint_storage import s3  # noqa: F401
from utils.exit_codes import USER_ERROR, Stopped


def start(run_folder, checkpoints, value: float = 1.0) -> tuple[CheckpointSaver, dict, int]:
    """Start a run, or go on with it, as the scripts do; returns the step as well."""
    saver, tensors = CheckpointSaver(checkpoints), {"model.a": torch.full((3,), value)}
    step, _ = resume(saver, tensors, {}, "model", run_folder=run_folder)
    return saver, tensors, step


@pytest.fixture(params=["local", "s3"])
def checkpoints(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("s3")
        return "s3://bucket/shared"
    return tmp_path / "shared"


def test_another_run_is_refused_and_changes_nothing(checkpoints, tmp_path):
    saver, tensors, _ = start(tmp_path / "one", checkpoints)
    saver.save(3, tensors, {"step": 3})
    owner = checkpoint_owner._read(open_storage(checkpoints))
    other, tensors = CheckpointSaver(checkpoints), {"model.a": torch.zeros(3)}
    with pytest.raises(
        ValueError, match=rf"another run, {tmp_path}/one on .*this one, {tmp_path}/two, a --checkpoint_"
    ):
        resume(other, tensors, {}, "model", run_folder=tmp_path / "two")
    assert not tensors["model.a"].any() and checkpoint_owner._read(open_storage(checkpoints)) == owner
    assert not (tmp_path / "two").exists()
    saver.save(4, {"model.a": torch.ones(3)}, {"step": 4})  # the first goes on
    assert checkpoint.latest(checkpoints) == 4


def test_every_start_of_the_same_run_goes_on(checkpoints, tmp_path):
    saver, tensors, _ = start(tmp_path / "run", checkpoints, 2.0)
    saver.save(1, tensors, {"step": 1})
    run = checkpoint_owner._read(open_storage(checkpoints)).run
    for place, lost in (("run", False), ("run", True), ("moved", False)):
        if lost:  # another host, with a disk of its own
            shutil.rmtree(tmp_path / "run")
        elif place == "moved":  # with what is in it
            (tmp_path / "run").rename(tmp_path / "moved")
        saver, tensors, step = start(tmp_path / place, checkpoints)
        assert step >= 1 and tensors["model.a"].tolist() == [2.0] * 3
        saver.save(step + 1, tensors, {"step": step + 1})
        assert saver.saved_step == step + 1
    owner = checkpoint_owner._read(open_storage(checkpoints))
    assert (owner.run, owner.run_folder) == (run, str(tmp_path / "moved"))


def test_an_earlier_start_that_still_lives_saves_no_more(tmp_path):
    first, tensors, _ = start(tmp_path / "run", tmp_path / "shared")
    first.save(1, tensors, {"step": 1})
    second, tensors, step = start(tmp_path / "run", tmp_path / "shared")
    with pytest.raises(Stopped, match=str(USER_ERROR)) as stopped:
        first.save(2, tensors, {"step": 2})
    assert "has been taken over by a later start" in stopped.value.message
    second.save(2, tensors, {"step": 2})
    record = parse_record((tmp_path / "shared/step-00000002/commit.json").read_bytes())
    assert record["run"] == (tmp_path / "run/run_id").read_text().strip()


def test_folders_of_before_and_damaged_or_deleted_owners_are_no_obstacle(tmp_path):
    checkpoint.save(tmp_path / "shared", 5, {"model.a": torch.full((3,), 7.0)}, {"step": 5})
    file = tmp_path / "shared" / OWNER
    for damage in (None, "", "[]", '{"run": 1}', json.dumps({"run": "a", "more": 1})):
        if damage is not None:
            file.write_text(damage)
        saver, tensors, step = start(tmp_path / "run", tmp_path / "shared")
        assert step == 5 and tensors["model.a"].tolist() == [7.0] * 3
    file.unlink()
    saver.save(6, tensors, {"step": 6})
    file.mkdir()  # it can be neither read nor written
    saver.save(7, tensors, {"step": 7})
    assert saver.saved_step == 7 and saver.num_failures == 0
    with pytest.raises(ValueError, match="cannot be used for checkpoints"):
        claim(open_storage(tmp_path / "shared"), tmp_path / "run")


def claim_on_two_ranks(rank, num_ranks, folder):
    claim(open_storage(folder / "shared"), folder / "one")
    with pytest.raises(ValueError, match="holds the checkpoints of another run"):
        claim(open_storage(folder / "shared"), folder / "two")
    (folder / "file").touch()
    assert claim(open_storage(folder / "file"), folder / "one") is None  # it cannot be written: a warning
    first, tensors = CheckpointSaver(folder / "shared"), {f"rank{rank}.a": torch.ones(2)}
    first.claim(folder / "one")
    CheckpointSaver(folder / "shared").claim(folder / "one")
    with pytest.raises(Stopped):
        first.save(1, tensors, {})
    return True


def test_all_ranks_hear_of_it(tmp_path):
    assert run_ranks(claim_on_two_ranks, 2, tmp_path) == [True, True]


def test_an_empty_run_id_is_none(tmp_path):
    """As a full disk or a power cut leaves it: the run is to go on, and its next start as well."""
    (tmp_path / "run").mkdir()
    for _ in range(3):
        saver, tensors, step = start(tmp_path / "run", tmp_path / "shared")
        saver.save(step + 1, tensors, {"step": step + 1})
        if not step:
            (tmp_path / "run/run_id").write_text("")
    assert json.loads((tmp_path / "shared" / OWNER).read_text())["run"] == (tmp_path / "run/run_id").read_text().strip()
