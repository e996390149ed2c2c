"""What became of disturbed runs, as a table."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from parallel import checkpoint
from utils.exit_codes import NAMES
from utils.fault_injection import KINDS, Fault
from utils.stop_note import TO_BE_CONTINUED


@dataclass
class Outcome:
    """One run.  All times are of time.monotonic()."""

    name: str
    faults: list[Fault]
    folder: Path
    codes: list = field(default_factory=list)  # of each launch
    ended_at: list[float] = field(default_factory=list)  # when all ranks of a disturbed start had ended
    stepped_at: list[float] = field(default_factory=list)  # when a start had completed its first step
    took_s: float = 0.0

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
        own, theirs = (newest_tensors(outcome.folder / "run" / "checkpoints") for outcome in (self, other))
        if own is None or theirs is None or own[0] != theirs[0]:
            return None
        same_names = own[1].keys() == theirs[1].keys()
        return same_names and all(torch.equal(tensor, theirs[1][name]) for name, tensor in own[1].items())

    def what_happened(self) -> str:
        """The run's story in a few words."""
        printed = (self.folder / "printed.txt").read_text(encoding="utf-8", errors="replace")
        restarts, stops = printed.count("starting all ranks again"), self.codes.count(TO_BE_CONTINUED)
        failed = printed.count("training goes on")
        bad = _lines(self.folder / "run" / "bad_steps.jsonl")
        words = [
            f"{restarts} × started again" if restarts else "", f"{stops} × saved, stopped, continued" if stops else "",
            f"{failed} × a save failed and was reported" if failed else "", f"{bad} × a step skipped" if bad else "",
        ]  # fmt: skip
        if reports := sorted((self.folder / "run").glob("hangs/*/report.txt")):
            words.append(reports[0].read_text(encoding="utf-8").splitlines()[1])
        if self.codes[-1] != 0:
            words.append(f"ended with {self.codes[-1]} ({NAMES.get(self.codes[-1], 'no success')})")
        return "; ".join(filter(None, words)) or "went on"

    def summary(self, undisturbed: "Outcome") -> str:
        """One line."""
        return " | ".join(self.cells(undisturbed))

    def cells(self, undisturbed: "Outcome") -> list[str]:
        """Return the row of the table: what happened, noticed, began again, the final weights, in all."""
        same = {True: "bitwise equal", False: "others", None: "none"}[self.weights_are_those_of(undisturbed)]
        seconds = ["—" if s is None else f"{s:.1f}" for s in (self.noticed_s, self.began_again_s)]
        return [self.what_happened(), *seconds, f"{self.took_s - undisturbed.took_s:+.0f}", same]


def newest_tensors(checkpoints: Path) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Return the newest valid checkpoint's step and tensors."""
    step = checkpoint.latest(checkpoints)
    return None if step is None else (step, checkpoint.load_tensors(checkpoints, step, ""))


def markdown(undisturbed: Outcome, outcomes: list[Outcome], command: list[str]) -> str:
    """Return the table, with the command that it was made by."""
    lines = [
        "# Faults and what became of them", "",
        "Made by `python -m tools.chaos`, of", "", "```", " ".join(command), "```", "",
        f"The undisturbed run took {undisturbed.took_s:.0f} s.  All ranks ended: seconds from the fault until no rank "
        "of that start was left.  Next step: from there until the next start had completed a step; most of it is "
        "importing libraries and loading.  Costs: the whole run over the undisturbed one.  Weights: every tensor of "
        "the last checkpoint, optimizer state included, against the undisturbed run.", "",
        "| fault | rank, step, phase | what happened | all ranks ended, s | next step, s | costs, s | weights |",
        "|---|---|---|---:|---:|---:|---|",
    ]  # fmt: skip
    for outcome in outcomes:
        if len(outcome.faults) == 1:
            (fault,) = outcome.faults
            what = [f"{fault.kind}: {KINDS[fault.kind]}", f"{fault.rank}, {fault.step}, {fault.phase}"]
        else:
            what = [", ".join(fault.kind for fault in outcome.faults), f"{len(outcome.struck_at)} of them struck"]
        lines.append(f"| {' | '.join([*what, *outcome.cells(undisturbed)])} |")
    return "\n".join(lines) + "\n"


def _lines(path: Path) -> int:
    return len([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]) if path.exists() else 0
