"""Injected faults: each does what it says, in its rank at its phase, once over restarts, and nothing unasked."""

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.spawn import fork_server
from utils.fault_injection import FOLDER_VARIABLE, VARIABLE, Fault, parse_faults
from utils.phase_timer import PhaseTimer

CPU = torch.device("cpu")


@pytest.fixture
def timer_with(tmp_path, monkeypatch):
    """Return a function that makes a timer which injects a fault in phase "save" of step 2 of this rank."""

    def make(what, rank=0):
        monkeypatch.setenv(VARIABLE, f"{what}@rank={rank},step=2,phase=save")
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "faults"))
        return PhaseTimer(CPU)

    return make


def run_steps(timer, work=lambda: None):
    """Go through steps 0 to 3 of two phases; return what each save said."""
    seen = []
    for step in range(4):
        timer.begin_step(step)
        for phase in ("forward", "save"):
            with timer.phase(phase):
                try:
                    seen.append(work() if phase == "save" else None)
                except OSError as error:
                    seen.append(error.errno)
    return seen[1::2]


def test_faults_read_as_they_are_written():
    text = "kill@rank=1,step=5,phase=backward; slow=2.5@rank=0,step=7,phase=data_wait;clock=-60@rank=3,step=-1,phase=a;"
    faults = parse_faults(text)
    assert faults == [
        Fault("kill", 1, 5, "backward"), Fault("slow", 0, 7, "data_wait", 2.5), Fault("clock", 3, -1, "a", -60.0)
    ]  # fmt: skip
    assert parse_faults(";".join(fault.name for fault in faults)) == faults and parse_faults(" ; ") == []


@pytest.mark.parametrize(
    "text",
    ["kill", "kil@rank=0,step=1,phase=a", "kill@rank=0,step=1", "kill@rank=x,step=1,phase=a",
     "slow=@rank=0,step=1,phase=a", "kill@rank=0,step=1,phase=a,node=2"],
)  # fmt: skip
def test_a_wrong_fault_is_named(text):
    with pytest.raises(ValueError, match="a fault"):
        parse_faults(f"kill@rank=0,step=0,phase=a;{text}")


def test_nothing_happens_unasked(tmp_path, timer_with, monkeypatch):
    assert run_steps(timer_with("exit", rank=1), lambda: (tmp_path / "x").write_text("x")) == [1] * 4
    monkeypatch.delenv(VARIABLE)
    assert run_steps(PhaseTimer(CPU), lambda: (tmp_path / "x").write_text("x")) == [1] * 4


def write_by_name(folder):
    return (folder / "x").write_text("x")


def write_by_number(folder):
    descriptor = os.open(folder / "there", os.O_WRONLY)
    try:
        return os.write(descriptor, b"x")
    finally:
        os.close(descriptor)


def make_file(folder):
    os.close(os.open(folder / "y", os.O_CREAT | os.O_WRONLY, mode=0o644))
    return 1


def rename(folder):
    os.replace(folder / "there", folder / "there")
    return 1


@pytest.mark.parametrize(
    "kind, number, hit",
    [
        ("full", errno.ENOSPC, (write_by_name, write_by_number)),
        ("inodes", errno.ENOSPC, (write_by_name, make_file)),
        ("readonly", errno.EROFS, (write_by_name, make_file, rename)),
    ],
)
def test_faults_of_the_disk_last_for_their_phase(tmp_path, timer_with, kind, number, hit):
    (tmp_path / "there").write_text("x")
    for work in (write_by_name, write_by_number, make_file, rename):
        for noted in (tmp_path / "faults").glob("*"):
            noted.unlink()
        expected = [1, 1, number if work in hit else 1, 1]
        assert run_steps(timer_with(kind), lambda work=work: work(tmp_path)) == expected, work


