"""What tests of deployments need of the system, and waiting for what it does."""

import os
import shutil
import time

import pytest


def require(*programs: str, root: bool = False) -> None:
    """Skip the test, saying why, where a program or the right to use it is missing."""
    if root and os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces and daemons")
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (packages: tests/deploy/packages.txt)")


def wait_for(condition, timeout_s: float, what: str) -> None:
    """Wait until condition() holds; fail the test after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s for {what}")
        time.sleep(0.1)
