"""A run folder read back: curves, time, restarts, faults, pictures; whatever of it is there."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from utils.exposed_communication import without_communication
from utils.goodput import STATES
from utils.run_events import read_events

Curve = tuple[list[int], list[float]]  # steps, values
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (WARNING|ERROR|CRITICAL) (.*)")
_EXPOSED = "_exposed"
_STEP_PICTURE = re.compile(r"step-(\d+)\.png")


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

    @property
    def last_step(self) -> int:
        """The last step that is known of."""
        steps = [steps[-1] for steps, _ in self.curves.values() if steps]
        return max([*steps, *(int(event.get("step", 0)) for event in self.events)], default=0)

    def starts(self) -> list[dict]:
        """The starts after the first."""
        return [e for e in self.events if e["event"] == "start" and e.get("reason") != "first"]

    def goodput(self) -> dict[str, float]:
        """Seconds by state over all starts; of each start its last line counts."""
        total, current = dict.fromkeys(STATES, 0.0), {}
        for event in [*self.events, {"event": "start"}]:
            if event["event"] == "start":
                total = {state: s + float(current.get(state, 0.0)) for state, s in total.items()}
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
            name[:-2]: sum(values) / len(steps)
            for name, (_, values) in self.curves.items()
            if name.endswith("_s") and not name.endswith("_per_s") and name != "step_s" and name not in between
        }
        exposed = {name.removesuffix(_EXPOSED): of for name, (_, of) in self.curves.items() if name.endswith(_EXPOSED)}
        means = without_communication(means, {phase: sum(of) / len(of) for phase, of in exposed.items()})
        return means | {"other": max(0.0, sum(seconds) / len(steps) - sum(means.values()))}


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises: ValueError if it is none: it has neither a config.json nor a metrics.jsonl.
    """
    if not (folder / "config.json").is_file() and not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} is no run folder: it has neither config.json nor metrics.jsonl")
    curves, non_finite = _read_metrics(folder / "metrics.jsonl")
    found = ((_STEP_PICTURE.fullmatch(path.name), path) for path in sorted((folder / "samples").glob("step-*.png")))
    difference = folder / "git.diff"
    commit = ""
    if difference.is_file():
        first, _, changes = difference.read_text(encoding="utf-8", errors="replace").partition("\n")
        commit = first.removeprefix("# commit ") + (" with local changes" if changes.strip() else "")
    return Run(
        name=folder.resolve().name,
        config=_read_json(folder / "config.json"),
        curves=curves,
        non_finite=non_finite,
        events=read_events(folder),
        pictures={int(match[1]): path for match, path in found if match},
        warnings=_read_warnings(folder / "train.log"),
        commit=commit,
    )


def config_differences(runs: list[Run]) -> dict[str, list]:
    """Return {field: its value in each run} of the fields that are not the same in all; None where one has none."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    values = {name: [run.config.get(name) for run in runs] for name in names if name != "run_folder"}
    return {name: of_runs for name, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_metrics(path: Path) -> tuple[dict[str, Curve], dict[str, list[int]]]:
    curves: dict[str, Curve] = {}
    non_finite: dict[str, list[int]] = {}
    if not path.is_file():
        return curves, non_finite
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                values = json.loads(line)
                step = int(values.pop("step"))
            except (ValueError, KeyError, TypeError, AttributeError):  # cut off by a crash
                continue
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    steps, numbers = curves.setdefault(name, ([], []))
                    steps.append(step)
                    numbers.append(float(value))
                elif value is None:
                    non_finite.setdefault(name, []).append(step)
    return curves, non_finite


def _read_warnings(path: Path) -> list[Warnings]:
    """Return the warnings of a log, the most frequent kind first."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if match := _LOG_LINE.match(line):
                text = match[3].strip()
                kinds.setdefault(_kind(text), []).append((match[1], text))
    found = [Warnings(len(seen), seen[0][0], seen[-1][0], seen[0][1]) for seen in kinds.values()]
    return sorted(found, key=lambda warning: -warning.count)


def _kind(text: str) -> str:
    """Return a message without what differs from one to the next: words with a digit, a slash or a dot in them."""
    return re.sub(r"\S*[\d/\\.]\S*", "…", text)
