"""The run's files, read back with other programs: json, TensorBoard's reader, Pillow."""

import fcntl
import io
import json
import logging
import math
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from utils import logging as run_logging
from utils.console import ONCE
from utils.logging import RunLog
from utils.run_options import RunOptions

REPOSITORY = Path(__file__).parent.parent
PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def lines(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def train(folder, start_step, num_steps, value):
    """Log like a train script: step by step, a validation every second step, with the start's own `value`."""
    run_log = RunLog(folder, num_steps, start_step, is_main=True)
    for step in range(start_step, num_steps):
        if step % 2 == 0:
            run_log.scalars(step, {"val_loss": value})
            run_log.image(step, "samples", PICTURE)
        run_log.scalars(step, {"loss": value, "step_s": 0.5})
        run_log.samples(step, [f"狗-{step}-{value}"])
        run_log.progress(step + 1, {"loss": value})
    run_log.close()


def curve(folder, tag):
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_resumed_run_has_each_step_once(tmp_path):
    train(tmp_path, 0, 7, 1.0)  # stopped after step 6 of more; its last checkpoint was of 4 steps
    train(tmp_path, 4, 9, 2.0)
    expected = [1.0] * 4 + [2.0] * 5
    training = [line for line in lines(tmp_path / "metrics.jsonl") if "loss" in line]
    assert [(line["step"], line["loss"]) for line in training] == list(enumerate(expected))
    validation = [(line["step"], line["val_loss"]) for line in lines(tmp_path / "metrics.jsonl") if "val_loss" in line]
    assert validation == [(0, 1.0), (2, 1.0), (4, 2.0), (6, 2.0), (8, 2.0)]
    seen = [(line["step"], line["samples"]) for line in lines(tmp_path / "samples_seen.jsonl")]
    assert seen == [(step, [f"狗-{step}-{value}"]) for step, value in enumerate(expected)]
    assert curve(tmp_path, "train/loss") == list(enumerate(expected))
    assert curve(tmp_path, "validation/val_loss") == validation
    assert len(curve(tmp_path, "speed/step_s")) == 9


def test_a_run_that_restarts_before_its_first_checkpoint(tmp_path, monkeypatch):
    # Files of one second and process are read in the order of their numbers as text: a tenth before a ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    train(tmp_path, 0, 3, 1.0)
    train(tmp_path, 0, 3, 2.0)
    assert [line["loss"] for line in lines(tmp_path / "metrics.jsonl") if "loss" in line] == [2.0] * 3
    assert curve(tmp_path, "train/loss") == [(0, 2.0), (1, 2.0), (2, 2.0)]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_a_crash_cut_off_goes(tmp_path, cut):
    train(tmp_path, 0, 4, 1.0)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-cut])
    train(tmp_path, 3, 4, 2.0)
    assert [line["loss"] for line in lines(metrics) if "loss" in line] == [1.0, 1.0, 1.0, 2.0]


def test_non_finite_numbers_are_null_in_the_file_and_themselves_on_the_curve(tmp_path):
    run_log = RunLog(tmp_path, 1, 0, is_main=True)
    run_log.scalars(0, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    run_log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": None, "grad_norm": None, "lr": 0.1}]
    assert math.isnan(curve(tmp_path, "train/loss")[0][1])
    assert curve(tmp_path, "optimizer/grad_norm") == [(0, math.inf)]


def test_where_no_step_is_logged_nothing_is_kept_for_it(tmp_path):
    run_log = RunLog(tmp_path, 2, 0, is_main=True, config=RunOptions(log_every=0))
    run_log.observe(t=[0.5])
    assert not run_log._observed
    run_log.close()


def test_every_line_is_on_disk_at_once(tmp_path):
    run_log = RunLog(tmp_path, 2, 0, is_main=True)
    run_log.scalars(0, {"loss": 1.0})
    run_log.samples(0, ["a"])
    assert lines(tmp_path / "metrics.jsonl") and lines(tmp_path / "samples_seen.jsonl")
    run_log.close()


def test_pictures_go_to_png_and_tensorboard(tmp_path):
    train(tmp_path, 0, 1, 1.0)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "samples" / "step-00000000.png")), PICTURE)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    encoded = events.Images("samples")[0].encoded_image_string
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encoded))), PICTURE)


def test_other_ranks_write_nothing_but_their_warnings(tmp_path, capsys):
    run_log = RunLog(tmp_path, 2, 0, is_main=False, rank=3)
    run_log.scalars(0, {"loss": 1.0})
    run_log.progress(1, {"loss": 1.0})
    run_log.image(0, "samples", None)
    run_log.samples(0, ["a"])
    logging.getLogger("train").info("not heard")
    logging.getLogger("train").warning("all ranks find this", extra=ONCE)
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == ""
    logging.getLogger("train").warning("bad sample %s", "x/1")
    run_log.close()
    assert capsys.readouterr().err == "warning: [rank 3] bad sample x/1\n"
    assert "WARNING [rank 3] bad sample x/1" in (tmp_path / "train.log").read_text()


