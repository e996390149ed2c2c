"""What a run leaves behind to read: metrics.jsonl, TensorBoard curves, sample grids, train.log, a progress bar."""

import json
import logging
import math
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

_PLAIN_EVERY_S = 10.0  # between progress lines where there is no terminal


class RunLog:
    """The log of one run.  Rank 0 writes; on other ranks every call does nothing, but warnings still reach stderr."""

    def __init__(self, folder: Path, num_steps: int, start_step: int, is_main: bool, rank: int = 0):
        self.folder, self.num_steps, self.is_main = folder, num_steps, is_main
        self._samples_seen = None
        _set_up_logger(folder, is_main, rank)
        if not is_main:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        (folder / "samples").mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "samples_seen.jsonl"):
            _drop_lines_from(folder / name, start_step)
        self._metrics = (folder / "metrics.jsonl").open("a")
        self._tensorboard = SummaryWriter(str(folder / "tb"), purge_step=start_step or None)
        self._interactive = sys.stderr.isatty()
        self._bar = tqdm(
            total=num_steps, initial=start_step, unit="step", disable=not self._interactive, dynamic_ncols=True
        )
        self._last_line = time.monotonic()
        self._start = (start_step, time.monotonic())

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write one line of metrics.jsonl and the same curves to TensorBoard; non-finite numbers become null."""
        if not self.is_main:
            return
        line = {"step": step} | {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            group = "validation" if name.startswith("val_") else "train"
            self._tensorboard.add_scalar(f"{group}/{name}", value, step)

    def progress(self, step: int, values: dict[str, float]) -> None:
        """Move the bar to `step` steps done, or print a plain line now and then where there is no terminal."""
        if not self.is_main:
            return
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        now = time.monotonic()
        if not self._interactive and (now - self._last_line >= _PLAIN_EVERY_S or step == self.num_steps):
            self._last_line = now
            first, began = self._start
            left = (now - began) / max(1, step - first) * (self.num_steps - step)
            logging.getLogger("train").info(
                "step %d/%d  %s  %d:%02d left", step, self.num_steps, shown, left // 60, left % 60
            )

    def image(self, step: int, name: str, picture: np.ndarray | None) -> None:
        """Write a uint8 (H, W, 3) picture to <name>/step-<step>.png and to TensorBoard."""
        if not self.is_main or picture is None:
            return
        path = self.folder / name / f"step-{step:08d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(picture).save(path)
        self._tensorboard.add_image(name, picture, step, dataformats="HWC")

    def samples(self, step: int, keys: list[str]) -> None:
        """Write the keys of a step's global batch, in order, to samples_seen.jsonl."""
        if not self.is_main:
            return
        if self._samples_seen is None:
            self._samples_seen = (self.folder / "samples_seen.jsonl").open("a")
        self._samples_seen.write(json.dumps({"step": step, "samples": keys}, ensure_ascii=False) + "\n")
        self._samples_seen.flush()

    def close(self) -> None:
        """Finish every file."""
        if self.is_main:
            self._bar.close()
            self._metrics.close()
            self._tensorboard.close()
            if self._samples_seen is not None:
                self._samples_seen.close()


class _TqdmHandler(logging.StreamHandler):
    """Writes above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _set_up_logger(folder: Path, is_main: bool, rank: int) -> None:
    logger = logging.getLogger("train")
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO)
    console = _TqdmHandler()
    console.setLevel(logging.INFO if is_main else logging.WARNING)
    console.setFormatter(logging.Formatter("%(message)s" if is_main else f"[rank {rank}] %(message)s"))
    logger.addHandler(console)
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / "train.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(file)


def _drop_lines_from(path: Path, start_step: int) -> None:
    """Keep the lines before `start_step`: what a stopped run wrote after its last checkpoint is computed again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] < start_step:
                kept.append(line + "\n")
        except (ValueError, KeyError):  # a line that a crash cut off
            continue
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(kept))
    beside.replace(path)
