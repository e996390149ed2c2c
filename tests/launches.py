"""Run `utils.torchrun` as its own process, forked from a server that has imported it, for tests."""

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.spawn import fork_server

REPOSITORY = Path(__file__).resolve().parent.parent


def start_launcher(arguments: list[str], printed: Path, num_ranks: int = 2) -> BaseProcess:
    """Start `torchrun arguments…` for ranks of this machine, with this process's environment.

    printed: the file that gets what it and its ranks print.
    """
    process = fork_server().Process(target=_launch, args=(arguments, printed, num_ranks, dict(os.environ)))
    process.start()
    return process


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait.  Raises: TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {timeout_s} s")
        time.sleep(0.02)


def _launch(arguments: list[str], printed: Path, num_ranks: int, environment: dict[str, str]) -> None:
    from utils import torchrun

    os.environ.clear()
    os.environ.update(environment | {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"})
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    sys.argv = [
        "torchrun", f"--nproc_per_node={num_ranks}", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0",
        "--local_addr=127.0.0.1", *arguments,
    ]  # fmt: skip
    sys.exit(torchrun.run())
