"""moto's S3 server in a process of its own, for tests."""

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

_SERVE = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), server.stop()), daemon=True).start()  # ends with its parent
threading.Event().wait(float(sys.argv[1]))
"""
KEYS = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_server(limit_s: float = 120.0) -> Iterator[str]:
    """Yield the URL of an empty S3 server; it ends with the block, with this process, or after `limit_s`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(limit_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def put(url: str, path: str, content: bytes = b"") -> None:
    """Make a bucket ("/bucket") or an object ("/bucket/key")."""
    headers = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url + path, data=content, method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=20):
        pass
