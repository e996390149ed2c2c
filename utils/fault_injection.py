"""Faults on purpose: what a long run meets in months, in one rank, at one phase of one step.  For tests and rehearsals.

`python -m tools.chaos` sets the two variables; without INJECT_FAULTS nothing here does anything.

    INJECT_FAULTS='kill@rank=1,step=5,phase=backward; slow=2.5@rank=0,step=7,phase=data_wait'
    INJECT_FAULTS_FOLDER=/tmp/x      where it is noted what has happened and when (time.monotonic()): each fault happens
                                     once, also over restarts; without it, once a start

Phases are those of the script's `PhaseTimer`.  A fault strikes when its phase is entered.  Faults of the disk last
until it is left, and hit what Python code of this process writes: `open`, `os.open`, `os.write`, not a library in C.
"""

import builtins
import contextlib
import errno
import io
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

VARIABLE, FOLDER_VARIABLE = "INJECT_FAULTS", "INJECT_FAULTS_FOLDER"
KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP: the process stands still, as in a debugger or on a failing machine",
    "term": "SIGTERM to the launcher, as from a scheduler",
    "int": "SIGINT to this process",
    "usr1": "SIGUSR1 to this process, as Slurm's warning",
    "exit": "the process ends with exit code =N (3)",
    "error": "RuntimeError",
    "oom": "torch.OutOfMemoryError",
    "hang": "the training thread sleeps for ever",
    "slow": "the training thread sleeps =SECONDS (1)",
    "nan": "the next module's output is NaN",
    "spike": "the next module's output is =FACTOR (1000) times what it was",
    "full": "every write fails: no space is left",
    "inodes": "no file can be made: no space is left for one",
    "readonly": "the file system is read-only",
    "slowdisk": "every write takes =SECONDS (0.5) longer",
    "clock": "time.time() jumps by =SECONDS (-3600), for good",
}


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
        self._faults, self._folder = [fault for fault in faults if fault.rank == rank], folder
        self._restore: list[Callable[[], None]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def strike(self, step: int, phase: str) -> None:
        """Let happen what is due as this phase begins."""
        due = [fault for fault in self._faults if (fault.step, fault.phase) == (step, phase)]
        for fault in [fault for fault in due if self._note(fault)]:  # all noted before the first breaks the disk
            self._happen(fault)

    def _note(self, fault: Fault) -> bool:
        """Note when a fault happens; return whether it is the first time, also over restarts."""
        self._faults.remove(fault)
        try:
            with (self._folder / fault.name).open("x") as file:
                file.write(f"{time.monotonic()}\n")
        except FileExistsError:
            return False
        print(f"injected fault: {fault.name}", file=sys.stderr, flush=True)
        return True

    def end_phase(self) -> None:
        """Let the faults that last for a phase end."""
        while self._restore:
            self._restore.pop()()

    def _happen(self, fault: Fault) -> None:
        value = fault.value
        match fault.kind:
            case "kill" | "stop" | "int" | "usr1":
                os.kill(os.getpid(), getattr(signal, f"SIG{fault.kind.upper()}"))
            case "term":
                os.kill(os.getppid(), signal.SIGTERM)
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
            case "nan" | "spike":
                _scale_next_output(float("nan") if fault.kind == "nan" else value or 1000.0)
            case "full":
                self._patch_writes(_failing(errno.ENOSPC))
            case "slowdisk":
                self._patch_writes(_late(0.5 if value is None else value))
            case "inodes":
                self._patch_creation(errno.ENOSPC)
            case "readonly":
                self._patch_creation(errno.EROFS)
                for name in ("rename", "replace", "unlink", "remove", "rmdir"):
                    self._replace(os, name, _failing(errno.EROFS)(getattr(os, name)))
            case "clock":
                real, jump = time.time, -3600.0 if value is None else value
                time.time = lambda: real() + jump

    def _patch_writes(self, change: Callable[[Callable], Callable]) -> None:
        """Change os.write, and open for writing in place of the writes of what it opens."""
        self._replace(os, "write", change(os.write))
        self._patch_open(change)

    def _patch_creation(self, number: int) -> None:
        fail, real = _failing(number), os.open

        def opened(path, flags, *args, **kwargs):
            return (fail(real) if flags & os.O_CREAT else real)(path, flags, *args, **kwargs)

        self._replace(os, "open", opened)
        self._replace(os, "mkdir", fail(os.mkdir))
        self._patch_open(fail)

    def _patch_open(self, change: Callable[[Callable], Callable]) -> None:
        real = io.open

        def opened(file, mode="r", *args, **kwargs):
            return (change(real) if set(mode) & set("wax+") else real)(file, mode, *args, **kwargs)

        self._replace(io, "open", opened)
        self._replace(builtins, "open", opened)

    def _replace(self, owner, name: str, new) -> None:
        old = getattr(owner, name)
        setattr(owner, name, new)
        self._restore.append(lambda: setattr(owner, name, old))


def _failing(number: int) -> Callable[[Callable], Callable]:
    def change(real):
        def fail(first, *args, **kwargs):
            raise OSError(number, os.strerror(number), str(first) if isinstance(first, str | Path) else None)

        return fail

    return change


def _late(seconds: float) -> Callable[[Callable], Callable]:
    def change(real):
        def late(*args, **kwargs):
            time.sleep(seconds)
            return real(*args, **kwargs)

        return late

    return change


def _scale_next_output(factor: float) -> None:
    """Multiply the output of the next module that returns one floating-point tensor."""

    def change(module, inputs, output):
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        with contextlib.suppress(KeyError):
            handle.remove()
        return output * factor

    handle = torch.nn.modules.module.register_module_forward_hook(change)
