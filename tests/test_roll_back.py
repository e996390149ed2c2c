"""Roll-backs: to the last checkpoint before it went wrong, with what came after it gone and its data left out."""

import json

import pytest
import torch

from parallel import checkpoint
from parallel.roll_back import roll_back, skipped_stretches
from tests.spawn import run_ranks
from utils.exit_codes import DIVERGED, ROLLED_BACK, Stopped


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of steps 10, 20 and 30."""
    for step in (10, 20, 30):
        checkpoint.save(tmp_path / "checkpoints", step, {"x": torch.full((4,), float(step))}, {"step": step})
    return tmp_path


def go_back(run, step, bad_since, margin=0, position=lambda step: step, most=3):
    with pytest.raises(Stopped) as stopped:
        roll_back(run, run / "checkpoints", step, bad_since, "it went wrong", position, margin, most)
    return stopped.value


def steps_of(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "step, bad_since, margin, left, stretch",
    [
        (38, 31, 0, [10, 20, 30], (31, 8)),
        (38, 31, 5, [10, 20, 30], (30, 9)),  # what the checkpoint has seen stays
        (29, 25, 3, [10, 20], (22, 8)),
        (30, 20, 0, [10, 20], (20, 11)),
    ],
)
def test_where_it_goes_on_and_without_what(run, step, bad_since, margin, left, stretch):
    stopped = go_back(run, step, bad_since, margin)
    assert stopped.code == ROLLED_BACK and "it went wrong" in stopped.message and "roll-back 1 of 3" in stopped.message
    assert steps_of(run) == left and checkpoint.latest(run / "checkpoints") == left[-1]
    assert skipped_stretches(run) == [stretch]
    assert json.loads((run / "restarts.json").read_text())["count"] == 0


def test_a_damaged_checkpoint_is_not_gone_back_to(run):
    file = next(path for path in (run / "checkpoints/step-00000020").iterdir() if path.stat().st_size >= 16)
    file.write_bytes(b"x" + file.read_bytes()[1:])
    go_back(run, 29, 25)
    assert checkpoint.latest(run / "checkpoints") == 10 and skipped_stretches(run) == [(25, 5)]


def test_positions_count_what_was_left_out_before_and_there_is_an_end(run):
    assert skipped_stretches(run) == []
    go_back(run, 35, 33)
    go_back(run, 38, 36, position=lambda step: step + 3)
    assert skipped_stretches(run) == [(33, 3), (39, 3)]
    before = steps_of(run), (run / "rollbacks.json").read_text()
    stopped = go_back(run, 40, 39, most=2)
    assert stopped.code == DIVERGED and "after 2 roll-backs" in stopped.message
    assert (steps_of(run), (run / "rollbacks.json").read_text()) == before


def test_a_run_without_a_checkpoint_begins_anew(tmp_path):
    go_back(tmp_path, 12, 5)
    assert skipped_stretches(tmp_path) == [(5, 8)]
    assert json.loads((tmp_path / "rollbacks.json").read_text())[0]["resume_from"] == 0


def test_one_who_dies_before_it_is_written_goes_back_again(run, monkeypatch):
    """Never the other way: a decision on disk beside a checkpoint that knows nothing of it."""
    seen = []

    def die(*_):
        seen.append((steps_of(run), (run / "rollbacks.json").exists()))
        raise OSError("died")

    monkeypatch.setattr("pathlib.Path.replace", die)
    with pytest.raises(OSError, match="died"):
        roll_back(run, run / "checkpoints", 38, 25, "it went wrong", lambda step: step, 0, 3)
    assert seen == [([10, 20], False)]
    monkeypatch.undo()
    go_back(run, 38, 25)
    assert (steps_of(run), skipped_stretches(run)) == ([10, 20], [(25, 14)])


def test_checkpoints_that_cannot_be_read_now_stay(run, monkeypatch):
    def unread(*_):
        raise OSError("the store does not answer")

    monkeypatch.setattr("parallel.checkpoint_retention.read_file", unread)
    with pytest.raises(OSError, match="can be gone back to.*does not answer"):
        roll_back(run, run / "checkpoints", 38, 31, "it went wrong", lambda step: step, 0, 3)
    assert steps_of(run) == [10, 20, 30] and not (run / "rollbacks.json").exists()


@pytest.mark.parametrize("content", ["", "[{", "{}]", '[{"step": 1}]', "[1]"])
def test_a_damaged_record_is_named_and_no_data_comes_back_unasked(run, content):
    (run / "rollbacks.json").write_text(content)
    with pytest.raises(ValueError, match="rollbacks.json says which data this run leaves out"):
        skipped_stretches(run)


def stretches_of_ranks(rank, num_ranks, folder):
    return skipped_stretches(folder / f"node-{rank}")


def test_ranks_without_the_run_folder_leave_the_same_data_out(tmp_path):
    (tmp_path / "node-0").mkdir()
    (tmp_path / "node-0/rollbacks.json").write_text('[{"first_batch": 3, "num_batches": 4}]')
    assert run_ranks(stretches_of_ranks, 2, tmp_path) == [[(3, 4)], [(3, 4)]]
