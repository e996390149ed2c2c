"""TensorBoard itself over a run that was killed and resumed, by its data API, and in a real browser."""

import html
import io
import json
import math
import re
import string
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.deploy.browser import CHROMIUM, Browser
from tests.free_ports import free_ports
from utils.logging import RunLog
from utils.run_options import RunOptions

pytestmark = pytest.mark.deploy
PROMPTS = ("dog face", "狗脸", "a *starred* <b>prompt</b>", f"1. {string.punctuation} $x$")


@dataclass(frozen=True)
class Config(RunOptions):
    lr: float = 0.001
    data: str = "emoji_small"
    sample_prompts: tuple[str, ...] = PROMPTS


def train(folder: Path, start_step: int, end: int, value: float, finishes: bool) -> None:
    run_log = RunLog(folder, 50, start_step, is_main=True, config=Config())
    for step in range(start_step, end):
        run_log.observe(t=torch.linspace(0, 1, 16), caption_tokens=[3, 4, 4, 9])
        if step % 10 == 0:
            seen = {"val_loss": value, "val_loss_zh": value, "val_loss_t3": value, "val_loss_photos": value}
            run_log.scalars(step, seen)
            picture = np.zeros((64, 96, 3), np.uint8)
            picture[:, :, 0] = 200
            picture[:, 48:, 1] = np.arange(64, dtype=np.uint8)[:, None] * 3
            run_log.image(step, "samples", picture, PROMPTS)
        run_log.scalars(step, {"loss": value + math.sin(step / 5) / 4, "grad_norm": value, "lr": 0.001, "step_s": 0.1})
        run_log.progress(step + 1, {"loss": value})
    if finishes:
        run_log.close()
    else:  # killed: what was written is on the disk, and nothing was closed
        run_log._tensorboard._writer.flush()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "resumed"
    train(folder, 0, 40, 1.0, finishes=False)
    time.sleep(0.1)
    train(folder, 30, 50, 2.0, finishes=True)
    return folder


@pytest.fixture(scope="module", params=["true", "false"], ids=["data-server", "python"])
def board(request, run):
    """Return the address of TensorBoard, with either of its two readers."""
    port = free_ports()
    command = ["-m", "tensorboard.main", "--logdir", str(run), "--host", "127.0.0.1", "--port", str(port)]
    log = (run / "board.log").open("w")
    process = subprocess.Popen(
        [sys.executable, *command, f"--load_fast={request.param}"], stdout=log, stderr=subprocess.STDOUT
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while not ask(address, "scalars/tags"):
            assert process.poll() is None and time.monotonic() < deadline, (run / "board.log").read_text()
            time.sleep(0.2)
        yield address
    finally:
        process.kill()
        process.wait()
        log.close()


def ask(address: str, path: str, **parameters):
    url = f"{address}/data/plugin/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def test_curves_do_not_overlap_after_a_resume(board):
    [(name, tags)] = ask(board, "scalars/tags").items()
    assert set(tags) == {
        "train/loss", "optimizer/grad_norm", "optimizer/lr", "speed/step_s", "validation/val_loss",
        "validation_by_language/val_loss_zh", "validation_by_time/val_loss_t3",
        "validation_by_category/val_loss_photos",
    }  # fmt: skip
    points = [(step, value) for _, step, value in ask(board, "scalars/scalars", run=name, tag="optimizer/grad_norm")]
    assert points == [(step, 1.0 if step < 30 else 2.0) for step in range(50)]
    points = [(step, value) for _, step, value in ask(board, "scalars/scalars", run=name, tag="validation/val_loss")]
    assert points == [(0, 1.0), (10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]


def test_samples_with_their_prompts(board):
    [name] = ask(board, "scalars/tags")
    pictures = ask(board, "images/images", run=name, tag="samples", sample=0)
    assert [picture["step"] for picture in pictures] == [0, 10, 20, 30, 40]
    with urllib.request.urlopen(f"{board}/data/plugin/images/individualImage?{pictures[-1]['query']}") as answer:
        shown = np.asarray(Image.open(io.BytesIO(answer.read())).convert("RGB"))
    assert shown.shape == (64, 96, 3) and shown[0, 0].tolist() == [200, 0, 0]
    texts = ask(board, "text/text", run=name, tag="samples/prompts/text_summary")
    assert [text["step"] for text in texts] == [0, 10, 20, 30, 40]
    items = re.findall("<li>(.*?)</li>", texts[-1]["text"])
    assert [html.unescape(item) for item in items] == list(PROMPTS)


def test_histograms_config_and_summary(board):
    [name] = ask(board, "scalars/tags")
    for tag, low, high in (("data/t", 0, 1), ("data/caption_tokens", 3, 9)):
        points = ask(board, "histograms/histograms", run=name, tag=tag)
        assert [step for _, step, _ in points] == list(range(50))
        assert points[-1][2][0][0] == low and points[-1][2][-1][1] == high
    config = ask(board, "text/text", run=name, tag="run/config/text_summary")
    assert [text["step"] for text in config][-1] == 30
    assert "emoji_small" in config[-1]["text"] and "<td>lr</td>" in config[-1]["text"]
    [summary] = ask(board, "text/text", run=name, tag="run/summary/text_summary")
    assert summary["step"] == 50 and "goodput" in summary["text"]


@pytest.mark.skipif(not CHROMIUM, reason="no browser: apt-get install chromium")
def test_a_browser_draws_the_curves_and_the_pictures(board, tmp_path):
    browser = Browser(tmp_path)
    try:
        browser.open(f"{board}/?darkMode=false&tagFilter=samples%7Ctrain%2Floss#timeseries")
        browser.wait_for("[...document.querySelectorAll('image-card img')].some(i => i.naturalWidth === 96)")
        path = "[...document.querySelectorAll('scalar-card line-chart svg path')].map(p => p.getAttribute('d') || '')"
        lines = browser.wait_for(f"{path}.filter(d => d.split(/[ML]/).length > 40)")
        assert len(lines) in (1, 2)  # the curve, and smoothed; one line: no second one from before the resume
        # From left to right without a step back: curves of two starts that overlap would go back.
        places = [float(point.split(",")[0]) for point in re.split("[ML]", lines[0])[1:]]
        assert len(places) == 50 and places == sorted(places)
        drawn = np.asarray(Image.open(browser.screenshot(tmp_path / "page.png")).convert("RGB")).reshape(-1, 3)
        # The red and the yellow halves of the picture.
        red = (drawn[:, 0] > 180) & (drawn[:, 1] < 30) & (drawn[:, 2] < 30)
        yellow = (drawn[:, 0] > 180) & (drawn[:, 1] > 100) & (drawn[:, 2] < 30)
        assert red.sum() > 1000 and yellow.sum() > 500
    finally:
        browser.close()
