"""A run folder read back: curves, time, restarts, faults, pictures; whatever of it is there, and can be read."""

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from utils.exposed_communication import without_communication
from utils.goodput import STATES
from utils.json_lines import JsonLines, is_step
from utils.plain_file import read_lines, read_text
from utils.run_events import valid_events

Curve = tuple[list[int], list[float]]  # steps, which increase, and values
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (WARNING|ERROR|CRITICAL) (.*)")
_EXPOSED = "_exposed"
_STEP_PICTURE = re.compile(r"step-([0-9]{1,15})\.png")
_MOST_S = 1e10  # three centuries: what claims to have taken longer is damaged
_MOST_CONFIG, _MOST_LOG_LINE, _MOST_MESSAGE = 2**24, 2**20, 2000  # bytes, bytes, characters
_MOST_KINDS = 10_000  # of warnings


@dataclass(frozen=True)
class Warnings:
    """Lines of train.log that differ only in numbers and names."""

    count: int
    first: str  # when
    last: str
    example: str


@dataclass(frozen=True)
class Run:
    """One run folder.  What an older or a broken run does not have is empty."""

    name: str
    config: dict
    curves: dict[str, Curve]  # by the names of metrics.jsonl; numbers that were not finite are left out
    non_finite: dict[str, list[int]]  # steps at which they were
    events: list[dict]
    pictures: dict[int, Path]  # by step
    warnings: list[Warnings] = field(default_factory=list)
    commit: str = ""
    left_out: dict[str, str] = field(default_factory=dict)  # by file: what of it could not be read

    @property
    def last_step(self) -> int:
        """The last step that is known of."""
        steps = [steps[-1] for steps, _ in self.curves.values() if steps]
        return max([*steps, *(event["step"] for event in self.events)], default=0)

    def starts(self) -> list[dict]:
        """The starts after the first."""
        return [e for e in self.events if e["event"] == "start" and e.get("reason") != "first"]

    def goodput(self) -> dict[str, float]:
        """Seconds by state over all starts; of each start its last line counts."""
        total, current = dict.fromkeys(STATES, 0.0), {}
        for event in [*self.events, {"event": "start"}]:
            if event["event"] == "start":
                total = {state: s + seconds_of(current.get(state)) for state, s in total.items()}
                current = {}
            elif event["event"] == "goodput":
                current = event
        return total

    def phases(self) -> dict[str, float]:
        """Mean seconds of a step by phase, over the logged steps; `other` is the rest of the step.

        Exposed communication is a phase of its own where steps were profiled (--metrics_port).
        """
        steps, seconds = self.curves.get("step_s", ([], []))
        if not steps:
            return {}
        between = ("checkpoint_s", "validation_s", "sampling_s")  # not part of step_s
        means = {
            name[:-2]: sum(map(seconds_of, values)) / len(steps)
            for name, (_, values) in self.curves.items()
            if name.endswith("_s") and not name.endswith("_per_s") and name != "step_s" and name not in between
        }
        exposed = {name.removesuffix(_EXPOSED): of for name, (_, of) in self.curves.items() if name.endswith(_EXPOSED)}
        shares = {phase: sum(min(max(share, 0.0), 1.0) for share in of) / len(of) for phase, of in exposed.items()}
        means = without_communication(means, shares)
        return means | {"other": max(0.0, sum(map(seconds_of, seconds)) / len(steps) - sum(means.values()))}


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises: ValueError if it is none: it has neither a config.json nor a metrics.jsonl, or it cannot be looked into.
    """
    try:
        is_run = _is_there(folder / "config.json") or _is_there(folder / "metrics.jsonl")
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from error
    if not is_run:
        raise ValueError(f"{folder} is no run folder: it has neither config.json nor metrics.jsonl")
    left_out: dict[str, str] = {}
    metrics, events = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "events.jsonl")
    curves, non_finite = _read_metrics(metrics, left_out)
    run = Run(
        name=folder.resolve().name,
        config=_read_config(folder / "config.json", left_out),
        curves=curves,
        non_finite=non_finite,
        events=valid_events(events),
        pictures=_find_pictures(folder / "samples", left_out),
        warnings=_read_warnings(folder / "train.log", left_out),
        commit=_read_commit(folder / "git.diff", left_out),
        left_out=left_out,
    )
    for lines in (metrics, events):
        if said := lines.problem or (f"damaged lines: {lines.num_damaged:,}" if lines.num_damaged else ""):
            left_out[lines.path.name] = ", ".join(filter(None, (said, left_out.get(lines.path.name))))
    return run


def seconds_of(value: object) -> float:
    """Return a value out of a file as seconds, 0 for what can be none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= _MOST_S else 0.0


