"""The watchdog: a hang ends the run in time, with stacks, collectives and a culprit; so does a rank that is lost."""

import json
import os
import time
from pathlib import Path
from signal import SIGKILL

import pytest

from parallel.hang_report import explain
from tests.faults.injected import injected
from tests.launches import start_launcher, wait_until
from tests.script_runs import run_script
from utils.exit_codes import ERROR, HANG, PEER_LOST
from utils.run_events import read_events, restart_reason

SCRIPT, HANG_S = "tests/faults/small_run.py", 0.5
STEP = 6  # not the first, whose deadline is longer


def run(folder, *flags, ranks=2):
    folder.mkdir(exist_ok=True)
    return run_script(SCRIPT, ["--run_folder", str(folder), "--hang_s", str(HANG_S), *flags], ranks, timeout_s=60)


def report_of(folder):
    (hang,) = (folder / "hangs").iterdir()
    assert hang.name.startswith(f"step-{STEP:08d}-")
    return hang, (hang / "report.txt").read_text()


def test_a_run_that_is_slow_but_steps_is_left_alone(tmp_path):
    code, printed = run(tmp_path, "--num_steps", "6", "--step_s", "0.3", ranks=3)
    assert code == 0 and printed.count("sum 3") == 6, printed
    assert not (tmp_path / "hangs").exists()


@pytest.mark.parametrize(
    "what, culprit",
    [("hang", "culprit: rank 1, behind the others, in 'forward'"), ("stop", "culprit: rank 1, stopped or dead")],
)
def test_a_hang_ends_in_time_with_stacks_and_culprit(tmp_path, monkeypatch, what, culprit):
    faults = injected(monkeypatch, tmp_path, f"{what}@rank=1,step={STEP},phase=forward")
    code, printed = run(tmp_path)
    waited = time.monotonic() - faults.happened_at()
    assert code in (HANG, 128 + SIGKILL) and waited < HANG_S + 5, (waited, printed)  # it kills who stands still
    hang, report = report_of(tmp_path)
    assert culprit in report and report in printed.replace("hang: ", "") and f"step {STEP}" in report
    assert "rank 0: step 6, backward for" in report and "(--hang_s)" in report
    assert [(event["event"], event["step"], event["reason"]) for event in read_events(tmp_path)] == [
        ("stop", STEP, "hang")
    ]
    answered = {"hang": (0, 1), "stop": (0,)}[what]  # a process that stands still writes nothing
    for rank in answered:
        stacks = (hang / f"rank-{rank}.stacks.txt").read_text()
        assert "small_run.py" in stacks and ("all_reduce" if rank == 0 else "fault_injection.py") in stacks
        recorded = json.loads((hang / f"rank-{rank}.collectives.json").read_text())
        last = max(recorded["entries"], key=lambda entry: entry["record_id"])
        assert "all_reduce" in last["profiling_name"] and last["state"] != "completed" or rank == 1


def test_a_run_of_one_process_can_hang(tmp_path, monkeypatch):
    injected(monkeypatch, tmp_path, f"hang@rank=0,step={STEP},phase=backward")
    code, _ = run(tmp_path, ranks=1)
    assert code == HANG and "no culprit can be told" in report_of(tmp_path)[1]


def test_a_rank_whose_threads_all_stand_still(tmp_path):
    """A library that keeps the interpreter's lock for ever: the other rank names it, and it ends without the lock."""
    code, printed = run(tmp_path, "--hold_at", str(STEP))
    assert code in (HANG, 128 + SIGKILL) and "culprit: rank 1, stopped or dead" in report_of(tmp_path)[1], printed
    started = time.monotonic()
    code, printed = run(tmp_path / "alone", "--hold_at", str(STEP), "--hold_rank", "0", ranks=1)
    assert code == ERROR and "Timeout" in printed and "small_run.py" in printed and time.monotonic() - started < 30


