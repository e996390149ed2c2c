"""What a run leaves behind to read: metrics.jsonl, TensorBoard curves, sample grids, train.log, a progress bar."""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

_PLAIN_EVERY_S = 10.0  # between progress lines where there is no terminal
_SPEED = ("step_s", "data_wait_s", "samples_per_s", "tokens_per_s", "tflops", "mfu", "mem_gib")
log = logging.getLogger("train")
_handlers: list[logging.Handler] = []  # ours, on the root logger


class RunLog:
    """The log of one run.  Rank 0 writes; on other ranks every call does nothing, but warnings still reach stderr.

    start_step: where the run begins or resumes.  What an earlier start wrote for this step and later ones goes, since
    those steps are done again: no number is ever in a file, or on a curve, twice.
    """

    def __init__(self, folder: Path, num_steps: int, start_step: int, is_main: bool, rank: int = 0):
        self.folder, self.num_steps, self.start_step, self.is_main = folder, num_steps, start_step, is_main
        set_up_logging(folder, is_main, rank)
        if not is_main:
            return
        from torch.utils.tensorboard import SummaryWriter  # not before it is needed: slow, and rank 0's alone

        for name in ("metrics.jsonl", "samples_seen.jsonl"):
            _drop_lines_from(folder / name, start_step)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)  # a line at a time
        self._samples_seen = None
        self._tensorboard = SummaryWriter(str(folder / "tb"), purge_step=start_step, flush_secs=10)
        # Some pseudo-terminals have no size, and a bar on them no text.
        self._interactive = sys.stderr.isatty() and min(os.get_terminal_size(sys.stderr.fileno())) > 0
        self._bar = tqdm(
            total=num_steps, initial=start_step, unit="step", disable=not self._interactive, dynamic_ncols=True
        )
        self._started = self._last_line = time.monotonic()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write one line of metrics.jsonl and the same curves to TensorBoard; non-finite numbers become null."""
        if not self.is_main:
            return
        line = {"step": step} | {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._metrics.write(json.dumps(line) + "\n")
        for name, value in values.items():
            group = "validation" if name.startswith("val_") else "speed" if name in _SPEED else "train"
            self._tensorboard.add_scalar(f"{group}/{name}", value, step)
        if "val_loss" in values:
            log.info("step %d  validation loss %.4f", step, values["val_loss"])

    def progress(self, step: int, values: dict[str, float]) -> None:
        """Move the bar to `step` steps done, or print a plain line now and then where there is no terminal."""
        if not self.is_main:
            return
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        now = time.monotonic()
        if now - self._last_line >= _PLAIN_EVERY_S or step == self.num_steps:
            self._last_line = now
            left_s = (now - self._started) / (step - self.start_step) * (self.num_steps - step)
            left = tqdm.format_interval(left_s)
            # A terminal has the bar; the line then goes to train.log alone.
            log.info(
                "step %d/%d  %s, %s left", step, self.num_steps, shown, left, extra={"file_only": self._interactive}
            )

    def image(self, step: int, name: str, picture: np.ndarray | None) -> None:
        """Write a uint8 (H, W, 3) picture to <name>/step-<step>.png and to TensorBoard; ranks without one pass None."""
        if not self.is_main or picture is None:
            return
        path = self.folder / name / f"step-{step:08d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(picture).save(path)
        self._tensorboard.add_image(name, picture, step, dataformats="HWC")
        log.info("step %d  %s", step, path)

    def samples(self, step: int, keys: list[str]) -> None:
        """Write the keys of a step's global batch, in order, to samples_seen.jsonl."""
        if not self.is_main:
            return
        if self._samples_seen is None:
            self._samples_seen = (self.folder / "samples_seen.jsonl").open("a", encoding="utf-8", buffering=1)
        self._samples_seen.write(json.dumps({"step": step, "samples": keys}, ensure_ascii=False) + "\n")

    def check(self, step: int, numbers: Mapping[str, float], num_bad: float, max_bad_samples: int) -> None:
        """Raise ValueError, on every rank alike, if the run must not take this step.

        numbers: losses and gradient norms by name.  num_bad: bad samples so far, of all ranks.
        """
        if not all(map(math.isfinite, numbers.values())):
            raise ValueError(
                f"step {step}: {', '.join(f'{name} {number}' for name, number in numbers.items())}; stopped before the "
                "weights changed. Lower the learning rate, or look at the step's samples (--log_samples); the same "
                "command resumes from the last save"
            )
        if num_bad > max_bad_samples:
            raise ValueError(
                f"step {step}: {num_bad:.0f} bad samples, over --max_bad_samples; see {self.folder}/train.log"
            )

    def close(self) -> None:
        """Finish every file."""
        if self.is_main:
            self._bar.close()
            self._metrics.close()
            self._tensorboard.close()
            if self._samples_seen is not None:
                self._samples_seen.close()
        _remove_handlers()

    def done(self, checkpoint: Path | None, try_it: str) -> None:
        """Finish every file and say where what was made lies; try_it: a module's command line, without --run."""
        self.close()
        if not self.is_main:
            return
        print(f"done: {self.num_steps} steps\n  pictures    {self.folder / 'samples'}")
        print(f"  curves      .venv/bin/tensorboard --logdir {self.folder}")
        if checkpoint is not None:
            print(f"  checkpoint  {checkpoint}")
            print(f"  try it      ./launch.sh -m {try_it}")


class _Console(logging.Handler):
    """Writes to stderr, above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "file_only", False):
            level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
            tqdm.write(level + self.format(record), file=sys.stderr)


def set_up_logging(folder: Path, is_main: bool, rank: int = 0) -> None:
    """Send our messages, and warnings of libraries, to stderr and train.log; of other ranks than 0 only warnings.

    May be called again, and before there is a `RunLog`.
    """
    _remove_handlers()
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "" if is_main else f"[rank {rank}] "
    console, file = _Console(), logging.FileHandler(folder / "train.log", encoding="utf-8", delay=True)
    console.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s"))
    for handler in (console, file):
        handler.setLevel(logging.INFO if is_main else logging.WARNING)
        logging.getLogger().addHandler(handler)
        _handlers.append(handler)
    log.setLevel(logging.INFO)


def _remove_handlers() -> None:
    while _handlers:
        handler = _handlers.pop()
        logging.getLogger().removeHandler(handler)
        handler.close()


def _drop_lines_from(path: Path, start_step: int) -> None:
    """Cut the file before the first line of `start_step` or later, or the first that a crash left incomplete."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        keep = 0
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= start_step:
                break
            keep += len(line)
        file.truncate(keep)
