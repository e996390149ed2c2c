"""The page of tools.report over two runs that are known to the last number: nothing missing, nothing from elsewhere."""

import json
import logging
import math
from html.parser import HTMLParser

import numpy as np
import pytest

from tools import report
from tools.report_charts import Line, line_chart
from tools.report_run import read_run
from utils.logging import RunLog

STEPS = 60
VOID = {"meta", "img", "line", "circle", "polyline"}
CONFIG = {"lr": 0.01, "num_steps": STEPS, "data": "emoji", "sample_prompts": ["dog <b>face</b>", "狗脸"]}


class Page(HTMLParser):
    """The page's text by element, its addresses and its tables; fails on tags that do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.text, self.addresses, self.tags, self.rows = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href", "action", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def loss(run: int, step: int) -> float:
    return 2.0 * math.exp(-step / 20) + 0.1 * run


def train(folder, run: int, first: int, end: int, last: bool) -> None:
    run_log = RunLog(folder, STEPS, first, is_main=True)
    for step in range(first, end):
        if step % 20 == 0:
            strata = {f"val_loss_t{i}": loss(run, step) + i for i in range(8)}
            run_log.scalars(step, {"val_loss": loss(run, step), "val_loss_zh": 0.5, "val_loss_animals": 0.25} | strata)
            run_log.image(step, "samples", np.full((32, 48, 3), 4 * step, np.uint8), ["a", "b"])
        values = {"loss": loss(run, step), "grad_norm": 1.0 + run, "lr": 0.01, "samples_per_s": 8.0}
        values |= {"step_s": 0.5, "data_wait_s": 0.1, "forward_s": 0.3, "own_number": 7.0}
        run_log.progress(step + 1, {"loss": values["loss"]}, values)
        run_log.scalars(step, values)
    if last:
        run_log.done(None, "")
    else:
        run_log.scalars(end, {"loss": math.nan, "grad_norm": 1.0})
        run_log.events.add("checkpoint_failed", end)
        for number in (17, 18):
            logging.getLogger("train").warning("shard %d cannot be read <now>", number)
        run_log.stop(end, "signal")
        run_log.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for run, name in enumerate(("calm", "<restarted>")):
        (folder / name).mkdir()
        config = CONFIG | {"run_folder": str(folder / name), "lr": 0.01 * (run + 1)} | ({"new": True} if run else {})
        (folder / name / "config.json").write_text(json.dumps(config))
    train(folder / "calm", 0, 0, STEPS, last=True)
    train(folder / "<restarted>", 1, 0, 30, last=False)
    train(folder / "<restarted>", 1, 25, STEPS, last=True)
    return [folder / "calm", folder / "<restarted>"]


@pytest.fixture(scope="module")
def text(runs, tmp_path_factory):
    output = tmp_path_factory.mktemp("page") / "page.html"
    report.main(report.Config(runs=tuple(map(str, runs)), output=str(output)))
    return output.read_text(encoding="utf-8")


def test_nothing_is_fetched_from_elsewhere_and_nothing_of_a_run_is_markup(text):
    page = Page(text)
    assert len(page.addresses) == 6 and all(a.startswith("data:image/webp;base64,") for a in page.addresses)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert "<restarted>" not in text and "&lt;restarted&gt;" in text and "dog <b>" not in text and "<now>" not in text


def test_every_curve_of_every_run_is_drawn(runs, text):
    names = {name for run in map(read_run, runs) for name in run.curves}
    titles = "".join(Page(text).text)
    known = {
        "loss": "Training loss", "val_loss": "Validation loss", "grad_norm": "Gradient norm", "lr": "Learning rate",
        "samples_per_s": "Samples a second", "step_s": "Step time",
    }  # fmt: skip
    in_tables = {name for name in names if name.startswith("val_loss_")}
    for name in names - in_tables:
        assert known.get(name, name) in titles, name
    rows = {row[0]: row[1:] for row in Page(text).rows if row}
    assert rows["val_loss_zh"] == ["0.5", "0.5"] and rows["val_loss_animals"] == ["0.25", "0.25"]
    assert "Validation loss by diffusion time" in titles
    charts = [tag for tag, _ in Page(text).tags if tag == "svg"]
    assert len(charts) == len(names - in_tables) + 1


def test_the_overview_says_where_each_run_stands(runs, text):
    [calm, restarted] = [row for row in Page(text).rows if row and row[0] in ("calm", "<restarted>")][:2]
    last = f"{loss(0, STEPS - 1):.3g}"
    assert calm[1:6] == ["60 of 60", last, "0.271", "0.271 at 40", "8"] and calm[8] == "0"
    assert restarted[8] == "1"
    seconds = [run.goodput() for run in map(read_run, runs)]
    for row, of_run in zip((calm, restarted), seconds, strict=True):
        share = 100 * of_run["training"] / sum(of_run.values())
        assert float(row[7].removesuffix(" %")) == pytest.approx(share, abs=0.06)
    assert seconds[1]["lost"] > 0 == seconds[0]["lost"]  # steps 25 to 29, done twice


def test_phases_are_means_of_a_step(runs, text):
    phases = read_run(runs[0]).phases()
    assert {name: round(s, 9) for name, s in phases.items()} == {"data_wait": 0.1, "forward": 0.3, "other": 0.1}
    assert ["data wait", *["100.0 ms", "20.0 %"] * 2] in Page(text).rows


def test_what_differs_and_what_went_wrong(text):
    rows = Page(text).rows
    assert ["lr", "0.01", "0.02"] in rows and ["new", "null", "true"] in rows
    assert not [row for row in rows if row and row[0] in ("data", "run_folder") and len(row) == 3]
    what = [row[1:3] for row in rows if len(row) == 4]
    assert ["30", "checkpoint failed"] in what and ["30", "stop"] in what and ["25", "started again"] in what
    [again] = [row for row in rows if len(row) == 4 and row[2] == "started again"]
    assert "after: signal" in again[3] and "lost steps 5" in again[3]
    assert [row[3] for row in rows if row and row[0] == "2"] == ["shard 17 cannot be read <now>"]


def test_points_lie_where_the_numbers_say_and_no_peak_is_lost():
    xs = list(range(10000))
    ys = [1.0] * 5000 + [9.0] + [2.0] * 4999
    chart = line_chart([Line("a", xs, ys)])
    [points] = [v for tag, a in Page(chart).tags if tag == "polyline" for v in [a["points"]]]
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    assert len(places) < 1100
    (x0, y0), (x1, y1) = places[0], places[-1]
    peak_x, peak_y = min(places, key=lambda place: place[1])
    assert (peak_x - x0) / (x1 - x0) == pytest.approx(5000 / 9999, abs=1e-3)
    assert (y0 - peak_y) / (y0 - y1) == pytest.approx(8.0, rel=0.01)  # 9 - 1 over 2 - 1


def test_exposed_communication_is_a_phase_of_its_own(tmp_path):
    lines = [{"step": s, "step_s": 0.5, "forward_s": 0.3, "communication_s": 0.1} for s in (0, 10)]
    lines[1]["forward_exposed"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    phases = {name: round(s, 9) for name, s in read_run(tmp_path).phases().items()}
    assert phases == {"forward": 0.15, "communication": 0.25, "other": 0.1}


def test_runs_of_other_shapes(tmp_path):
    """A run that has just begun, one that stands in its first line, and no run at all."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text("{}")
    (tmp_path / "new" / "samples").mkdir()
    (tmp_path / "new" / "samples" / "step-00000001.png").write_bytes(b"\x89PNG half")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n{"step": 1, "lo')
    report.main(report.Config(runs=(str(tmp_path / "new"), str(tmp_path / "torn"))))
    text = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert "1.5" in "".join(Page(text).text) and "step 1: the picture cannot be read" in "".join(Page(text).text)
    with pytest.raises(ValueError, match="is no run folder"):
        report.main(report.Config(runs=(str(tmp_path),)))
    with pytest.raises(ValueError, match="name at least one"):
        report.main(report.Config(runs=()))