def test_the_last_words_name_what_is_there(tmp_path, capsys):
    RunLog(tmp_path / "plain", 1, 0, is_main=True).done(None, "tools.sample")
    drawn = RunLog(tmp_path / "drawn", 1, 0, is_main=True)
    drawn.image(0, "samples", PICTURE)
    drawn.done(tmp_path / "step-1", "tools.sample")
    plain, _, rest = capsys.readouterr().out.partition("curves")
    assert plain.split() == ["done:", "1", "steps"]
    assert f"pictures    {tmp_path / 'drawn' / 'samples'}" in rest and "try it      ./launch.sh -m tools.sample" in rest


def test_library_warnings_reach_train_log_and_close_takes_the_handlers_away(tmp_path, capsys):
    before = list(logging.getLogger().handlers)
    run_log = RunLog(tmp_path, 1, 0, is_main=True)
    logging.getLogger("some.library").info("detail")
    logging.getLogger("some.library").warning("careful")
    run_log.close()
    assert capsys.readouterr().err == "warning: careful\n"
    assert "detail" not in (tmp_path / "train.log").read_text()
    assert logging.getLogger().handlers == before


def test_plain_lines_without_a_terminal(tmp_path, capsys, monkeypatch):
    clock = iter(range(0, 1000, 4))  # four seconds between looks at the clock
    monkeypatch.setattr(run_logging, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), time=time.time))
    run_log = RunLog(tmp_path, 5, 0, is_main=True)
    for step in range(5):
        run_log.progress(step + 1, {"loss": 0.25, "images/s": 1234.56})
    run_log.close()
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        "step 3/5  loss 0.25, images/s 1235, 00:08 left",  # 12 s for 3 steps, 2 to go
        "step 5/5  loss 0.25, images/s 1235, 00:00 left",
    ]


RUN = """
import logging, sys
from pathlib import Path
from utils.logging import RunLog
run_log = RunLog(Path(sys.argv[1]), 4, 2, is_main=True)
for step in (2, 3):
    run_log.progress(step + 1, {"loss": 0.5})
logging.getLogger("train").info("a message")
run_log.close()
"""


@pytest.mark.parametrize(("lines", "columns"), [(40, 100), (40, 0), (0, 100), (0, 0)])
def test_a_bar_on_a_terminal_that_has_a_size_and_the_lines_in_train_log(tmp_path, lines, columns):
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], cwd=REPOSITORY, stderr=terminal, check=True)
    os.close(terminal)
    shown = os.read(screen, 10000).decode()
    os.close(screen)
    assert "a message" in shown and "loss 0.5" in shown
    has_bar = lines > 0 and columns > 0
    assert ("100%" in shown) == has_bar and ("step 4/4" in shown) != has_bar
    assert "step 4/4  loss 0.5" in (tmp_path / "train.log").read_text()


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path, capsys):
    """The lines that found no room come later, as far as they fit into the file's buffer."""
    run_log = RunLog(tmp_path, 9, 0, is_main=True)
    there, full = os.dup(run_log._metrics.fileno()), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, run_log._metrics.fileno())
    run_log._samples_seen = open("/dev/full", "w", buffering=1)
    for step in range(3):
        run_log.scalars(step, {"loss": 1.0})
        run_log.samples(step, ["a"])
    os.dup2(there, run_log._metrics.fileno())
    run_log.scalars(3, {"loss": 2.0})
    run_log.close()
    for descriptor in (there, full):
        os.close(descriptor)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert capsys.readouterr().err.count("No space left on device; training goes on") == 1


@pytest.mark.parametrize("where", ["/dev/full", "/proc/none/train.log"])  # no room; cannot be made
def test_a_log_file_that_cannot_be_written_is_named_once(tmp_path, capsys, where):
    run_log = RunLog(tmp_path, 9, 0, is_main=True)
    (tmp_path / "train.log").unlink(missing_ok=True)
    (tmp_path / "train.log").symlink_to(where)
    for _ in range(3):
        logging.getLogger("train").warning("a message")
    run_log.close()
    printed = capsys.readouterr().err
    assert printed.count("a message") == 3 and printed.count("train.log cannot be written") == 1, printed
    assert "Traceback" not in printed


def test_a_damaged_line_ends_no_run(tmp_path):
    """Rank 0 alone reads the file at a start: an error there would have the other ranks wait for it."""
    train(tmp_path, 0, 4, 1.0)
    metrics = tmp_path / "metrics.jsonl"
    first, *rest = metrics.read_bytes().splitlines(keepends=True)
    damaged = [b"\0\0\0\n", b"null\n", b'{"step": "x"}\n', b'{"a": 1}\n', b"[" * 100_000 + b"\n", b"\xff\n", b"\n"]
    metrics.write_bytes(first + b"".join(damaged) + b"".join(rest))
    train(tmp_path, 3, 4, 2.0)
    kept = metrics.read_bytes().splitlines(keepends=True)
    assert kept[1 : 1 + len(damaged)] == damaged
    assert [json.loads(line)["loss"] for line in (kept[0], *kept[1 + len(damaged) :]) if b'"loss"' in line][-1] == 2.0
