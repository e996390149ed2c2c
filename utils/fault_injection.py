"""Faults on purpose: what a long run meets in months, in one rank, at one phase of one step.  For tests and rehearsals.

`python -m tools.chaos` sets the variables; without INJECT_FAULTS nothing here does anything.

    INJECT_FAULTS='kill@rank=1,step=5,phase=backward; slow=2.5@rank=0,step=7,phase=data_wait'
    INJECT_FAULTS_FOLDER=/tmp/x      where it is noted what has happened and when (time.monotonic()): each fault happens
                                     once, also over restarts; without it, once a start
    INJECT_FAULTS_DISK=/tmp/disk     a file system for faults of the disk (utils/fault_disk.py)
    INJECT_FAULTS_STORE=http://…     a proxy of an S3 store (tools/faulty_store.py) that is told of faults of the store

Phases are those of the script's `PhaseTimer`.  A fault strikes when its phase is entered.  Faults of the disk last
until it is left, or longer if they have a value: a save in the background is no phase.
"""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.fault_disk import DISK_VARIABLE, FaultyDisk

VARIABLE, FOLDER_VARIABLE, STORE_VARIABLE = "INJECT_FAULTS", "INJECT_FAULTS_FOLDER", "INJECT_FAULTS_STORE"
KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP: the process stands still, as in a debugger or on a failing machine",
    "term": "SIGTERM to the launcher, as from a scheduler; without one to this process",
    "int": "SIGINT to this process",
    "usr1": "SIGUSR1 to this process, as Slurm's warning",
    "exit": "the process ends with exit code =N (3)",
    "error": "RuntimeError",
    "oom": "torch.OutOfMemoryError",
    "hang": "the training thread sleeps for ever",
    "slow": "the training thread sleeps =SECONDS (1)",
    "nan": "the next module's output is NaN",
    "badsample": "likewise, whenever the step is made: as with a sample that always gives NaN",
    "spike": "the next module's output is =FACTOR (1000) times what it was",
    "full": "every write fails: no space is left, for =SECONDS or the phase",
    "inodes": "no file can be made: no inode is left for one, for =SECONDS or the phase",
    "readonly": "the file system is read-only, for =SECONDS or the phase",
    "slowdisk": "every write takes =SECONDS (0.5) longer",
    "s3error": "S3 answers the next =N requests (3) with 503, slow down",
    "s3stall": "S3 does not answer the next =N requests (1)",
    "s3cut": "S3 breaks off in the middle of the next =N bodies (3), sent or received",
    "s3denied": "S3 refuses the next =N requests (1000) of this phase with 403, as for expired keys",
    "clock": "time.time() jumps by =SECONDS (-3600), for good",
}
_REPEATED = ("badsample",)  # also in later starts
_STORE = {"s3error": ("503", 3), "s3stall": ("stall", 1), "s3cut": ("cut", 3), "s3denied": ("403", 1000)}


_FAULT = re.compile(r"(\w+)(?:=(-?[\d.]+))?@rank=(\d+),step=(-?\d+),phase=(\w+)")


@dataclass(frozen=True)
class Fault:
    """One fault, to happen once."""

    kind: str
    rank: int
    step: int
    phase: str
    value: float | None = None

    @property
    def name(self) -> str:
        """The fault as it is written in the variable."""
        value = "" if self.value is None else f"={self.value:g}"
        return f"{self.kind}{value}@rank={self.rank},step={self.step},phase={self.phase}"


def parse_faults(text: str) -> list[Fault]:
    """Read the variable.  Raises: ValueError that names the part which is wrong."""
    faults = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _FAULT.fullmatch(part)
        if match is None:
            raise ValueError(f"a fault is KIND[=VALUE]@rank=R,step=S,phase=P, got {part!r}")
        kind, value, rank, step, phase = match.groups()
        if kind not in KINDS:
            raise ValueError(f"a fault's kind is one of {', '.join(KINDS)}, got {part!r}")
        faults.append(Fault(kind, int(rank), int(step), phase, None if value is None else float(value)))
    return faults