def test_the_first_step_may_take_longer(tmp_path, monkeypatch):
    injected(monkeypatch, tmp_path, "slow=2@rank=1,step=0,phase=forward")
    assert run(tmp_path)[0] == 0


def test_a_lost_rank_ends_the_others(tmp_path, monkeypatch):
    faults = injected(monkeypatch, tmp_path, f"kill@rank=1,step={STEP},phase=backward")
    code, printed = run(tmp_path, ranks=3)
    assert code == 128 + 9 and time.monotonic() - faults.happened_at() < 2, printed


# ---- The watchdog's own faults ---------------------------------------------------------------------------------------

BROKEN = """
import runpy
import parallel.watchdog as watchdog
def broken(*_, **__):
    raise {error}
{patch}
runpy.run_path("tests/faults/small_run.py", run_name="__main__")
"""


def run_broken(folder, patch, *flags, error='RuntimeError("broken")', hang_s=HANG_S, ranks=1, timeout_s=60):
    """Run with a part of the watchdog that raises; returns the exit code, what was printed, and the seconds it took."""
    folder.mkdir(exist_ok=True)
    (folder / "broken.py").write_text(BROKEN.format(patch=patch, error=error))
    flags, started = ["--run_folder", str(folder), "--hang_s", str(hang_s), *flags], time.monotonic()
    code, printed = run_script(str(folder / "broken.py"), flags, ranks, timeout_s)
    return code, printed, time.monotonic() - started


def test_a_flight_recorder_that_fails_costs_its_own_file_only(tmp_path, monkeypatch):
    injected(monkeypatch, tmp_path, f"hang@rank=1,step={STEP},phase=forward")
    code, printed, _ = run_broken(
        tmp_path, "watchdog._DUMPS = {'': '_broken'}; watchdog.c10d._broken = broken", ranks=2
    )
    hang, report = report_of(tmp_path)
    assert code == HANG and "culprit: rank 1, behind the others" in report and "collectives: broken" in printed, printed
    assert (hang / "rank-1.stacks.txt").exists() and not (hang / "rank-0.collectives.json").exists()
    monkeypatch.undo()  # nor is a run that is well ended by it, as if the store were gone
    assert run_broken(tmp_path / "well", "watchdog._DUMPS = {'': '_broken'}; watchdog.c10d._broken = broken")[0] == 0


@pytest.mark.parametrize("part", ["_statuses", "_lost_peers"])
def test_a_store_that_is_lost_while_a_peer_is_looked_for_ends_the_rank(tmp_path, monkeypatch, part):
    place = f"step={STEP},phase=forward"
    injected(monkeypatch, tmp_path, f"term@rank=0,{place}; hang@rank=0,{place}")
    code, printed, _ = run_broken(tmp_path, f"watchdog.Watchdog.{part} = broken", hang_s=60, timeout_s=30)
    assert code == PEER_LOST and "the process group's store is gone (broken)" in printed, printed


def test_a_store_that_is_lost_in_an_alarm_leaves_this_ranks_stacks(tmp_path, monkeypatch):
    injected(monkeypatch, tmp_path, f"hang@rank=0,step={STEP},phase=forward")
    code, printed, _ = run_broken(tmp_path, "watchdog.Watchdog._statuses = broken")
    hang, report = report_of(tmp_path)
    assert code == HANG and "no culprit can be told: the process group's store does not answer" in report, printed
    assert "small_run.py" in (hang / "rank-0.stacks.txt").read_text()


def test_an_error_that_nobody_thought_of_ends_neither_the_watch_nor_a_run_that_is_well(tmp_path, monkeypatch):
    # Five seconds more than the deadline: what the thread had armed would end the run if the thread were gone.
    flags = "--num_steps", "120", "--step_s", "0.05"
    patch = "watchdog.Watchdog._read = broken"
    code, printed, seconds = run_broken(tmp_path / "well", patch, *flags, error='KeyError("alarm")')
    assert code == 0 and seconds > HANG_S + 5 and printed.count("the watchdog fails and goes on: KeyError") == 1, (
        printed
    )
    injected(monkeypatch, tmp_path / "hangs", f"hang@rank=0,step={STEP},phase=forward")
    code, printed, seconds = run_broken(tmp_path / "hangs", patch, *flags, error='KeyError("alarm")', timeout_s=40)
    assert code == ERROR and "Timeout" in printed and "small_run.py" in printed, printed


