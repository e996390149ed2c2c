"""Stops: any number of signals is one request; ranks agree through sums; limits are kept in time."""

import json
import logging
import os
import signal
import time

import pytest

from tests.spawn import run_ranks
from utils import stop_note
from utils.stop_signals import LAUNCHED_AT, REASONS, StopSignals


@pytest.fixture(autouse=True)
def handlers():
    """Give the test runner its own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def asked(stop):
    return [reason for reason, flag in zip(REASONS, stop.flags(), strict=True) if flag]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_that_comes_often_is_one_request(tmp_path, name):
    stop = StopSignals(tmp_path)
    assert asked(stop) == [] and stop.signalled_at == 0
    for _ in range(3):
        os.kill(os.getpid(), getattr(signal, name))
    first = stop.signalled_at
    assert asked(stop) == [name] and 0 < first <= time.monotonic()
    assert stop.reason == ""  # asked for, not agreed
    stop.agree(stop.flags())
    assert stop.reason == name
    stop.agree([0.0] * len(REASONS))  # it stays
    assert stop.reason == name and stop.signalled_at == first


def test_the_stop_file_stops_this_start_and_not_the_next(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(stop_note.VARIABLE, str(tmp_path / "note"))
    (tmp_path / "STOP").touch()  # also if it came while the run was starting again
    stop = StopSignals(tmp_path)
    assert asked(stop) == ["the file STOP"]
    assert asked(StopSignals(tmp_path, is_main=False)) == []  # rank 0 looks for all
    stop.agree(stop.flags())
    assert (tmp_path / "STOP").exists()  # until the run has been saved
    stop.close()
    assert asked(StopSignals(tmp_path)) == [] and not (tmp_path / "STOP").exists()
    assert not (tmp_path / "note").exists()  # a scheduler takes the run for complete
    assert capsys.readouterr().out == "stopped: the file STOP; the same command goes on\n"


def test_what_did_not_come_from_a_person_is_to_be_continued(tmp_path, monkeypatch):
    monkeypatch.setenv(stop_note.VARIABLE, str(tmp_path / "note"))
    stop = StopSignals(tmp_path)
    os.kill(os.getpid(), signal.SIGUSR1)
    stop.agree(stop.flags())
    stop.close()
    assert (tmp_path / "note").read_text() == "SIGUSR1\n"


def test_a_run_that_ends_by_itself_leaves_no_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(stop_note.VARIABLE, str(tmp_path / "note"))
    stop = StopSignals(tmp_path)
    assert stop.agree([1.5, 2.5, *stop.flags()]) == [1.5, 2.5]
    stop.close()
    assert not (tmp_path / "note").exists() and capsys.readouterr().out == ""


def test_the_time_limit_leaves_time_for_a_save_and_counts_from_the_launch(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCHED_AT, str(time.monotonic() - 3500))
    stop = StopSignals(tmp_path, max_hours=1.0)
    assert asked(stop) == []  # 100 s are left
    stop.note_save(60)
    assert asked(stop) == ["--max_hours is over"]
    assert json.loads((tmp_path / "last_save.json").read_text()) == {"seconds": 60}
    assert asked(StopSignals(tmp_path, max_hours=1.0)) == ["--max_hours is over"]
    monkeypatch.delenv(LAUNCHED_AT)
    assert asked(StopSignals(tmp_path, max_hours=1.0)) == []


def test_a_save_that_will_not_fit_is_said_at_the_start(tmp_path, caplog, monkeypatch):
    logging.getLogger("train").propagate = True
    StopSignals(tmp_path).note_save(41)
    StopSignals(tmp_path, is_main=False)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    StopSignals(tmp_path)
    assert not caplog.messages
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    StopSignals(tmp_path)
    assert len(caplog.messages) == 1 and "41 s" in caplog.messages[0] and "30 s" in caplog.messages[0]


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "7", '"41"', "\0\0", '{"seconds": null}', '{"seconds": [41]}', '{"seconds": "x"}',
     '{"second": 41}', '{"seconds": NaN}', '{"seconds": 1e400}', '{"seconds": -41}', '{"seconds": 1%s}' % ("0" * 400),
     "[" * 100_000],
    ids=range(16),
)  # fmt: skip
def test_a_damaged_note_of_the_last_save_is_as_none(tmp_path, caplog, text):
    """As a crash or a power cut leaves it: the run starts, and neither stops at once nor warns of a long save."""
    logging.getLogger("train").propagate = True
    (tmp_path / "last_save.json").write_text(text)
    assert asked(StopSignals(tmp_path)) == asked(StopSignals(tmp_path, max_hours=1.0)) == []
    assert not caplog.messages


def test_a_negative_limit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--max_hours must not be negative"):
        StopSignals(tmp_path, max_hours=-1.0)


def agree(rank, world_size, folder):
    import torch

    from parallel.distributed import all_reduce_sum

    stop = StopSignals(folder, is_main=rank == 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    seen = []
    for _ in range(2):
        (total,) = stop.agree(all_reduce_sum([float(rank), *stop.flags()], torch.device("cpu")))
        seen.append((total, stop.reason))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
    return seen


def test_all_ranks_stop_at_the_same_step_for_the_same_reason(tmp_path):
    assert run_ranks(agree, 3, tmp_path) == [[(3.0, "SIGUSR1")] * 2] * 3


def test_a_stop_file_that_cannot_be_deleted_or_read(tmp_path, caplog, monkeypatch):
    logging.getLogger("train").propagate = True
    (tmp_path / "STOP").mkdir()
    stop = StopSignals(tmp_path)
    stop.agree(stop.flags())
    stop.close()  # everything is saved by now: no reason to fail
    assert stop.reason == "the file STOP" and "delete" in caplog.text and "stops at once" in caplog.text

    def stale(path, **_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "stat", stale)
    assert asked(StopSignals(tmp_path)) == []
