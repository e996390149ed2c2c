"""What became of disturbed runs, as a table."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from parallel import checkpoint
from parallel.checked_writer import read_file
from parallel.checkpoint_retention import step_name
from parallel.checkpoint_storage import open_storage
from utils.exit_codes import NAMES
from utils.fault_injection import KINDS, Fault
from utils.run_state import checkpoint_folder
from utils.stop_note import TO_BE_CONTINUED


@dataclass
class Outcome:
    """One run.  All times are of time.monotonic().

    folder: of what is noted of it.  place: where its checkpoints, or all it writes, lie.  run: the run folder.
    """

    name: str
    faults: list[Fault]
    folder: Path
    place: str = "local"
    run: Path | None = None
    codes: list = field(default_factory=list)  # of each launch
    ended_at: list[float] = field(default_factory=list)  # when all ranks of a disturbed start had ended
    stepped_at: list[float] = field(default_factory=list)  # when a start had completed its first step
    took_s: float = 0.0

    def __post_init__(self):
        self.run = self.run or self.folder / "run"

    @property
    def struck_at(self) -> dict[str, float]:
        """Fault → when it happened, of those that did."""
        return {path.name: float(path.read_text()) for path in sorted((self.folder / "struck").glob("*"))}

    @property
    def noticed_s(self) -> float | None:
        """Seconds from the first fault until all ranks had ended, None if it ended no start."""
        return min(self.ended_at) - min(self.struck_at.values()) if self.ended_at and self.struck_at else None

    @property
    def began_again_s(self) -> float | None:
        """Seconds from that end to the next start's first step."""
        later = [at for at in self.stepped_at if self.ended_at and at > min(self.ended_at)]
        return min(later) - min(self.ended_at) if later else None

    def weights_are_those_of(self, other: "Outcome") -> bool | None:
        """Whether all tensors of the last checkpoint are equal to the bit; None if there is none of that step."""
        own, theirs = (newest_tensors(outcome) for outcome in (self, other))
        if own is None or theirs is None or own[0] != theirs[0]:
            return None
        same_names = own[1].keys() == theirs[1].keys()
        return same_names and all(torch.equal(tensor, theirs[1][name]) for name, tensor in own[1].items())

    def what_happened(self) -> str:
        """The run's story in a few words."""
        printed = (self.folder / "printed.txt").read_text(encoding="utf-8", errors="replace")
        restarts, stops = printed.count("starting all ranks again"), self.codes.count(TO_BE_CONTINUED)
        failed = len(re.findall(r"save \d+ in a row failed", printed))
        bad = _lines(self.run / "bad_steps.jsonl")
        steps = "a step" if bad == 1 else f"{bad} steps"
        back = printed.count("; back to step ") > 0
        words = [
            f"{restarts} × started again" if restarts else "", f"{stops} × saved, stopped, continued" if stops else "",
            f"{failed} × a save failed and was reported" if failed else "", f"{steps} skipped" if bad else "",
            "went back to an older checkpoint" if back else "",
        ]  # fmt: skip
        if len(self.struck_at) < len(self.faults):
            words.append(f"{len(self.faults) - len(self.struck_at)} did not strike")
        if reports := sorted(self.run.glob("hangs/*/report.txt")):
            words.append(reports[0].read_text(encoding="utf-8").splitlines()[1])
        if self.codes[-1] != 0:
            words.append(f"ended with {self.codes[-1]} ({NAMES.get(self.codes[-1], 'no success')})")
        return "; ".join(filter(None, words)) or "went on"

    def cells(self, undisturbed: "Outcome") -> list[str]:
        """Return the row of the table: what happened, noticed, began again, the final weights, in all."""
        same = {True: "bitwise equal", False: "others", None: "none"}[self.weights_are_those_of(undisturbed)]
        seconds = ["—" if s is None else f"{s:.1f}" for s in (self.noticed_s, self.began_again_s)]
        return [self.what_happened(), *seconds, f"{self.took_s - undisturbed.took_s:+.0f}", same]


def newest_tensors(outcome: Outcome) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Return the newest valid checkpoint's step and tensors."""
    storage = open_storage(checkpoint_folder(outcome.run))
    step = checkpoint.latest(storage)
    if step is not None and not storage.is_local:  # its tensors would be read one at a time
        name, storage_there = step_name(step), storage
        storage = open_storage(outcome.folder / "fetched")
        storage.path(name).mkdir(parents=True, exist_ok=True)
        for file in storage_there.sizes(name):
            (storage.path(name) / file).write_bytes(read_file(storage_there, name, file))
    return None if step is None else (step, checkpoint.load_tensors(storage.folder, step, ""))


def markdown(
    undisturbed: Outcome, outcomes: list[tuple[Outcome, list[str]]], command: list[str], left_out: dict[str, str]
) -> str:
    """Return the table, with the command that it was made by.

    outcomes: each with its cells.  left_out: kind of fault → why it has no row.
    """
    places = {"local": "local disk", "tmpfs": "tmpfs of its own", "s3": "S3"}
    lines = [
        "Made by `python -m tools.chaos`, of", "", "```", " ".join(command), "```", "",
        f"The undisturbed run took {undisturbed.took_s:.0f} s.  Ended: seconds from the fault until no rank of that "
        "start was left.  Next step: from there until the next start had completed a step; most of it is importing "
        "libraries and loading.  Costs: the whole run over the undisturbed one (negative: the machine was busier "
        "then).  Weights: every tensor of the last checkpoint, optimizer state included, against the undisturbed run; "
        "where a step is skipped they are to be others.", "",
        "| fault | rank, step, phase | checkpoints on | what happened | ended, s | next step, s | costs, s | weights |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]  # fmt: skip
    for outcome, cells in outcomes:
        first = outcome.faults[0]
        if len({fault.kind for fault in outcome.faults}) == 1:
            where = ", ".join(str(fault.step) for fault in outcome.faults)
            what = [f"{first.kind}: {KINDS[first.kind]}", f"{first.rank}, {where}, {first.phase}"]
        else:
            what = [", ".join(fault.kind for fault in outcome.faults), f"{len(outcome.struck_at)} of them struck"]
        lines.append(f"| {' | '.join([*what, places[outcome.place], *cells])} |")
    lines += ["", *(f"`{kind}` was not rehearsed: {why}." for kind, why in left_out.items())] if left_out else []
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- tools.chaos: begin -->", "<!-- tools.chaos: end -->"


def check_table(path: Path) -> None:
    """See to it that `write_table` can write the table, before it is made; makes the folder that it goes to.

    Raises: ValueError if it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", encoding="utf-8"):  # asks the file system itself: a mode's bits say nothing of a full one
            pass
        if is_new:
            path.unlink()
        _around_table(path)
    except OSError as error:
        raise ValueError(f"--table {path} cannot be written: {error}") from error


def write_table(path: Path, table: str) -> None:
    """Write the table to a file: between the lines BEGIN and END, if it is there and has them.

    Raises: ValueError if it is there and has none.
    """
    before, after = _around_table(path)
    path.write_text(f"{before}\n{table}\n{after}" if before else table, encoding="utf-8")


def _around_table(path: Path) -> tuple[str, str]:
    """Return a file's text up to the line BEGIN, and from END on; nothing of a file that is empty or not there."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    before, begin, rest = text.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    if begin and end:
        return before + begin, end + after
    if text:
        raise ValueError(f"--table {path} is there and has no lines {BEGIN} and {END} between which the table may go")
    return "", ""


def _lines(path: Path) -> int:
    return len([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]) if path.exists() else 0
