"""Write and submit a Slurm batch file: deploy/slurm/train.sbatch with its own lines filled in.

    ./launch.sh slurm --nodes 4 --gpus 8 --time 24:00:00 train_mmdit.py --tp 4 --run_folder /shared/runs/a
    ./launch.sh slurm --nodes 4 --print train_mmdit.py ...                            show it, submit nothing
    ./launch.sh slurm --array 0-2 train_mmdit.py --seed %a --run_folder runs/seed-%a  %a: the array task's number

What stands behind the script is the script's.  The file and the logs lie in runs/slurm/.
"""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.launch_command import read_command_line, run_folder, run_name
from utils.config import run_main

TEMPLATE = Path(__file__).parent.parent / "deploy/slurm/train.sbatch"
FOLDER = Path("runs/slurm")
# What a flag of ours decides, since more than one line depends on it.
_OURS = {
    "nodes": "nodes", "gpus-per-node": "gpus", "time": "time", "signal": "save_s", "array": "array",
    "job-name": "job_name", "partition": "partition", "account": "account", "exclusive": "exclusive",
}  # fmt: skip
_TASKS = ("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket")


@dataclass(frozen=True)
class Config:
    nodes: int = 1  # machines
    gpus: int = 8  # of each; one process each.  0: none, train on CPUs
    processes: int = 2  # of each machine with --gpus 0
    time: str = "24:00:00"  # limit of one start; the job saves before it and goes back into the queue
    save_s: int = 600  # how long before the limit the ranks are told to save and leave
    exclusive: bool = True  # whole machines; without: also --sbatch cpus-per-task=… mem=…
    partition: str = ""  # "" = the cluster's default
    account: str = ""
    job_name: str = ""  # "" = the run folder's name
    array: str = ""  # such as 0-7 or 0-7%2; %a in the script's flags is then the task's number
    sbatch: tuple[str, ...] = ()  # more of sbatch's options, without --: constraint=h100 mem=0
    print: bool = False  # show the batch file, submit nothing


def batch_file(cfg: Config, command: Sequence[str], template: str, project: Path) -> str:
    """Return the batch file's text.

    command: the script and its flags.  template: the text of deploy/slurm/train.sbatch.  project: where to start it.
    Raises: ValueError for numbers, times and options that cannot be.
    """
    name = cfg.job_name or run_name(command)
    _check(cfg, {"job_name": name, "partition": cfg.partition, "account": cfg.account, "chdir": str(project)})
    if cfg.array and "%a" not in (run_folder(command) or " ".join(command)):
        raise ValueError("--array: every task needs a run folder of its own; say --run_folder with %a in it")
    options = {
        "job-name": name,
        "nodes": cfg.nodes,
        "gpus-per-node": cfg.gpus,
        "exclusive": None if cfg.exclusive else "",
        "mem": "0" if cfg.exclusive else "",
        "time": cfg.time,
        "signal": f"B:USR1@{cfg.save_s}",
        "output": FOLDER / "%j.log",
        "chdir": project,
        "partition": cfg.partition,
        "account": cfg.account,
        "array": cfg.array,
    }
    options |= dict(option.split("=", 1) if "=" in option else (option, None) for option in cfg.sbatch)
    header, *rest = template.partition("#SBATCH")
    lines = "".join(rest).splitlines()
    for name, value in options.items():
        option = f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_quote_option(str(value))}"
        there = [i for i, line in enumerate(lines) if re.match(rf"#SBATCH --{re.escape(name)}\b", line)]
        if value in ("", 0):
            lines = [line for i, line in enumerate(lines) if i not in there]
        elif there:
            lines[there[0]] = re.sub(r"#SBATCH \S+", lambda _, option=option: option, lines[there[0]])
        else:
            lines.insert(_last_option(lines) + 1, option)
    given = [] if cfg.gpus else [f"export NGPU={cfg.processes}"]
    given += [f"LOGS={FOLDER}/$SLURM_JOB_ID", f"set -- {' '.join(_quote(part, bool(cfg.array)) for part in command)}"]
    end = _last_option(lines) + 1
    made = "# Made by ./launch.sh slurm from deploy/slurm/train.sbatch; sbatch takes it as it is."
    return "\n".join(["#!/usr/bin/env bash", "#", made, "#", *lines[:end], "", *given, *lines[end:]]) + "\n"


