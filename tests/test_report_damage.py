"""The page of tools.report over what crashes, full disks, foreign tools and bad luck leave in a run folder."""

import json
import math
import os
import re
import struct
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.test_report import Page
from tools import report
from tools.report_charts import Line, line_chart, smoothed
from tools.report_run import read_run
from utils.goodput import STATES
from utils.plain_file import read_lines

FIRST, LAST = '{"step": 0, "loss": 1.0}', '{"step": 9, "loss": 2.0}'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run" / "samples").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text(f"{FIRST}\n{LAST}\n")
    return tmp_path / "run"


def page_of(*folders: Path) -> Page:
    """Make the page; it must be valid, and drawn with numbers alone."""
    output = folders[0].parent / "page.html"
    report.main(report.Config(runs=tuple(map(str, folders)), output=str(output)))
    text = output.read_bytes().decode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]", text)
    page = Page(text)
    for tag, attributes in page.tags:
        if tag in ("polyline", "line", "circle"):
            places = attributes.get("points") or " ".join(attributes[k] for k in attributes if k in "x1 x2 cx y1 y2 cy")
            assert all(-1 <= float(number) <= 640 for number in re.split("[ ,]", places)), places
    page.size, page.words = len(text), " ".join(page.text)
    return page


def points(chart: str) -> list[tuple[float, float]]:
    [line] = re.findall(r'<polyline points="([^"]*)"', chart)
    return [tuple(map(float, point.split(","))) for point in line.split()]


# ---- Lines -----------------------------------------------------------------------------------------------------------

BAD_LINES = [
    *(f'{{"step": {step}, "loss": 7.0}}' for step in ("1e400", "NaN", "-5", "1" * 400, "1" * 5000, '"7"', "true")),
    *(f'{{"step": {step}, "loss": 7.0}}' for step in ("1.5", "null", "[1]", "{}", str(2**53))),
    '{"loss": 7.0}', "[]", "7", "null", '{"step": 1, "lo', '{"step": 1, "a": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "\0" * 5000, '{"step": 1, "a": "\udc80"}', '{"step": 1, "a": "' + "a" * 2**23 + '"}',
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: f"{line[:40]}-{len(line)}")
def test_a_damaged_line_is_left_out_and_counted(folder, line):
    event = '{"time": 1.7e9, "event": "start", "step": 4, "reason": "crash"}'
    for name, lines in (("metrics.jsonl", (FIRST, line, LAST)), ("events.jsonl", (line, event, line))):
        (folder / name).write_bytes("\n".join([*lines, ""]).encode("utf-8", "surrogateescape"))
    run = read_run(folder)
    assert run.curves == {"loss": ([0, 9], [1.0, 2.0])} and [e["step"] for e in run.events] == [4]
    assert "metrics.jsonl: damaged lines: 1; events.jsonl: damaged lines: 2." in page_of(folder).words


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\n\n", " \n"], ids=repr)
def test_a_file_that_another_program_has_saved_is_the_same(folder, ends):
    text = "\ufeff" + FIRST + ends + LAST  # with a mark at its beginning, without a line's end at its end
    (folder / "metrics.jsonl").write_bytes(text.encode())
    (folder / "config.json").write_bytes(f'\ufeff{{"a":{ends}1}}{ends}'.encode())
    run = read_run(folder)
    assert run.curves == {"loss": ([0, 9], [1.0, 2.0])} and run.config == {"a": 1} and run.left_out == {}


@pytest.mark.parametrize("text", ["", FIRST, FIRST + "\n", "\n"], ids=repr)
def test_a_file_of_no_line_or_one(folder, text):
    (folder / "metrics.jsonl").write_text(text)
    assert read_run(folder).curves == ({"loss": ([0], [1.0])} if text.strip() else {})
    assert "damaged" not in page_of(folder).words


def test_lines_are_read_whole_up_to_their_limit(tmp_path):
    lines = [b"", b"a" * 9, b"b" * 10, b"c" * 25, b"d", b"e" * 30]
    (tmp_path / "a").write_bytes(b"\n".join(lines))
    expected = [line if len(line) < 10 else None for line in lines]  # its end counts
    assert list(read_lines(tmp_path / "a", 10)) == expected


def test_numbers_that_are_not_finite_are_on_no_curve_and_are_told(folder):
    values = ["NaN", "Infinity", "-Infinity", "null", "9" * 400, "1e400"]
    lines = [f'{{"step": {step}, "loss": {value}, "note": "a"}}' for step, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, LAST]))
    run = read_run(folder)
    assert run.curves == {"loss": ([9], [2.0])} and run.non_finite == {"loss": [0, 1, 2, 3, 4, 5]} and not run.left_out
    assert ["", "0", "not finite", "loss at 6 logged steps"] in page_of(folder).rows


