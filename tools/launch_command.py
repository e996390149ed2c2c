"""The command lines of `./launch.sh slurm` and `./launch.sh k8s`: our flags, then a script with its own."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from utils.config import parse
from utils.exit_codes import USER_ERROR

Config = TypeVar("Config")


def read_command_line(config_class: type[Config], description: str) -> tuple[Config, list[str]]:
    """Return our config, and the script and its flags, from sys.argv; without a script exits like an unknown flag."""
    arguments = sys.argv[1:]
    scripts = [i for i, argument in enumerate(arguments) if argument.endswith(".py")]
    start = scripts[0] if scripts else len(arguments)
    cfg = parse(config_class, description, arguments[:start])  # answers --help
    command = arguments[start:]
    problem = (
        "which script? behind our flags: train_mmdit.py, or another .py file, and its flags" if not command else ""
    )
    if command and not Path(command[0]).is_file():
        problem = f"no script {command[0]} in {Path.cwd()}"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(USER_ERROR)
    return cfg, command


def run_folder(command: Sequence[str]) -> str | None:
    """Return what the script's command line says as its --run_folder; None if it says nothing."""
    return flag_value(command, "run_folder")


def flag_value(command: Sequence[str], flag: str) -> str | None:
    """Return what a command line says, last, as the value of a flag (named with _); None if it says nothing."""
    said = None
    for i, argument in enumerate(command):
        found = re.fullmatch(rf"--{flag.replace('_', '[_-]')}(?:=(.*))?", argument, re.DOTALL)
        if found:
            said = found[1] if found[1] is not None else "".join(command[i + 1 : i + 2])
    return said


def run_name(command: Sequence[str]) -> str:
    """Return the name of the script's run folder, or else the script's own."""
    folder = (run_folder(command) or "").replace("%a", "")
    return Path(folder).name.strip(" -_.") or Path(command[0]).stem