def config_differences(runs: list[Run]) -> dict[str, list]:
    """Return {field: its value in each run} of the fields that are not the same in all; None where one has none."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    values = {name: [run.config.get(name) for run in runs] for name in names if name != "run_folder"}
    return {name: of_runs for name, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}


def _is_there(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def _noted(path: Path, left_out: dict[str, str]) -> Iterator[None]:
    """Note what keeps a file from being read, unless it is not there."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        left_out[path.name] = error.strerror or str(error) if isinstance(error, OSError) else "it is damaged"


def _read_config(path: Path, left_out: dict[str, str]) -> dict:
    found = {}
    with _noted(path, left_out):
        found = json.loads(read_text(path, _MOST_CONFIG))
        if not isinstance(found, dict):
            raise ValueError("no object")
    return found if isinstance(found, dict) else {}


def _read_commit(path: Path, left_out: dict[str, str]) -> str:
    with _noted(path, left_out):
        first, _, changes = read_text(path, _MOST_LOG_LINE).partition("\n")
        return first.strip().removeprefix("# commit ") + (" with local changes" if changes.strip() else "")
    return ""


def _find_pictures(folder: Path, left_out: dict[str, str]) -> dict[int, Path]:
    with _noted(folder, left_out), os.scandir(folder) as entries:
        found = ((_STEP_PICTURE.fullmatch(entry.name), entry.name) for entry in entries)
        return {int(match[1]): folder / name for match, name in found if match}
    return {}


def _read_metrics(lines: JsonLines, left_out: dict[str, str]) -> tuple[dict[str, Curve], dict[str, list[int]]]:
    """Return the curves, and the steps at which a number was not finite or too large for one.

    A step that is there again was done again, from a checkpoint: as in a resumed run's own file, what an earlier start
    wrote for it and for later ones does not count.  Texts and lists are no numbers, and of no curve.
    """
    curves: dict[str, Curve] = {}
    non_finite: dict[str, list[int]] = {}
    num_replaced = 0
    for line in lines:
        step = line.pop("step", None)
        if not is_step(step):
            lines.num_damaged += 1
            continue
        for name, value in line.items():
            if not (value is None or isinstance(value, int | float)):
                continue
            steps, numbers = curves.get(name, ((), ()))
            while steps and steps[-1] >= step:
                steps.pop()
                numbers.pop()
                num_replaced += 1
            missing = non_finite.get(name)
            while missing and missing[-1] >= step:
                missing.pop()
            if (number := _finite(value)) is None:
                non_finite.setdefault(name, []).append(step)
            else:
                steps, numbers = curves.setdefault(name, ([], []))
                steps.append(step)
                numbers.append(number)
    if num_replaced:
        left_out[lines.path.name] = f"numbers of steps that were done again: {num_replaced:,}"
    return (
        {name: curve for name, curve in curves.items() if curve[0]},
        {name: steps for name, steps in non_finite.items() if steps},
    )


def _finite(value: float | None) -> float | None:
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:  # of an integer
        return None


def _read_warnings(path: Path, left_out: dict[str, str]) -> list[Warnings]:
    """Return the warnings of a log, the most frequent kind first."""
    kinds: dict[str, Warnings] = {}
    with _noted(path, left_out):
        for line in read_lines(path, _MOST_LOG_LINE):
            match = _LOG_LINE.match((line or b"").decode("utf-8", errors="replace"))
            if not match:
                continue
            when, text = match[1], match[3].strip()[:_MOST_MESSAGE]
            kind = _kind(text)
            if kind not in kinds and len(kinds) >= _MOST_KINDS:
                left_out[path.name] = f"warnings after the first {_MOST_KINDS:,} kinds of them"
                continue
            seen = kinds.get(kind) or Warnings(0, when, when, text)
            kinds[kind] = Warnings(seen.count + 1, seen.first, when, seen.example)
    return sorted(kinds.values(), key=lambda warning: -warning.count)


def _kind(text: str) -> str:
    """Return a message without what differs from one to the next: words with a digit, a slash or a dot in them."""
    return " ".join("…" if re.search(r"[\d/\\.]", word) else word for word in text.split())