def test_steps_that_were_done_again_count_once(folder):
    """As `RunLog` cuts the file of a resumed run: what an earlier start wrote from the first of them on is gone."""
    steps = [0, 1, 2, 3, 4, 5, 2, 3, 3, 4]
    lines = [{"step": step, "loss": float(i)} | ({"val_loss": 1.0} if i < 2 else {}) for i, step in enumerate(steps)]
    lines.insert(5, {"step": 4, "lr": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run.curves == {"loss": ([0, 1, 2, 3, 4], [0.0, 1.0, 6.0, 8.0, 9.0]), "val_loss": ([0, 1], [1.0, 1.0])}
    assert run.non_finite == {"lr": [4]} and "steps that were done again: 5" in page_of(folder).words


def test_a_long_run_is_a_small_page(folder):
    rng = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step, (loss, norm) in enumerate(rng.random((200_000, 2))):
            file.write(f'{{"step": {step}, "loss": {loss}, "grad_norm": {norm}, "lr": 1e-4}}\n')
    events = ({"time": 1.7e9, "event": "start", "step": step, "reason": "crash"} for step in range(20_000))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    started = time.monotonic()
    page = page_of(folder)
    assert page.size < 250_000 and time.monotonic() - started < 60
    assert "and 19,940 more in events.jsonl" in page.words and "at step 199,999" in page.words


def test_a_foreign_file_of_many_names_is_a_small_page_that_says_so(folder):
    names = {f"n{i}": 1.0 for i in range(5000)} | {f"loss_{i}": 1.0 for i in range(600)} | {"a" * 10**6: 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1} | names))
    (folder / "config.json").write_text(json.dumps({f"c{i}": i for i in range(1500)} | {"long": "x" * 10**7}))
    page = page_of(folder)
    assert page.size < 600_000 and "More curves: 100 of 5,001" in page.words
    assert "and 100 more in metrics.jsonl" in page.words and "and 501 more in config.json" in page.words


# ---- Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [(1.7e308, 1.0, 5e-324), (5e-324, 1e-323, 1e-300), (1e308, 1.5e308, 1.7e308)])
def test_a_logarithmic_axis_holds_all_of_the_numbers_there_are(values):
    places = [y for _, y in points(line_chart([Line("a", [0, 1, 2], values)], log=True))]
    logs = [math.log10(value) for value in values]
    share = (places[1] - places[0]) / (places[2] - places[0])
    assert share == pytest.approx((logs[1] - logs[0]) / (logs[2] - logs[0]), abs=2e-3)


@pytest.mark.parametrize(
    ("values", "share"),
    [((-1.7e308, 0.0, 1.7e308), 0.5), ((1.7e308, 1.6e308, 1.5e308), 0.5), ((0.0, 5e-324, 1e-323), 0.5),
     ((1.0, 1.0, 1.0 + 2e-15), 0.0), ((-5e-324, 0.0, 1.7e308), 0.0)],
)  # fmt: skip
def test_a_linear_axis_likewise(values, share):
    places = [y for _, y in points(line_chart([Line("a", [0, 1, 2], values)]))]
    assert (places[1] - places[0]) / (places[2] - places[0]) == pytest.approx(share, abs=2e-3)


@pytest.mark.parametrize("value", [0.0, 5e-324, -5e-324, 1e-310, 1.7976931348623157e308, -1.7e308, 1e-13, 1e17])
@pytest.mark.parametrize("log", [False, True])
def test_a_level_line_of_any_height_is_drawn(value, log):
    chart = line_chart([Line("a", [0, 1], [value, value])], log=log)
    assert all(0 <= y <= 232 for _, y in points(chart)) and not re.search("nan|inf", chart)


def test_ticks_of_small_numbers_are_not_all_zero():
    chart = line_chart([Line("a", [0, 1], [1e-13, 4e-13])])
    labels = re.findall(r'text-anchor="end">([^<]*)<', chart)
    assert len(labels) >= 3 and labels[:2] == ["0", "1e-13"] and len({*labels}) == len(labels)


def test_the_mean_after_a_spike_is_that_of_its_numbers():
    rng = np.random.default_rng(1)
    for spike in (1e20, -1e300, 1.7e308):
        values = [*rng.random(500)]
        values[100] = values[101] = spike
        found = smoothed(values, 7)
        for i, mean in enumerate(found):
            window = values[max(0, i - 6) : i + 1]
            expected = math.fsum(value / len(window) for value in window)
            assert mean == pytest.approx(expected, rel=1e-12 if abs(expected) < 1 else 1e-9), (spike, i)
    assert smoothed([0.1] * 100, 7) == pytest.approx([0.1] * 100, rel=1e-15) and smoothed([], 3) == []
    assert smoothed([3.0, 5.0], 9) == [3.0, 4.0] and smoothed([3.0, 5.0], 1) == [3.0, 5.0]


