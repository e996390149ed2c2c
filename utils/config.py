"""Command line, errors and run folder of the scripts."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import tyro
from torch.distributed.elastic.multiprocessing.errors import record

from utils.exit_codes import ERROR, USER_ERROR, Stopped

Config = TypeVar("Config")
BACKGROUND_SAVE = "save of step"  # what the names of threads begin with that write a checkpoint
_SAVE_GRACE_S = 20.0  # torchrun gives its ranks 30 s to leave
_GRACE_S = 5.0  # a rank may be this much later than another at the same error


def parse(config_class: type[Config], description: str | None = None, args: Sequence[str] | None = None) -> Config:
    """Turn the command line into a config; `--help` shows each field's comment, an unknown flag is an error (exit 2).

    args: instead of sys.argv[1:].
    """
    is_first = _local_rank() == 0  # every rank parses, one speaks
    spec = getattr(
        sys.modules["__main__"], "__spec__", None
    )  # of `python -m tools.sample`, not of `python train_mmdit.py`
    prog = f"python -m {spec.name}" if spec else None
    try:
        return tyro.cli(
            config_class, prog=prog, description=description, args=args, use_underscores=True, console_outputs=is_first
        )
    except SystemExit as stop:
        if stop.code and not is_first:
            _let_the_first_rank_speak()
        raise


def check_values(config: object, at_least_1: Collection[str], choices: Mapping[str, Collection]) -> None:
    """Raise ValueError for a field whose value no later check would explain.

    at_least_1: names of fields that hold such numbers.  choices: what a field may be, by name.  No number may be NaN.
    """
    for name, value in vars(config).items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"--{name} must be a number, got {value}")
    for name in at_least_1:
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(config, name)}")
    for name, known in choices.items():
        if getattr(config, name) not in known:
            raise ValueError(f"--{name} must be one of {', '.join(map(str, known))}, got {getattr(config, name)!r}")


def run_main(main: Callable[[Config], None], config: Config) -> None:
    """Call main(config).  What a user can get wrong is printed once, without its traceback, and exits with 2.

    That is a ValueError raised by our own code; one from inside a library is a fault like any other and keeps its
    traceback.  TRACEBACK=1 in the environment shows the traceback of both.  `Stopped` exits with its own code.
    """
    try:
        record(main)(config)  # torchrun's table of failed ranks then has the error too
    except Stopped as stopped:  # agreed by all ranks
        _finish_saves()
        if _local_rank() != 0:
            _let_the_first_rank_speak()
        print(f"stopped: {stopped.message}", file=sys.stderr)
        _leave(stopped.code)
    except Exception as error:
        if not isinstance(error, ValueError) or _raised_in_library(error):
            traceback.print_exc()
            _leave(ERROR)
        _finish_saves()
        speaker = ""
        if _local_rank() != 0:
            _let_the_first_rank_speak()
            speaker = f" (rank {os.environ.get('RANK')})"
        if os.environ.get("TRACEBACK"):
            traceback.print_exc()
        print(f"error{speaker}: {error}", file=sys.stderr)
        _leave(USER_ERROR)


def _leave(code: int) -> NoReturn:
    """Exit at once: do not wait for reader threads, or for collectives that will not come."""
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


def _finish_saves() -> None:
    """Let a checkpoint that is being written be published: what ends all ranks alike need not cost one."""
    for thread in threading.enumerate():
        if thread.name.startswith(BACKGROUND_SAVE):
            thread.join(_SAVE_GRACE_S)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _let_the_first_rank_speak() -> None:
    """Wait.  Ranks fail alike, and the launcher stops all when the first of a machine has spoken and left.

    Who is still here after the wait failed alone.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # the launcher's, which utils.stop_signals would take note of
        signal.signal(number, signal.SIG_DFL)
    time.sleep(_GRACE_S)


def _raised_in_library(error: BaseException) -> bool:
    """Return whether the innermost frame of the error's traceback belongs to Python itself or an installed package."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    return not Path(file).is_absolute() or "site-packages" in file or file.startswith(sysconfig.get_path("stdlib"))


def write_run_folder(folder: Path, config: object, script: str, may_change: Collection[str] = ()) -> None:
    """Check that the folder is new or a run with this config; rank 0 writes what the run was made from.

    That is config.json with every field resolved, the script's own text and git.diff.  On resume the latest are kept
    under these names, and earlier ones that differ as config.1.json, config.2.json …

    Raises: ValueError, on every rank, if the folder belongs to a run with other settings that decide what is computed.
    """
    settings = _resolved(config)
    path = folder / "config.json"
    if path.exists():
        earlier = _defaults(type(config)) | json.loads(path.read_text())  # fields may have been added since
        changed = [
            f"--{name}: {earlier.get(name)!r} there, {settings.get(name)!r} here"
            for name in sorted(settings.keys() | earlier.keys())
            if earlier.get(name) != settings.get(name) and name not in may_change
        ]
        if changed:
            raise ValueError(
                f"{folder} is a run with another configuration:\n  " + "\n  ".join(changed)
                + "\nuse the same values to resume it, or another --run_folder for a new run"
            )  # fmt: skip
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        _write(folder / Path(script).name, Path(script).read_text(encoding="utf-8"))
        commit = _git("rev-parse", "HEAD", cwd=Path(script).resolve().parent)
        if commit is not None:
            diff = _git("diff", "HEAD", cwd=Path(script).resolve().parent)
            _write(folder / "git.diff", f"# commit {commit.strip()}\n{diff or ''}")
    except OSError as error:
        raise ValueError(f"--run_folder {folder} cannot be written: {error}") from error


def _resolved(config: object) -> dict:
    """Return the config as JSON would give it back: tuples as lists, paths as strings."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _defaults(config_class: type) -> dict:
    fields = dataclasses.fields(config_class)
    return json.loads(
        json.dumps({f.name: f.default for f in fields if f.default is not dataclasses.MISSING}, default=str)
    )


def _write(path: Path, text: str) -> None:
    """Write a file in one step; another text that it had before is kept beside it under the next number."""
    if path.exists():
        if path.read_text(encoding="utf-8") == text:
            return
        numbers = (n for n in range(1, 10**6) if not path.with_name(f"{path.stem}.{n}{path.suffix}").exists())
        shutil.copyfile(path, path.with_name(f"{path.stem}.{next(numbers)}{path.suffix}"))
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _git(*arguments: str, cwd: Path) -> str | None:
    """Return git's output, or None without git or outside a repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=cwd, capture_output=True, encoding="utf-8", errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