def injected_faults() -> "FaultInjector | None":
    """Return this rank's faults from the environment, or None."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    folder = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.mkdtemp(prefix="faults-"))
    return FaultInjector(parse_faults(text), int(os.environ.get("RANK", "0")), folder)


class FaultInjector:
    """The faults of one rank."""

    def __init__(self, faults: list[Fault], rank: int, folder: Path):
        """Raises: ValueError for a fault of a store without one that can be told of it."""
        self._faults, self._folder = [fault for fault in faults if fault.rank == rank], folder
        self._disk = FaultyDisk(Path(os.environ[DISK_VARIABLE]) if os.environ.get(DISK_VARIABLE) else None)
        self._store = os.environ.get(STORE_VARIABLE, "")
        self._denies = False
        for fault in faults:
            if fault.kind in _STORE and not self._store:
                raise ValueError(f"{fault.name} needs a store that fails to order: {STORE_VARIABLE}, see tools.chaos")
        folder.mkdir(parents=True, exist_ok=True)

    def strike(self, step: int, phase: str) -> None:
        """Let happen what is due as this phase begins."""
        due = [fault for fault in self._faults if (fault.step, fault.phase) == (step, phase)]
        for fault in [fault for fault in due if self._note(fault)]:  # all noted before the first breaks the disk
            self._happen(fault)

    def _note(self, fault: Fault) -> bool:
        """Note when a fault happens; return whether it is to happen: the first time, also over restarts, or always."""
        self._faults.remove(fault)
        try:
            with (self._folder / fault.name).open("x") as file:
                file.write(f"{time.monotonic()}\n")
        except FileExistsError:
            if fault.kind not in _REPEATED:
                return False
        print(f"injected fault: {fault.name}", file=sys.stderr, flush=True)
        return True

    def end_phase(self) -> None:
        """Let the faults that last for a phase end."""
        self._disk.heal_if_over()
        if self._denies:
            self._denies = False
            self._order("none", 0)

    def _happen(self, fault: Fault) -> None:
        value = fault.value
        match fault.kind:
            case "kill" | "stop" | "int" | "usr1":
                os.kill(os.getpid(), getattr(signal, f"SIG{fault.kind.upper()}"))
            case "term":
                os.kill(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(), signal.SIGTERM)
            case "exit":
                os._exit(3 if value is None else int(value))
            case "error":
                raise RuntimeError("an injected error")
            case "oom":
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            case "hang":
                while True:
                    time.sleep(3600)
            case "slow":
                time.sleep(1.0 if value is None else value)
            case "nan" | "badsample":
                _scale_next_output(float("nan"))
            case "spike":
                _scale_next_output(value or 1000.0)
            case "full":
                self._disk.full(value or 0.0)
            case "inodes":
                self._disk.without_inodes(value or 0.0)
            case "readonly":
                self._disk.read_only(value or 0.0)
            case "slowdisk":
                self._disk.slow(0.5 if value is None else value)
            case "s3error" | "s3stall" | "s3cut" | "s3denied":
                what, usual = _STORE[fault.kind]
                self._denies = fault.kind == "s3denied"
                self._order(what, usual if value is None else int(value))
            case "clock":
                real, jump = time.time, -3600.0 if value is None else value
                time.time = lambda: real() + jump

    def _order(self, what: str, count: int) -> None:
        """Tell the store what happens to its next requests."""
        content = json.dumps({"fault": what, "count": count}).encode()
        with urllib.request.urlopen(f"{self._store}/_fault", data=content, timeout=20):
            pass


def _scale_next_output(factor: float) -> None:
    """Multiply the output of the next module that returns one floating-point tensor."""

    def change(module, inputs, output):
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        with contextlib.suppress(KeyError):
            handle.remove()
        return output * factor

    handle = torch.nn.modules.module.register_module_forward_hook(change)
