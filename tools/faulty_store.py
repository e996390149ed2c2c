"""A proxy in front of an S3 store that fails to order, for rehearsals and tests.

It passes every request on as it came, and does to the next ones what `POST /_fault {"fault": …, "count": N}` says:

503, 403   answered so, and not passed on
stall      no answer for STALL_S, then the connection ends
cut        the connection ends in the middle of the body: of what is sent, which is not passed on, or of the answer
none       nothing, from now on

Source of the idea: a store whose faults are set over HTTP, so that whoever injects one need not be its parent.
"""

import http.client
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

STALL_S = 45.0  # longer than the patience of `utils.byte_source` with a silent connection
FAULTS = ("503", "403", "stall", "cut", "none")
_BUCKET = "chaos"
_KEYS = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length")


class FaultyStore(ThreadingHTTPServer):
    """The proxy.  upstream: the URL of the store.  url: its own.  struck: the faults that happened, in their order."""

    daemon_threads, block_on_close, request_queue_size = True, False, 64

    def __init__(self, upstream: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.url = upstream, f"http://127.0.0.1:{self.server_port}"
        self.stall_s = STALL_S
        self.struck: list[str] = []
        self._fault, self._count, self._lock = "none", 0, threading.Lock()

    def order(self, fault: str, count: int) -> None:
        """Let a fault happen to the next `count` requests.  Raises: ValueError for one that is not known."""
        if fault not in FAULTS:
            raise ValueError(f"a fault of the store is one of {', '.join(FAULTS)}, got {fault!r}")
        with self._lock:
            self._fault, self._count = fault, count

    def next_fault(self) -> str:
        """Return what happens to a request that has just come."""
        with self._lock:
            if self._count <= 0 or self._fault == "none":
                return "none"
            self._count -= 1
            self.struck.append(self._fault)
            return self._fault

    def handle_error(self, request, client_address) -> None:
        """A client that gave up is no news."""


@contextmanager
def faulty_store(upstream: str) -> Iterator[FaultyStore]:
    """Run a proxy in a thread of this process."""
    with FaultyStore(upstream) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def start_store() -> tuple[FaultyStore | None, str]:
    """Start a proxy for the rest of this process, and say with the variables of S3 that it is the store.

    The store behind it is that of AWS_ENDPOINT_URL, which must take requests for another host name (path-style, as
    MinIO and others do) and have a bucket named "chaos", or moto, if that is installed.
    Returns the proxy, or None and why there is none.
    """
    upstream = os.environ.get("AWS_ENDPOINT_URL")
    if not upstream:
        try:
            from moto.server import ThreadedMotoServer
        except ImportError:
            return None, "moto is not installed (requirements-dev.txt), and AWS_ENDPOINT_URL names no store"
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it prints every request
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        upstream = "http://{}:{}".format(*server.get_host_and_port())
        os.environ.update(_KEYS)
        connection = http.client.HTTPConnection(urlsplit(upstream).netloc, timeout=30)
        connection.request("PUT", f"/{_BUCKET}")
        connection.getresponse().read()
    store = FaultyStore(upstream)
    threading.Thread(target=store.serve_forever, args=(0.05,), daemon=True).start()
    os.environ["AWS_ENDPOINT_URL"] = store.url
    return store, ""


def checkpoint_url(name: str) -> str:
    """Return where a rehearsed run has its checkpoints in that store."""
    return f"s3://{_BUCKET}/{name}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyStore

    def log_message(self, *_) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        if self.path != "/_fault":
            self._pass_on()
            return
        try:
            asked = json.loads(self._body())
            self.server.order(str(asked["fault"]), int(asked["count"]))
            self._answer(200, {}, b"")
        except (ValueError, KeyError, TypeError) as error:
            self._answer(400, {}, str(error).encode())

    def _pass_on(self) -> None:
        fault, size = self.server.next_fault(), int(self.headers.get("Content-Length") or 0)
        if fault == "stall":
            self.rfile.read(size)
            time.sleep(self.server.stall_s)
        if fault == "cut" and size:
            self.rfile.read(size // 2)
        if fault == "stall" or (fault == "cut" and size):
            self._hang_up()
            return
        body = self.rfile.read(size)
        if fault in ("503", "403"):
            code = {"503": "SlowDown", "403": "InvalidAccessKeyId"}[fault]
            self._answer(int(fault), {}, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())
            return
        upstream = urlsplit(self.server.upstream)
        kind = http.client.HTTPSConnection if upstream.scheme == "https" else http.client.HTTPConnection
        connection = kind(upstream.netloc, timeout=60)
        try:
            # The host's name is part of the signature: it stays the proxy's.
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            content, headers = answer.read(), dict(answer.getheaders())
        finally:
            connection.close()
        if self.command == "HEAD":
            self._answer(answer.status, headers, b"", headers.get("Content-Length"))
        else:
            self._answer(answer.status, headers, content, is_cut=fault == "cut")

    do_GET = do_HEAD = do_PUT = do_DELETE = _pass_on

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, headers: dict, content: bytes, length: str | None = None, is_cut=False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in (*_HOP_BY_HOP, "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.wfile.flush()
        if is_cut:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
