"""The monitor, scraped over HTTP with nothing but the standard library, and what each call shows there."""

import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.request

import pytest
import torch

from parallel import checkpoint_saver
from parallel.checkpoint_saver import CheckpointSaver
from tests.free_ports import free_ports
from utils.counts import count
from utils.goodput import STATES, Goodput
from utils.logging import RunLog
from utils.monitor import Monitor
from utils.monitor_metrics import METRICS
from utils.phase_timer import PhaseTimer
from utils.run_events import RunEvents, read_events, restart_reason

SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")


def scrape(port: int) -> dict[tuple[str, str], float]:
    """Return {(metric, its own label's value): number} of a real scrape, after a look at every line of it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, labels, value = SAMPLE.fullmatch(line).groups()
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert {"run", "rank", "node"} <= pairs.keys() and len(pairs) <= 4, line
        assert "/" not in labels, f"a path in {line}"
        [own] = [v for k, v in pairs.items() if k not in ("run", "rank", "node")] or [""]
        assert (name, own) not in found, f"{line} is there twice"
        found[name, own] = float(value)
    return found


@pytest.fixture
def monitor(tmp_path):
    made = Monitor("a-run", rank=1, port=free_ports(), disk=str(tmp_path))
    yield made
    made.close()


def test_every_call_shows_in_a_scrape(monitor):
    before = scrape(monitor.port)
    assert before["trainer_restarts_total", "crash"] == 0 and ("trainer_non_finite_steps_total", "") in before
    assert before["trainer_disk_free_bytes", ""] > 0 and before["trainer_host_memory_bytes", ""] > 2**20
    assert before["trainer_checkpoint_last_success_timestamp_seconds", ""] <= time.time()
    monitor.plan(num_steps=100, start_step=7, save_every=10, skipped_budget=50)
    for step in (8, 9):
        monitor.step(step, {
            "loss": 0.5, "plan_loss": 2.0, "grad_norm": 3.0, "planner_grad_norm": 4.0, "lr": 1e-3, "samples": 64 * step,
            "bad_samples": 2, "step_s": 0.0, "forward_s": 0.25, "data_wait_s": 0.0, "samples_per_s": 5.0,
        })  # fmt: skip
    monitor.validation({"val_loss": 0.75, "val_loss_zh": 0.1, "val_plan_loss": 1.5, "val_plan_exact": 1.0})
    monitor.restart("hang")
    monitor.restart("something else")
    monitor.rollback()
    monitor.checkpoint(stall_s=2.0, duration_s=8.0, num_bytes=1000)
    monitor.checkpoint(stall_s=1.0, duration_s=9.0, num_bytes=2000)
    monitor.checkpoint_failed()
    monitor.probe({"compute": 0.001, "node": 0.002, "across": 0.003})
    monitor.watch(lambda: {"trainer_data_queue_length": 3})
    for name, kind in (("skipped_steps", "non_finite"), ("skipped_steps", "spike"), ("non_finite_steps", "")):
        count(name, kind)
    retries, damaged = (before[f"trainer_{name}_total", ""] for name in ("data_retries", "checkpoint_verify_failures"))
    spikes, not_finite = (before["trainer_skipped_steps_total", kind] for kind in ("spike", "non_finite"))
    count("data_retries", amount=4)
    count("data_errors", "checksum")
    count("checkpoint_verify_failures")
    count("not a metric of ours")
    seen = scrape(monitor.port)
    expected = {
        ("trainer_num_steps", ""): 100, ("trainer_step", ""): 9, ("trainer_samples_skipped_budget", ""): 50,
        ("trainer_loss", "loss"): 0.5, ("trainer_loss", "plan_loss"): 2.0, ("trainer_grad_norm", "grad_norm"): 3.0,
        ("trainer_grad_norm", "planner_grad_norm"): 4.0, ("trainer_learning_rate", ""): 1e-3,
        ("trainer_samples_total", ""): 128, ("trainer_samples_skipped_total", ""): 2,
        ("trainer_phase_seconds_total", "forward"): 0.5, ("trainer_validation_loss", "val_loss"): 0.75,
        ("trainer_validation_loss", "val_plan_loss"): 1.5, ("trainer_restarts_total", "hang"): 1,
        ("trainer_restarts_total", "other"): 1, ("trainer_rollbacks_total", ""): 1,
        ("trainer_non_finite_steps_total", ""): not_finite + 1,
        ("trainer_skipped_steps_total", "non_finite"): not_finite + 1,
        ("trainer_skipped_steps_total", "spike"): spikes + 1, ("trainer_checkpoint_stall_seconds", ""): 1.0,
        ("trainer_checkpoint_stall_seconds_total", ""): 3.0, ("trainer_checkpoint_duration_seconds", ""): 9.0,
        ("trainer_checkpoint_bytes", ""): 2000, ("trainer_checkpoint_failures_total", ""): 1,
        ("trainer_checkpoint_verify_failures_total", ""): damaged + 1, ("trainer_compute_probe_seconds", ""): 0.001,
        ("trainer_all_reduce_probe_seconds", "node"): 0.002, ("trainer_all_reduce_probe_seconds", "across"): 0.003,
        ("trainer_data_queue_length", ""): 3, ("trainer_data_retries_total", ""): retries + 4,
        ("trainer_checkpoint_in_progress_seconds", ""): 0, ("trainer_monitor_errors_total", ""): 0,
    }  # fmt: skip
    assert {key: seen.get(key) for key in expected} == expected
    assert ("trainer_validation_loss", "val_loss_zh") not in seen  # of each language: in TensorBoard
    assert not [key for key in seen if "per" in key[1] or key[1] == "samples"]


def test_a_scrape_tells_what_is_under_way(monitor):
    timer = PhaseTimer(torch.device("cpu"))
    monitor.current_phase = lambda: timer.current
    began = time.monotonic() - 20
    monitor.saving_since = lambda: began
    with timer.phase("checkpoint"):
        seen = scrape(monitor.port)
    assert seen["trainer_checkpoint_in_progress_seconds", ""] >= 20
    assert (seen["trainer_in_phase", "checkpoint"], seen["trainer_in_phase", "validation"]) == (1, 0)
    monitor.between_ended_at = lambda: timer.between_ended_at
    with timer.phase("forward"):
        pass
    assert (
        scrape(monitor.port)["trainer_last_progress_timestamp_seconds", ""] == timer.between_ended_at > time.time() - 9
    )
    monitor.step(1, {})  # later
    now = scrape(monitor.port)
    assert now["trainer_last_progress_timestamp_seconds", ""] == now["trainer_last_step_timestamp_seconds", ""]
    with timer.phase("forward"):
        assert sum(v for (name, _), v in scrape(monitor.port).items() if name == "trainer_in_phase") == 0


def test_the_99th_percentile_is_that_of_the_intervals(monitor):
    for seconds in range(1, 201):
        monitor._intervals.append(seconds / 100)
    monitor.plan(1000, 0, save_every=10, skipped_budget=0)
    monitor._calls = 200
    monitor.goodput.seconds |= {"training": 200.0, "checkpoint": 30.0, "validation": 170.0, "restart": 5000.0}
    seen = scrape(monitor.port)
    assert seen["trainer_step_p99_seconds", ""] == 1.98  # of 0.01 to 2.00: 198 of 200 are no larger
    assert seen["trainer_checkpoint_expected_interval_seconds", ""] == 10 * 2.0


def test_gpu_metrics_where_nvml_answers(monitor, monkeypatch):
    from utils import machine_state

    class NVMLError(Exception):
        pass

    def unsupported(handle):
        raise NVMLError

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=87),
        nvmlDeviceGetTemperature=lambda handle, sensor: 61, nvmlDeviceGetPowerUsage=unsupported,
    )  # fmt: skip
    monkeypatch.setattr(machine_state, "_nvml", lambda: (nvml, "handle"))
    seen = scrape(monitor.port)
    assert seen["trainer_gpu_utilization_ratio", ""] == 0.87 and seen["trainer_gpu_temperature_celsius", ""] == 61
    assert ("trainer_gpu_power_watts", "") not in seen and seen["trainer_monitor_errors_total", ""] == 0


def test_nothing_listens_and_nothing_is_imported_unless_asked_for(tmp_path):
    code = (
        "import sys; from pathlib import Path; from utils.logging import RunLog\n"
        f"RunLog(Path({str(tmp_path / 'run')!r}), 1, 0, is_main=False).close()\n"
        "print([m for m in ('prometheus_client', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_port_that_is_taken_is_one_warning(tmp_path, caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monitor = Monitor("run", port=port, disk=str(tmp_path))
    monitor.step(1, {"loss": 1.0})
    monitor.close()
    [record] = caplog.records
    assert record.levelno == logging.WARNING and f"127.0.0.1:{port}" in record.getMessage()
    assert monitor.values()["trainer_step", ""] == 1


def test_a_server_that_dies_and_a_source_that_fails_are_one_warning_each(monitor, caplog):
    def broken():
        raise RuntimeError("no such number")

    monitor.watch(broken)
    assert [scrape(monitor.port)["trainer_monitor_errors_total", ""] for _ in range(2)] == [1, 2]
    monitor._server.shutdown()
    monitor._thread.join(5)
    for step in range(1, 301):
        monitor.step(step, {"loss": 1.0})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and "no such number" in messages[0] and "server has stopped" in messages[1]


def test_scrapes_while_training_writes(monitor):
    """No scrape sees a torn state or fails, however fast the numbers change."""
    stop, seen = threading.Event(), []

    def read():
        while not stop.is_set():
            seen.append(scrape(monitor.port)["trainer_step", ""])

    monitor.step(0, {})
    reader = threading.Thread(target=read)
    reader.start()
    try:
        deadline = time.monotonic() + 20
        step = 0
        while len(seen) < 10 and time.monotonic() < deadline:
            step += 1
            monitor.step(step, {"loss": 1.0, "forward_s": 0.1, "step_s": 0.1})
            monitor.add("trainer_phase_seconds_total", 0.1, f"phase{step % 50}")
    finally:
        stop.set()
        reader.join(20)
    assert len(seen) >= 10 and seen == sorted(seen)
    assert monitor.values()["trainer_monitor_errors_total", ""] == 0


# ---- Goodput ---------------------------------------------------------------------------------------------------------


def test_goodput_counts_every_second_once(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("utils.goodput.time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    goodput = Goodput(repeated_until=12, down_s=30.0)  # twelve steps were done; resumes from ten
    expected = dict.fromkeys(STATES, 0.0) | {"restart": 30.0}

    def step(number, seconds, step_s, **phases):
        clock[0] += seconds
        goodput.step(number, step_s, phases)

    step(11, 20.0, 3.0, data_wait=1.0, validation=5.0)  # of 20 s: 5 validation, 3 the step, 12 starting
    expected |= {"restart": 42.0, "validation": 5.0, "lost": 3.0}
    assert goodput.seconds == expected
    step(12, 2.0, 2.0, data_wait=0.5, forward=1.0)
    step(13, 4.0, 3.5, data_wait=0.5, forward=1.0, backward=2.0)
    step(14, 10.0, 3.0, checkpoint=6.0, sampling=1.0)
    expected |= {"lost": 5.0, "training": 3.5 + 3.0, "data_wait": 0.5, "checkpoint": 6.0, "validation": 6.0}
    assert goodput.seconds == expected
    assert sum(goodput.seconds.values()) == 30.0 + 36.0
    assert goodput.ratio() == 6.5 / 66


# ---- The run folder --------------------------------------------------------------------------------------------------


def start(folder, start_step, num_steps=100, saver=None):
    return RunLog(folder, num_steps, start_step, is_main=True, saver=saver)


def test_restarts_are_counted_over_all_starts_by_what_ended_the_one_before(tmp_path):
    run_log = start(tmp_path, 0)
    for step in range(1, 8):
        run_log.progress(step, {"loss": 1.0}, {"step_s": 0.0})
    run_log.events.mark_now(7)
    run_log.monitor.close()  # killed here: nothing says why
    run_log = start(tmp_path, 5)
    assert run_log.monitor.values()["trainer_restarts_total", "crash"] == 1
    for step in (6, 7, 8):
        run_log.progress(step, {"loss": 1.0}, {"step_s": 0.0})
    assert run_log.monitor.goodput.seconds["lost"] > 0
    run_log.stop(8, "signal")
    run_log = start(tmp_path, 8, num_steps=9)
    values = run_log.monitor.values()
    assert (values["trainer_restarts_total", "crash"], values["trainer_restarts_total", "signal"]) == (1, 1)
    run_log.progress(9, {"loss": 1.0}, {"step_s": 0.0})
    assert run_log.monitor.goodput.seconds["lost"] == 0
    run_log.done(None, "")
    events = read_events(tmp_path)
    assert [(e["event"], e["step"], e.get("reason")) for e in events if e["event"] in ("start", "stop")] == [
        ("start", 0, "first"), ("start", 5, "crash"), ("stop", 8, "signal"), ("start", 8, "signal"),
        ("stop", 9, "finished"),
    ]  # fmt: skip
    assert [e["lost_steps"] for e in events if e["event"] == "start"] == [0, 2, 0]
    assert restart_reason(events) == "finished"
    [*_, last] = [e for e in events if e["event"] == "goodput"]
    assert STATES == tuple(key for key in last if key in STATES)


def test_every_save_is_reported_once_with_its_times_and_bytes(tmp_path, monkeypatch):
    """Of a real saver in the background: one save that lasts over steps, one that fails."""
    saver = CheckpointSaver(tmp_path / "checkpoints", "thread")
    run_log, tensors = start(tmp_path, 0, saver=saver), {"w": torch.ones(1000)}
    values, go = run_log.monitor.values, threading.Event()
    saver.prepare(tensors)
    write = checkpoint_saver.publish
    monkeypatch.setattr(checkpoint_saver, "publish", lambda *args: go.wait(20) and write(*args))
    with run_log.saving(1):
        saver.save(1, tensors, {"step": 1})
    time.sleep(0.5)
    run_log.progress(2, {"loss": 1.0}, {"step_s": 0.0})
    assert values()["trainer_checkpoint_in_progress_seconds", ""] >= 0.5
    assert not [e for e in read_events(tmp_path) if e["event"] == "checkpoint"]
    go.set()
    saver.wait()
    for step in (3, 4):
        run_log.progress(step, {"loss": 1.0}, {"step_s": 0.0})
    seen = values()
    assert seen["trainer_checkpoint_in_progress_seconds", ""] == 0
    assert seen["trainer_checkpoint_bytes", ""] == 4000
    stall_s, duration_s = (seen[f"trainer_checkpoint_{name}_seconds", ""] for name in ("stall", "duration"))
    assert 0 < stall_s < 0.5 <= duration_s == saver.last_save_s
    assert seen["trainer_checkpoint_stall_seconds_total", ""] == stall_s
    [event] = [e for e in read_events(tmp_path) if e["event"] == "checkpoint"]
    assert (event["step"], event["num_bytes"]) == (1, 4000) and event["duration_s"] == pytest.approx(duration_s, 1e-3)

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_saver, "publish", full)
    with run_log.saving(4):
        saver.save(4, tensors, {"step": 4})
    saver.wait()
    run_log.stop(4, "signal")
    assert values()["trainer_checkpoint_failures_total", ""] == 1
    events = [(e["event"], e["step"]) for e in read_events(tmp_path) if e["event"].startswith("checkpoint")]
    assert events == [("checkpoint", 1), ("checkpoint_failed", 4)]
    run_log.close()


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_save_that_fails_in_the_background_is_reported_with_its_own_step(tmp_path, monkeypatch, caplog, mode):
    """Also the last one, whose failure ends the run before anything looks again."""
    monkeypatch.setattr(logging.getLogger("train"), "propagate", True)

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_saver, "make_room", full)  # a failure that says nothing of a step itself
    saver = CheckpointSaver(tmp_path / "checkpoints", mode)
    run_log, tensors = start(tmp_path, 0, saver=saver), {"w": torch.ones(1000)}
    for step in (2, 4):
        with run_log.saving(step):
            saver.save(step, tensors, {"step": step})
    with pytest.raises(ValueError, match="The last, of step 4: .*disk full"):
        saver.close()
    failed = [e["step"] for e in read_events(tmp_path) if e["event"] == "checkpoint_failed"]
    assert failed == [2, 4] and run_log.monitor.values()["trainer_checkpoint_failures_total", ""] == 2
    said = [message.partition(" failed")[0] for message in caplog.messages if "in a row" in message]
    assert said == ["step 2: save 1 in a row", "step 4: save 2 in a row"]
    run_log.close()


def test_a_checkpoint_that_was_there_is_no_save(tmp_path):
    tensors = {"w": torch.ones(1000)}
    CheckpointSaver(tmp_path / "checkpoints").save(2, tensors, {"step": 2})
    saver = CheckpointSaver(tmp_path / "checkpoints")
    run_log = start(tmp_path, 0, saver=saver)
    for step in (1, 2):
        with run_log.saving(step):
            saver.save(step, tensors, {"step": step})
    values = run_log.monitor.values()
    events = [e for e in read_events(tmp_path) if e["event"] == "checkpoint"]
    assert [e["step"] for e in events] == [1] and saver.saved_step == 2
    assert values["trainer_checkpoint_duration_seconds", ""] == pytest.approx(events[0]["duration_s"], abs=1e-3)
    assert values["trainer_checkpoint_stall_seconds_total", ""] == pytest.approx(events[0]["stall_s"], abs=1e-3)
    assert values["trainer_checkpoint_last_success_timestamp_seconds", ""] > events[0]["time"] - 0.002
    run_log.close()


@pytest.mark.parametrize("reason", ["finished", "signal"])
def test_every_rank_counts_the_same_time_as_down(tmp_path, monkeypatch, reason):
    """Also one that looks after rank 0 has noted the new start: nobody waited for a run that was finished."""
    an_hour_ago = time.time() - 3600
    lines = [("start", "first"), ("stop", reason)]
    text = "".join(json.dumps({"time": an_hour_ago, "event": e, "step": 5, "reason": r}) + "\n" for e, r in lines)
    (tmp_path / "events.jsonl").write_text(text)
    (tmp_path / "last_step.json").write_text(json.dumps({"step": 5, "time": an_hour_ago}))
    for module in ("logging", "monitor"):
        monkeypatch.setattr(f"utils.{module}.PROCESS_BEGAN", time.time() - 1)
    logs = [RunLog(tmp_path, 10, 5, is_main=rank == 0, rank=rank) for rank in (0, 1)]
    down_s = [log.monitor.goodput.seconds["restart"] for log in logs]
    assert down_s == pytest.approx([1.0 if reason == "finished" else 3600.0] * 2, abs=0.9)
    for log in logs:
        log.close()


def test_events_outlive_a_torn_line(tmp_path):
    events = RunEvents(tmp_path)
    events.add("start", 0, reason="first")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1.0, "event": "chec')  # the disk was full
    events.add("stop", 3, reason="signal")
    assert [e["event"] for e in read_events(tmp_path)] == ["start", "stop"]


def test_last_step_is_rewritten_in_place_and_damage_is_no_step(tmp_path):
    events = RunEvents(tmp_path)
    assert events.last_step() is None
    events.mark(123456)
    size = (tmp_path / "last_step.json").stat().st_size
    events.mark(123457)  # within a second: not written
    assert events.last_step()[0] == 123456
    events.mark_now(7)
    assert events.last_step()[0] == 7 and (tmp_path / "last_step.json").stat().st_size == size
    assert json.loads((tmp_path / "last_step.json").read_text())["step"] == 7
    events.close()
    (tmp_path / "last_step.json").write_text("[]")
    assert RunEvents(tmp_path).last_step() is None


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    events = RunEvents(tmp_path / "file" / "run")
    events.add("start", 0)
    events.mark(1)
    events.add("stop", 0)
    assert len(caplog.records) == 1 and "training goes on" in caplog.text


def test_every_metric_is_named_as_prometheus_wants_it():
    for name, metric in METRICS.items():
        assert re.fullmatch(r"trainer_[a-z0-9_]+", name) and metric.help.endswith("."), name
        assert not re.search(r"_(ms|minutes|hours|kib|mib|gib|mb|percent)(_|$)", name), f"{name}: no base unit"


def test_damaged_events_and_steps_are_passed_over(tmp_path):
    events = RunEvents(tmp_path)
    events.add("start", 0, reason="first")
    bad = ['{"time": "1", "event": "stop", "step": 1}', '{"time": 1e400, "event": "stop", "step": 1}', "[]", "7", "\0"]
    bad += ['{"time": 1e20, "event": "stop", "step": 1}', '{"time": 1, "event": "stop", "step": "x"}', "[" * 100_000]
    bad += ['{"time": 1, "event": "stop", "step": null}', '{"time": 1, "event": ["stop"], "step": 1}', "\N{SNOWMAN}"]
    with (tmp_path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join([*bad, ""]))
    assert [e["event"] for e in read_events(tmp_path)] == ["start"]
    for text in ('{"step": 1e400, "time": 1}', '{"step": "x", "time": 1}', '{"step": 1, "time": null}'):
        (tmp_path / "last_step.json").write_text(text)
        assert events.last_step() is None
