"""What a run leaves behind to read: metrics.jsonl, events.jsonl, TensorBoard, pictures, train.log, a progress bar."""

import dataclasses
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from utils.console import remove_handlers, set_up_logging
from utils.goodput import Goodput
from utils.monitor import PROCESS_BEGAN, Monitor
from utils.phase_timer import PhaseTimer
from utils.run_events import RunEvents, restart_reason
from utils.run_options import RunOptions
from utils.save_watch import Saver, SaveWatch
from utils.tensorboard_log import TensorBoardLog
from utils.wandb_log import WandbLog, check_wandb

_PLAIN_EVERY_S = 10.0  # between progress lines where there is no terminal
_GOODPUT_EVERY_S = 60.0  # between its lines of events.jsonl
_MAX_OBSERVED = 100_000  # numbers kept for a histogram
log = logging.getLogger("train")


class RunLog:
    """The log of one run.  Rank 0 writes; other ranks only warn on stderr, and each has a monitor of its own.

    start_step: where the run begins or resumes.  What an earlier start wrote for this step and later ones goes, since
    those steps are done again: no number is ever in a file, or on a curve, twice.
    config: the script's.
    timer: says in which phase the process is.  saver: of the checkpoints.
    probe: asked after each step for what `Monitor.probe` takes.
    Raises: ValueError, on every rank, if it asks for wandb, which is not installed.
    """

    def __init__(
        self, folder: Path, num_steps: int, start_step: int, is_main: bool, rank: int = 0,
        config: RunOptions | None = None, timer: PhaseTimer | None = None, saver: Saver | None = None,
        probe: Callable[[int], Mapping[str, float]] = lambda step: {},
    ):  # fmt: skip
        self.folder, self.num_steps, self.start_step, self.is_main = folder, num_steps, start_step, is_main
        config = config or RunOptions()
        check_wandb(config.wandb)
        self._log_every = config.log_every
        set_up_logging(folder, is_main, rank)
        self.events = RunEvents(folder)
        self._timer, self._probe = timer or PhaseTimer(torch.device("cpu")), probe
        self.monitor = self._watch(rank, config)
        self._saves = SaveWatch(saver, self.monitor, self.events if is_main else None) if saver is not None else None
        if not is_main:
            return
        for name in ("metrics.jsonl", "samples_seen.jsonl"):
            _drop_lines_from(folder / name, start_step)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)  # a line at a time
        self._samples_seen = None
        self._tensorboard = TensorBoardLog(folder, start_step)
        resolved = dataclasses.asdict(config)
        self._tensorboard.table(start_step, "config", resolved)
        self._wandb = WandbLog(folder, config.wandb, resolved) if config.wandb else None
        self._observed: dict[str, list] = {}
        self._has_lost = False  # a line, a curve or a picture
        self._last_scalars: dict[str, float] = {}
        # Some pseudo-terminals have no size, and a bar on them no text.
        self._interactive = sys.stderr.isatty() and min(os.get_terminal_size(sys.stderr.fileno())) > 0
        self._bar = tqdm(
            total=num_steps, initial=start_step, unit="step", disable=not self._interactive, dynamic_ncols=True
        )
        self._started = self._last_line = self._last_goodput = time.monotonic()

    def _watch(self, rank: int, config: RunOptions) -> Monitor:
        """Return this rank's monitor, which knows what became of the run until now; rank 0 notes that it starts."""
        history, last = self.events.read(), self.events.last_step()
        if not self.is_main and history and history[-1]["event"] == "start" and history[-1]["time"] >= PROCESS_BEGAN:
            history.pop()  # rank 0 was faster: that is this start
        reason = restart_reason(history)
        # Nobody waited for a run that was finished.
        down_since = last[1] if last is not None and reason != "finished" else PROCESS_BEGAN
        down_s, done = max(0.0, time.time() - down_since), last[0] if last is not None else 0
        monitor = Monitor(
            self.folder.resolve().name, rank, config.metrics_port, config.metrics_host, str(self.folder),
            Goodput(done, down_s),
        )  # fmt: skip
        monitor.plan(self.num_steps, self.start_step, config.save_every, config.max_bad_samples)
        monitor.current_phase = lambda: self._timer.current
        monitor.between_ended_at = lambda: self._timer.between_ended_at
        if self.is_main:
            for event in history:
                if event["event"] == "start" and event.get("reason") != "first":
                    monitor.restart(str(event.get("reason")))
                if event["event"] == "stop" and event.get("reason") == "rollback":
                    monitor.rollback()
            if reason is not None:
                monitor.restart(reason)
            lost = max(0, done - self.start_step)
            self.events.add(
                "start", self.start_step, reason=reason or "first", lost_steps=lost, down_s=round(down_s, 3)
            )
        return monitor

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write one line of metrics.jsonl and the same curves to TensorBoard; non-finite numbers become null."""
        self.monitor.validation(values)
        if not self.is_main:
            return
        if "step_s" in values:
            values = values | {f"{phase}_exposed": share for phase, share in self._timer.exposed.shares.items()}
        line = {"step": step} | {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._lossy():
            self._metrics.write(json.dumps(line) + "\n")
        for curves in (self._tensorboard, self._wandb):
            if curves is not None:
                with self._lossy():
                    curves.scalars(step, values)
        self._last_scalars |= values
        if "loss" in values:
            for name, seen in self._observed.items():
                with self._lossy():
                    self._tensorboard.histogram(step, name, _flat(seen))
            self._observed.clear()
        if "val_loss" in values:
            log.info("step %d  validation loss %.4f", step, values["val_loss"])

    def observe(self, **values) -> None:
        """Keep numbers whose distribution TensorBoard shows at the next logged step; tensors or lists, of rank 0 alone.

        Nothing is read from the device before that step; where no step is logged, nothing is kept.
        """
        if self.is_main and self._log_every:
            for name, numbers in values.items():
                kept = self._observed.setdefault(name, [])
                if sum(map(len, kept)) < _MAX_OBSERVED:
                    kept.append(numbers)

    def progress(self, step: int, values: dict[str, float], numbers: Mapping[str, float] | None = None) -> None:
        """Move the bar to `step` steps done, or print a plain line now and then where there is no terminal.

        numbers: more of the last step for the monitor, as `Monitor.step` takes them; every rank gives its own times.
        """
        if numbers is not None:
            self.monitor.step(step, values | numbers)
            self.monitor.probe(self._probe(step))
            self.monitor.communication(self._timer.exposed.shares)
        if self._saves is not None:
            self._saves.look()
        if not self.is_main:
            return
        self.events.mark(step)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        now = time.monotonic()
        if now - self._last_goodput >= _GOODPUT_EVERY_S:
            self._last_goodput = now
            self._note_goodput(step)
        if now - self._last_line >= _PLAIN_EVERY_S or step == self.num_steps:
            self._last_line = now
            left_s = (now - self._started) / (step - self.start_step) * (self.num_steps - step)
            left = tqdm.format_interval(left_s)
            # A terminal has the bar; the line then goes to train.log alone.
            log.info(
                "step %d/%d  %s, %s left", step, self.num_steps, shown, left, extra={"file_only": self._interactive}
            )

    def image(self, step: int, name: str, picture: np.ndarray | None, prompts: Sequence[str] = ()) -> None:
        """Write a uint8 (H, W, 3) picture to <name>/step-<step>.png and to TensorBoard; ranks without one pass None."""
        if not self.is_main or picture is None:
            return
        path = self.folder / name / f"step-{step:08d}.png"
        with self._lossy():
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(picture).save(path)
        for curves in (self._tensorboard, self._wandb):
            if curves is not None:
                with self._lossy():
                    curves.image(step, name, picture, prompts)
        log.info("step %d  %s", step, path)

    def samples(self, step: int, keys: list[str]) -> None:
        """Write the keys of a step's global batch, in order, to samples_seen.jsonl."""
        if not self.is_main:
            return
        with self._lossy():
            if self._samples_seen is None:
                self._samples_seen = (self.folder / "samples_seen.jsonl").open("a", encoding="utf-8", buffering=1)
            self._samples_seen.write(json.dumps({"step": step, "samples": keys}, ensure_ascii=False) + "\n")

    def saving(self, step: int) -> AbstractContextManager:
        """Return a context whose block begins the save of `step`, or does it; training waits for the block."""
        return self._saves.saving(step) if self._saves is not None else nullcontext()

    def stop(self, step: int, reason: str) -> None:
        """Note why the run ends after `step` steps, all its saves done: one of `utils.run_events.REASONS`."""
        if self._saves is not None:
            self._saves.look()
        if self.is_main:
            self.events.mark_now(step)
            self._note_goodput(step)
            self.events.add("stop", step, reason=reason)

    def _note_goodput(self, step: int) -> None:
        self.events.add("goodput", step, **{s: round(x, 3) for s, x in self.monitor.goodput.seconds.items()})

    def check(self, step: int, num_bad: float, max_bad_samples: int) -> None:
        """Raise ValueError, on every rank alike, if there were too many bad samples so far, of all ranks."""
        if num_bad > max_bad_samples:
            raise ValueError(
                f"step {step}: {num_bad:.0f} bad samples, over --max_bad_samples; see {self.folder}/train.log"
            )

    def close(self) -> None:
        """Finish every file, and the monitor."""
        if self.is_main:
            self._bar.close()
            with self._lossy():
                self._metrics.close()
            with self._lossy():
                self._tensorboard.table(self.num_steps, "summary", self._summary())
            for written in (self._tensorboard, self._wandb, self._samples_seen):
                if written is not None:
                    with self._lossy():
                        written.close()
        self.monitor.close()
        self.events.close()
        remove_handlers()

    @contextmanager
    def _lossy(self) -> Iterator[None]:
        """Let the block fail to write: no curve is worth a run.  The file keeps some KiB and tries again with the next.

        Warns when it begins to fail.
        """
        try:
            yield
        except OSError as error:
            if not self._has_lost:
                log.warning("cannot write to %s: %s; training goes on, its curves may have gaps", self.folder, error)
            self._has_lost = True

    def _summary(self) -> dict[str, object]:
        """Return what there is to say of the run in a few lines."""
        names = ("loss", "val_loss", "plan_loss", "val_plan_loss", "val_plan_exact", "samples", "samples_per_s", "mfu")
        found: dict[str, object] = {"steps": self.num_steps, "steps of this start": self.num_steps - self.start_step}
        found |= {n: f"{self._last_scalars[n]:.4g}" for n in names if n in self._last_scalars}
        found |= {f"seconds: {state}": f"{s:.1f}" for state, s in self.monitor.goodput.seconds.items()}
        return found | {"goodput": f"{self.monitor.goodput.ratio():.1%}"}

    def done(self, checkpoint: Path | None, try_it: str) -> None:
        """Finish every file and say where what was made lies; try_it: a module's command line, without --run."""
        self.monitor.end(self._timer.collect())
        self.stop(self.num_steps, "finished")
        self.close()
        if not self.is_main:
            return
        print(f"done: {self.num_steps} steps")
        if (pictures := self.folder / "samples").is_dir():
            print(f"  pictures    {pictures}")
        print(f"  curves      .venv/bin/tensorboard --logdir {self.folder}")
        if checkpoint is not None:
            print(f"  checkpoint  {checkpoint}")
            print(f"  try it      ./launch.sh -m {try_it}")


def _flat(numbers: Sequence) -> np.ndarray:
    """Return lists and tensors of numbers as one array."""
    return np.concatenate([np.asarray(x.cpu() if hasattr(x, "cpu") else x, dtype=np.float64) for x in numbers])


def _drop_lines_from(path: Path, start_step: int) -> None:
    """Cut the file before the first line of `start_step` or later, or the one at its end that a crash left incomplete.

    Another line that is damaged, as after a power cut, stays, and whoever reads the file passes over it.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        keep = 0
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) >= start_step:
                break
            keep += len(line)
        file.truncate(keep)


def _step_of(line: bytes) -> float:
    """Return the step of a line of metrics.jsonl, -1 of one that is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1.0
