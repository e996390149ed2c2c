"""Restarts: which ends the launcher starts again after, how often, and what the run folder counts."""

import json
import os
import signal

import pytest

from parallel.restarts import count_restart, forget_restarts
from tests.launches import start_launcher, wait_until
from utils import restart_notes
from utils.exit_codes import DIVERGED, HANG, NO_PROGRESS, Stopped
from utils.stop_note import TO_BE_CONTINUED

# Ranks that need no process group: each line of the plan says how a start goes.
SCRIPT = r"""
import json, os, signal, sys, time
from pathlib import Path
from utils import restart_notes, stop_note

folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, start = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
starts = len(list(folder.glob(f"rank-{rank}-*")))
(folder / f"rank-{rank}-{starts}").touch()
while not (folder / f"rank-{1 - int(rank)}-{starts}").exists():  # on a busy machine one would end the other unseen
    time.sleep(0.02)
for what in plan[min(starts, len(plan) - 1)].split():
    if what == "kill" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what in ("FIRST_STEP", "PROGRESS"):
        restart_notes.leave_note(getattr(restart_notes, what))
    elif what == "warned":
        signal.signal(signal.SIGUSR1, lambda *_: (stop_note.leave_note("SIGUSR1"), os._exit(0)))
        (folder / f"ready-{rank}").touch()
    elif what == "terminated":

        def save(*_):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / f"saving-{rank}").touch()
            time.sleep(1.5)
            stop_note.leave_note("SIGTERM")
            (folder / f"saved-{rank}").touch()
            os._exit(0)

        signal.signal(signal.SIGTERM, save)
        (folder / f"ready-{rank}").touch()
    elif what == "warned_early":
        (folder / f"ready-{rank}").touch()
        time.sleep(1)
        from utils.stop_signals import StopSignals

        stop = StopSignals(folder)
        while not stop.reason:
            time.sleep(0.1)
            stop.agree(stop.flags())
        stop.close()
        time.sleep(1.5)  # a further warning does no harm
    elif what.isdigit() and rank == "1":
        time.sleep(0.2)  # the note of rank 0 is there
        sys.exit(int(what))
    time.sleep(60) if what in ("warned", "terminated", "kill") or what.isdigit() else None
"""


def start(folder, plan, max_restarts):
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    arguments = [f"--max_restarts={max_restarts}", str(folder / "script.py"), str(folder), json.dumps(plan)]
    return start_launcher(arguments, folder / "printed")


@pytest.mark.parametrize(
    "plan, max_restarts, code, starts",
    [
        (["kill"], 2, NO_PROGRESS, 3),
        (["PROGRESS kill"] * 4 + [""], 2, 0, 5),  # more faults than --max_restarts, none of them in vain
        (["kill", str(HANG), ""], 2, 0, 3),
        ([str(DIVERGED)], 2, DIVERGED, 1),
        (["1"], 2, 1, 1),  # a fault in the script, which nobody wants to see three times
        (["FIRST_STEP 1", "1", ""], 2, 0, 3),
        (["kill"], 0, 128 + signal.SIGKILL, 1),
    ],
)
def test_what_the_launcher_starts_again(tmp_path, plan, max_restarts, code, starts):
    process = start(tmp_path / "run", plan, max_restarts)
    process.join(100)
    printed = (tmp_path / "run" / "printed").read_text()
    assert process.exitcode == code, printed
    assert len(list((tmp_path / "run").glob("rank-0-*"))) == starts
    assert "Traceback" not in printed and printed.count("starting all ranks again") == starts - 1
    assert "without a newer checkpoint" in printed or code != NO_PROGRESS


@pytest.mark.parametrize("when", ["warned", "warned_early"])  # early: no rank has a handler yet
def test_a_warning_reaches_the_ranks_and_their_note_comes_back(tmp_path, when):
    folder = tmp_path / "run"
    process = start(folder, [when], 0)
    wait_until(lambda: len(list(folder.glob("ready-*"))) == 2)
    os.kill(process.pid, signal.SIGUSR1)
    process.join(60)
    assert process.exitcode == TO_BE_CONTINUED, (folder / "printed").read_text()


def test_a_repeated_sigterm_leaves_the_ranks_the_time_to_save(tmp_path):
    folder = tmp_path / "run"
    process = start(folder, ["terminated"], 0)
    wait_until(lambda: len(list(folder.glob("ready-*"))) == 2)
    os.kill(process.pid, signal.SIGTERM)
    wait_until(lambda: len(list(folder.glob("saving-*"))) == 2)
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == TO_BE_CONTINUED, (folder / "printed").read_text()
    assert len(list(folder.glob("saved-*"))) == 2


# ---- The count in the run folder -------------------------------------------------------------------------------------


@pytest.fixture(params=["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def restart(request, tmp_path, monkeypatch):
    """Return a function that starts from a step, as restart number `number`; it returns whether that is progress."""
    monkeypatch.setenv(restart_notes.PROGRESS, str(tmp_path / "progress"))

    def start(number, step):
        monkeypatch.setenv(request.param, str(number))
        count_restart(tmp_path, step)
        made_progress = (tmp_path / "progress").exists()
        (tmp_path / "progress").unlink(missing_ok=True)
        return made_progress

    return start


def test_three_restarts_without_progress_and_no_more(tmp_path, restart):
    assert not restart(0, 0)
    assert [restart(n, 0) for n in (1, 2)] == [False, False]
    assert restart(3, 5)  # a newer checkpoint
    assert [restart(n, 5) for n in (4, 5, 6)] == [False] * 3
    for _ in range(2):  # and stays so until a person starts it
        with pytest.raises(Stopped) as stopped:
            restart(7, 5)
        assert stopped.value.code == NO_PROGRESS and "from step 5" in stopped.value.message
    assert not restart(0, 5)
    assert not restart(1, 5)


def test_what_goes_back_on_purpose_is_not_counted(tmp_path, restart):
    restart(0, 20)
    assert [restart(n, 20) for n in (1, 2, 3)] == [False] * 3
    forget_restarts(tmp_path)
    assert restart(4, 10)
    (tmp_path / "restarts.json").write_text("{")  # cut by a crash
    assert restart(5, 10)


def test_a_count_that_cannot_be_written_ends_no_run(tmp_path, restart, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    restart(0, 5)
    (tmp_path / "restarts.json").write_text('{"step": 5}')
    monkeypatch.setattr("parallel.restarts._write", full)
    restart(1, 5)
    assert "No space left" in caplog.text