def _last_option(lines: list[str]) -> int:
    return max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))


def _quote_option(value: str) -> str:
    """Return the value as sbatch reads it, which takes a backslash for an escape also between single quotes."""
    return shlex.quote(value.replace("\\", "\\\\"))


def _quote(argument: str, in_array: bool) -> str:
    """Return the argument as the shell reads it; in an array %a becomes the task's number."""
    parts = argument.split("%a") if in_array else [argument]
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part or len(parts) == 1 else "" for part in parts)


def _check(cfg: Config, texts: Mapping[str, str]) -> None:
    """texts: what else goes into the file's options; a line break would begin another option, or end them all."""
    for name, least in (("nodes", 1), ("gpus", 0), ("processes", 1), ("save_s", 1)):
        if getattr(cfg, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(cfg, name)}")
    if _seconds(cfg.time) < 2 * cfg.save_s:
        raise ValueError(
            f"--time {cfg.time} leaves less time to train than to save (--save_s {cfg.save_s}); raise it, lower that"
        )
    for name, text in texts.items():
        if not text.isprintable():
            where = "this folder's path" if name == "chdir" else f"--{name}"
            raise ValueError(f"{where} must be one line of text, got {text!r}")
    if cfg.array and not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%[1-9]\d*)?", cfg.array):
        raise ValueError(f"--array must be task numbers such as 0-7, 1,3,5 or 0-7%2, got {cfg.array!r}")
    for option in cfg.sbatch:
        if (flag := _OURS.get(option.partition("=")[0])) is not None:
            raise ValueError(f"--sbatch {option}: say it with --{flag}, which the batch file's other lines follow")
        if option.partition("=")[0] in _TASKS:
            raise ValueError(f"--sbatch {option}: a node has one task, torchrun, which starts --gpus processes")
        if not re.fullmatch(r"[a-z][a-z-]+(=.+)?", option) or not option.isprintable():
            raise ValueError(f"--sbatch takes NAME=VALUE or NAME, without --, such as constraint=h100; got {option!r}")


def _seconds(limit: str) -> int:
    """Return Slurm's notation of a time in seconds: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        raise ValueError(f"--time must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES], got {limit!r}")
    days, *parts = (int(part) for part in found.groups() if part is not None)
    if found[1] is None:
        parts, days = [days, *parts], 0
        parts = [0, *parts] if len(parts) < 3 else parts  # without days and hours the first is minutes
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def main(cfg: Config, command: Sequence[str]) -> None:
    text = batch_file(cfg, command, TEMPLATE.read_text(encoding="utf-8"), Path.cwd())
    if cfg.print:
        print(text, end="")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError("no sbatch here: submit from a login node of the cluster, or look with --print") from None
    if done.returncode:
        raise ValueError(f"sbatch refused the job: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    path = FOLDER / f"{job}.sbatch"
    path.write_text(text, encoding="utf-8")
    print(f"job {job}\n  batch file  {path}\n  log         {FOLDER}/{job}.log, the nodes' in {FOLDER}/{job}/")
    print(
        f"  watch       squeue --job {job}\n  save, stop  touch {shlex.quote(run_folder(command) or 'RUN_FOLDER')}/STOP"
    )
    print(f"  save, requeue  scancel --signal=USR1 --batch {job}")


if __name__ == "__main__":
    config, script = read_command_line(Config, __doc__)
    run_main(lambda cfg: main(cfg, script), config)