def test_a_hang_before_the_first_step_is_the_reason_of_the_next_start(tmp_path):
    patch = "import time; watchdog.PhaseTimer.begin_step = lambda self, step: time.sleep(60)"
    code, printed, _ = run_broken(tmp_path, patch, hang_s=0.2)
    assert code == HANG and "in phase 'start'" in printed and restart_reason(read_events(tmp_path)) == "hang", printed


# ---- Under a launcher ------------------------------------------------------------------------------------------------


def steps_of(folder):
    return (folder / "printed").read_text().count("sum 2") if (folder / "printed").exists() else 0


def test_a_rank_that_cannot_step_leaves_when_told_to_stop(tmp_path, monkeypatch):
    """Without it the launcher would wait for its 30 s: rank 0 waits for ever, as in a collective of NCCL."""
    place = f"step={STEP},phase=forward"
    injected(monkeypatch, tmp_path, f"hang@rank=0,{place}; slow=1@rank=1,{place}; kill@rank=1,{place}")  # in this order
    arguments = ["--max_restarts=1", SCRIPT, "--run_folder", str(tmp_path), "--hang_s", "60", "--num_steps", "10"]
    process = start_launcher(arguments, tmp_path / "printed")
    wait_until(lambda: (tmp_path / "printed").exists() and "starting all" in (tmp_path / "printed").read_text())
    wait_until(lambda: steps_of(tmp_path) > STEP)
    process.join(60)
    printed = (tmp_path / "printed").read_text()
    assert process.exitcode == 0 and "rank 0: rank 1 died" in printed, printed


def test_ranks_do_not_outlive_their_launcher(tmp_path):
    arguments = [SCRIPT, "--run_folder", str(tmp_path), "--hang_s", "60", "--num_steps", "100000"]
    process = start_launcher(arguments, tmp_path / "printed")
    wait_until(lambda: steps_of(tmp_path) > 2)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(ranks) == 2
    os.kill(process.pid, SIGKILL)
    process.join()
    wait_until(lambda: not any(Path(f"/proc/{rank}/cmdline").exists() for rank in ranks), timeout_s=3)


# ---- Reports ---------------------------------------------------------------------------------------------------------


def status(step, number, phase="forward", begun=10):
    return {"step": step, "number": number, "phase": phase, "waited_s": 1.0, "enqueued": {"gloo 0": begun, "gloo 1": 0}}


@pytest.mark.parametrize(
    "statuses, silent, first",
    [
        ([status(5, 3), status(5, 1, "data_wait"), status(5, 3)], [], "rank 1, behind the others, in 'data_wait'"),
        ([status(4, 9), status(5, 0), status(4, 9)], [], "rank 0, 2, behind the others, in 'forward'"),
        ([status(5, 3, begun=12), status(5, 3, begun=11)], [], "rank 1, has begun fewer collectives than the others"),
        ([status(5, 3), status(5, 4)], [1], "rank 1, stopped or dead"),
    ],
)
def test_the_culprit_is_who_the_others_wait_for(statuses, silent, first):
    lines = explain(dict(enumerate(statuses)), silent).splitlines()
    assert lines[0] == f"culprit: {first}" and len(lines) == 1 + len(statuses)
    assert [rank for rank in range(len(statuses)) if "does not answer" in lines[1 + rank]] == silent


def test_where_all_are_alike_nobody_is_accused():
    assert explain({0: status(5, 3), 1: status(5, 3)}, []).startswith(
        "no culprit can be told: all ranks are at the same"
    )
