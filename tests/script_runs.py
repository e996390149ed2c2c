"""Run one of the scripts with a command line, as its own process or several as under torchrun, for tests.

The processes are forked from a server that has imported the scripts' modules: they start at once, not after six seconds
of imports each.  What the agent of torchrun does besides (restarts, signals) is not here: see test_launch.py.
"""

import os
import runpy
import socket
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch

from tests.spawn import fork_server

REPOSITORY = Path(__file__).resolve().parent.parent
_GRACE_S = 5.0  # after one rank has ended otherwise than well, how long the others may take, as torchrun would wait
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def run_script(script: str, arguments: list[str], ranks: int = 1, timeout_s: float = 240.0) -> tuple[int, str]:
    """Run `script arguments…` on `ranks` processes of this machine, one thread each.

    script: relative to the repository.
    Returns the exit code of the first process that ended otherwise than with 0, or 0, and what all printed.  When one
    has failed the others are stopped, as torchrun does.
    Raises: TimeoutError, with what was printed.
    """
    context = fork_server()
    launcher = {}
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        printed, processes = Path(folder) / "printed", []
        environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
        try:
            for rank in range(ranks):
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                own = {name: str(value) for name, value in own.items()} if ranks > 1 else {}
                job = (script, arguments, environment | launcher | own, printed)
                processes.append(context.Process(target=_run, args=job, daemon=True))
                processes[-1].start()
            code = _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        text = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
    if code is None:
        raise TimeoutError(f"{script} took longer than {timeout_s} s; it printed:\n{text}")
    return code, text


def _wait(processes: list, deadline: float) -> int | None:
    """Return the first exit code that is not 0, or 0; None if the deadline passed first."""
    running, failure = {process.sentinel: process for process in processes}, 0
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return failure or None
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            if process.exitcode and not failure:
                code = process.exitcode
                failure = code if code > 0 else 128 - code
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return failure


def _run(script: str, arguments: list[str], environment: dict[str, str], printed: Path) -> None:
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    torch.set_num_threads(1)
    sys.argv = [str(REPOSITORY / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