@pytest.mark.parametrize("value", [1.7e308, 5e-324, -1.7e308, 0, True], ids=str)
def test_every_part_of_the_page_takes_any_number(folder, value):
    names = ("loss", "val_loss", "grad_norm", "samples_per_s", "step_s", "forward_s", "forward_exposed", "val_loss_t0")
    lines = [{"step": step} | dict.fromkeys((*names, f"val_loss_t{'9' * 400}"), value) for step in range(45)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert page_of(folder).rows[1][1] == "44"


@pytest.mark.parametrize("value", ["x", None, [1], {"a": 1}, True, -5, 1e300, math.nan, math.inf, 10**400], ids=str)
def test_events_whose_fields_are_no_numbers(folder, value):
    start = {"time": 1.7e9, "event": "start", "step": 5, "reason": "crash"}
    good = {"time": 1.7e9, "event": "goodput", "step": 5} | dict.fromkeys(STATES, 25.0)
    events = [start | {"down_s": value, "lost_steps": value}, good | {"training": value}, start | {"reason": value}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "config.json").write_text(json.dumps({"num_steps": value, "a": value}))
    page = page_of(folder)
    assert read_run(folder).goodput() == dict.fromkeys(STATES, 25.0) | {"training": 0.0}
    assert ["training", "0.0 s", "0.0 %"] in page.rows and ["lost", "25.0 s", "20.0 %"] in page.rows
    assert not re.search(r"\b(nan|inf)\b", " ".join(cell for row in page.rows for cell in row))


def test_a_part_of_the_time_axis_without_a_number_moves_no_other(folder):
    """The curve by diffusion time is of one step, the last at which every part has a loss."""
    lines = [{"step": s, "val_loss_t0": 10.0 + s, "val_loss_t1": None if s == 0 else 20.0 + s} for s in (0, 5, 7)]
    lines.append({"step": 9, "val_loss_t0": 19.0, "val_loss_t1": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = page_of(folder).words
    assert "step 5, part 0: 15" in words and "step 5, part 1: 25" in words and "step 7, part 1: 27" in words
    assert "step 9, part" not in words and "step 0, part" not in words


def test_two_runs_of_one_name_keep_their_own_numbers(tmp_path):
    for place, seconds in (("a", 0.1), ("b", 0.3)):
        (tmp_path / place / "run").mkdir(parents=True)
        (tmp_path / place / "run" / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "step_s": 0.5, "forward_s": seconds})
        )
    page = page_of(tmp_path / "a" / "run", tmp_path / "b" / "run")
    assert ["forward", "100.0 ms", "20.0 %", "300.0 ms", "60.0 %"] in page.rows
    assert {str(tmp_path / place / "run") for place in "ab"} <= {row[0] for row in page.rows if row}


# ---- Texts and names -------------------------------------------------------------------------------------------------


def test_texts_that_are_no_unicode_or_are_markup(tmp_path, capsys):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xffme<script>"))
    folder.mkdir()
    half, tag = "\\ud800", '<script>alert(1)</script><img src="http://x">'
    fields = f'"{half}": 1, "a\\u0000": 2, {json.dumps(tag)}: 3, "\\uffff_s": 1, "step_s": 1'
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, {fields}}}\n')
    (folder / "config.json").write_text(f'{{"{half}": "{half}", {json.dumps(tag)}: [{json.dumps(tag)}]}}')
    event = f'"event": {json.dumps(tag)}, "reason": "{half}", {json.dumps(tag)}: {json.dumps(tag)}'
    (folder / "events.jsonl").write_text(f'{{"time": 1, "step": 1, {event}}}\n')
    (folder / "git.diff").write_bytes(b"# commit <b>\xff\n+\xff")
    (folder / "train.log").write_bytes(b"2024-01-01 00:00:00,000 WARNING <b>\xff\x00\x1b[1m\xed\xa0\x80\n")
    page = page_of(folder)
    assert not {"script", "img"} & {tag for tag, _ in page.tags} and page.addresses == []
    assert "na\N{REPLACEMENT CHARACTER}me<script>" in page.words and tag in page.words
    report.main(report.Config(runs=(str(folder),)))
    assert "na\N{REPLACEMENT CHARACTER}me<script>/report.html: 1 runs" in capsys.readouterr().out