def test_slowness(tmp_path, timer_with):
    started = time.monotonic()
    run_steps(timer_with("slowdisk=0.3"), lambda: write_by_number(tmp_path) if (tmp_path / "there").exists() else None)
    assert time.monotonic() - started < 0.25  # nothing was written
    (tmp_path / "there").write_text("x")
    for what in ("slowdisk=0.31", "slow=0.3"):
        started = time.monotonic()
        timer = timer_with(what)
        run_steps(timer, lambda: write_by_number(tmp_path))
        assert 0.3 <= time.monotonic() - started < 1.5
    assert timer.collect()["save_s"] < 0.2  # what is injected before a phase is not the phase's time


def test_errors_come_once_over_restarts(timer_with):
    for kind, error in (("oom", torch.OutOfMemoryError), ("error", RuntimeError)):
        with pytest.raises(error, match="injected"):
            run_steps(timer_with(kind))
        run_steps(timer_with(kind))


def test_the_clock_jumps(timer_with, monkeypatch):
    monkeypatch.setattr(time, "time", real := time.time)
    run_steps(timer_with("clock=-500"))
    assert time.time() == pytest.approx(real() - 500, abs=5)


@pytest.mark.parametrize("what, factor", [("nan", float("nan")), ("spike=7", 7.0)])
def test_one_output_changes(timer_with, what, factor):
    layer = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2)
    expected = layer(x)
    outputs = run_steps(timer_with(what), lambda: layer(x))
    torch.testing.assert_close(outputs[2], expected * factor, equal_nan=True)
    assert all(torch.equal(outputs[step], expected) for step in (0, 1, 3))


def end_in(environment):
    os.environ |= environment
    run_steps(PhaseTimer(CPU))


@pytest.mark.parametrize(
    "what, code", [("kill", -signal.SIGKILL), ("usr1", -signal.SIGUSR1), ("exit", 3), ("exit=7", 7)]
)
def test_ends_of_a_process(tmp_path, what, code):
    environment = {VARIABLE: f"{what}@rank=0,step=2,phase=save", FOLDER_VARIABLE: str(tmp_path / "faults")}
    for expected in (code, 0):  # the restart lives
        process = fork_server().Process(target=end_in, args=(environment,))
        process.start()
        process.join(60)
        assert process.exitcode == expected
    (noted,) = (tmp_path / "faults").iterdir()
    assert noted.name == environment[VARIABLE] and 0 < float(noted.read_text()) < time.monotonic()


@pytest.mark.parametrize("what", ["stop", "hang"])
def test_a_process_that_stands_still(tmp_path, what):
    environment = {VARIABLE: f"{what}@rank=0,step=2,phase=save", FOLDER_VARIABLE: str(tmp_path / "faults")}
    process = fork_server().Process(target=end_in, args=(environment,))
    process.start()
    deadline = time.monotonic() + 60
    while not list((tmp_path / "faults").glob("*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert process.is_alive() and state == {"stop": "T", "hang": "S"}[what]
    process.kill()
    process.join()


# ---- Where a process is ----------------------------------------------------------------------------------------------


def test_the_position_moves_with_every_phase_and_compares():
    timer = PhaseTimer(CPU)
    assert timer.position[:3] == (-1, 0, "start") and timer.current is None
    timer.begin_step(3)
    places = [timer.position[:2]]
    with timer.phase("encode"):
        assert timer.position[:3] == (3, 1, "encode") and timer.current == "encode"
        places.append(timer.position[:2])
        with timer.phase("inner"):
            assert timer.current == "inner"
        assert timer.current == timer.position.phase == "encode"
    assert timer.position.phase == "after encode" and timer.current is None
    places.append(timer.position[:2])
    with pytest.raises(KeyError), timer.phase("forward"):
        raise KeyError
    assert timer.current is None and timer.position.phase == "after forward"
    timer.begin_step(4)
    places.append(timer.position[:2])
    assert places == sorted(places) and len(set(places)) == 4
    assert abs(timer.position.since - time.monotonic()) < 5