def test_a_log_of_long_lines_is_read_in_time(folder):
    lines = [f"2024-01-01 00:00:0{i},000 WARNING {'a' * 200_000} shard {i}" for i in range(3)]
    lines += [f"2024-01-01 00:00:09,000 WARNING {chr(97 + i % 26)}{'b' * (i // 26)}" for i in range(12_000)]
    (folder / "train.log").write_text("\n".join(lines))
    started = time.monotonic()
    run = read_run(folder)
    assert time.monotonic() - started < 20 and len(run.warnings) == 10_000
    assert (run.warnings[0].count, run.warnings[0].first, run.warnings[0].last) == (3, lines[0][:19], lines[2][:19])
    words = page_of(folder).words
    assert "train.log: warnings after the first 10,000 kinds" in words and "and 9,980 more kinds" in words


# ---- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.json", "git.diff", "train.log", "samples"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "loop"])
def test_what_is_no_file_is_named_and_waited_for_by_nobody(folder, name, kind):
    (folder / "config.json").write_text("{}")
    path = folder / name
    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
    if (kind, name) == ("loop", "config.json"):  # by which a run folder is known
        with pytest.raises(ValueError, match="cannot be read: Too many levels"):
            page_of(folder)
    elif (kind, name) != ("folder", "samples"):
        assert f"{name}: " in page_of(folder).words and name in read_run(folder).left_out


def test_a_config_that_is_damaged(folder):
    for text in ("[" * 200_000, "[1]", '{"a": ', '{"a": "' + "x" * 2**24 + '"}'):
        (folder / "config.json").write_text(text)
        assert read_run(folder).config == {} and "config.json: it is damaged" in page_of(folder).words


@contextmanager
def somebody_else():
    """Be somebody whom permissions bind, as they do not bind root."""
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_folder_that_may_not_be_read_is_one_line(folder, mode):
    for parent in (folder.parent, *folder.parent.parents):
        if parent.stat().st_uid == os.geteuid() and parent.name.startswith(("pytest-", "test_")):
            parent.chmod(0o755)
    folder.chmod(mode)
    try:
        with somebody_else(), pytest.raises(ValueError, match="run cannot be read: Permission denied"):
            read_run(folder)
        folder.chmod(0o755)
        (folder / "metrics.jsonl").chmod(0)
        (folder / "config.json").write_text('{"a": 1}')
        with somebody_else():
            run = read_run(folder)
        assert run.left_out == {"metrics.jsonl": "Permission denied"} and run.config == {"a": 1} and run.curves == {}
    finally:
        folder.chmod(0o755)


# ---- Pictures --------------------------------------------------------------------------------------------------------


def png(width: int, height: int, data: bytes) -> bytes:
    """Return a picture of one bit a pixel that claims to be so large."""
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(data)),
        (b"IEND", b""),
    )
    chunks = (struct.pack(">I", len(of)) + kind + of + struct.pack(">I", zlib.crc32(kind + of)) for kind, of in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_pictures_that_are_none_or_too_large_are_named(folder, recwarn):
    good = png(100, 100, b"\0" * 14 * 100)
    bad = [
        good[:-30], b"", b"hello", b"GIF89a", good[:20] + b"\xff" * 13 + good[33:], png(0, 0, b""),
        png(60_000, 60_000, b""), png(20_000, 12_000, b"\0" * 2501 * 12_000),
        png(11_000, 10_000, b"\0" * 1376 * 10_000),
    ]  # fmt: skip
    for step, content in enumerate(bad):
        (folder / "samples" / f"step-{step:08d}.png").write_bytes(content)
    (folder / "samples" / "step-00000090.png").mkdir()
    os.mkfifo(folder / "samples" / "step-00000091.png")
    Image.new("RGB", (8, 8)).save(folder / "samples" / "step-00000092.png", "JPEG")  # RunLog writes PNG alone
    (folder / "samples" / "step-00000099.png").write_bytes(good)
    for name in ("step-\N{ARABIC-INDIC DIGIT THREE}.png", f"step-{'9' * 200}.png"):
        (folder / "samples" / name).write_bytes(good)
    shown = 0
    for path in sorted((folder / "samples").iterdir())[:-2]:
        if path.name.startswith("step-00"):
            run = folder.parent / f"of {path.name}"
            (run / "samples").mkdir(parents=True)
            (run / "metrics.jsonl").write_text(FIRST)
            path.rename(run / "samples" / path.name)
            page = page_of(run)
            cannot = f"step {int(path.stem[5:])}: the picture cannot be read" in page.words
            assert cannot == (len(page.addresses) == 0) == (path.stem != "step-00000099"), path
            shown += not cannot
    assert shown == 1 and read_run(folder).pictures == {} and not recwarn.list
