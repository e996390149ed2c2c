"""A web server of files for tests: ranges, ETags, and faults to order.  It answers S3's path-style requests as well."""

import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

STALL_S = 2.0


class RangeServer(ThreadingHTTPServer):
    """Serves `files`, path → bytes.

    faults: what happens to the next GETs, one each: a status code, or
      "cut"      the connection ends in the middle of the body
      "stall"    nothing comes for STALL_S
      "stutter"  half of the body comes, then nothing for STALL_S
      "no_range" the whole file comes, with status 200
      "changed"  the ETag and the time of modification are others
      "grown"    the file is one byte longer
      "flip"     a bit of the body is another
      "unsized_cut"  half of the body comes, whose length nobody promised
      "other_range"  the bytes are those of the file's start
      "slow"     the body comes in pieces, with a wait between
      "none"     nothing
    forever: a fault of every GET; by_path: {path: a fault of every request for it}.
    damaged: {path: a byte of the file that is always another}.
    upstream: the URL of another server, whose answers are passed on instead of `files`.
    has_etags: whether ETags are sent; etag: which.
    requests: (method, path, range or None, authorization or None) of each request so far.
    most_at_once: how many GETs were under way at the same time.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list = []
        self.forever, self.has_etags, self.etag = None, True, "first"
        self.by_path: dict[str, object] = {}
        self.damaged: dict[str, int] = {}
        self.upstream: str | None = None
        self.delay_s = 0.0
        self.requests: list[tuple] = []
        self.under_way = self.most_at_once = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """A client that gave up is no news."""


@contextmanager
def range_server(files: dict[str, bytes]) -> Iterator[RangeServer]:
    """Run a server in a thread of this process."""
    with RangeServer() as server:
        server.files = files
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RangeServer

    def log_message(self, *_) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._note()
        self._answer(self.server.by_path.get(self.path))

    def do_GET(self) -> None:
        server = self.server
        self._note()
        with server.lock:
            fault = server.faults.pop(0) if server.faults else server.by_path.get(self.path, server.forever)
            server.under_way += 1
            server.most_at_once = max(server.most_at_once, server.under_way)
        try:
            time.sleep(server.delay_s)
            self._answer(fault)
        finally:
            with server.lock:
                server.under_way -= 1

    def _note(self) -> None:
        with self.server.lock:
            self.server.requests.append(
                (self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization"))
            )

    def _answer(self, fault) -> None:
        headers, content = self._file()
        status = fault if isinstance(fault, int) else 404 if content is None else 200
        if status != 200:
            self._head(status, b"", {})
            return
        if fault == "changed":
            headers |= {"ETag": '"changed"', "Last-Modified": "Tue, 02 Jan 2024 00:00:00 GMT"}
        if not self.server.has_etags:
            headers.pop("ETag")
        if fault == "grown":
            content += b"\0"
        if fault == "stall":
            time.sleep(STALL_S)
        body, asked = content, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and int(asked[1]) >= len(content):
            self._head(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        if asked and fault != "no_range":
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            body, status = content[first : last + 1], 206
            if fault == "other_range":
                body = content[: len(body)]
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        if fault == "flip" and body:
            place = len(body) // 2
            body = body[:place] + bytes([body[place] ^ 16]) + body[place + 1 :]
        self._head(status, body, headers, sized=fault != "unsized_cut")
        if self.command == "HEAD":
            return
        if fault in ("cut", "stutter", "unsized_cut"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "stutter":
                time.sleep(STALL_S)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if fault == "slow":
            for start in range(0, len(body), 1 + len(body) // 4):
                self.wfile.write(body[start : start + 1 + len(body) // 4])
                self.wfile.flush()
                time.sleep(0.05)
            return
        self.wfile.write(body)

    def _file(self) -> tuple[dict[str, str], bytes | None]:
        """Return the headers that name a version, and the whole file, ours or the other server's."""
        if self.server.upstream is not None:
            try:
                signed = {"Authorization": self.headers.get("Authorization", "")}
                asked = urllib.request.Request(self.server.upstream + self.path, headers=signed)
                with urllib.request.urlopen(asked, timeout=20) as answer:
                    return {name: answer.headers[name] for name in ("ETag", "Last-Modified")}, answer.read()
            except urllib.error.HTTPError:
                return {}, None
        path = unquote(self.path)
        content = self.server.files.get(path)
        if path in self.server.damaged:
            place = self.server.damaged[path]
            content = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        return {"ETag": f'"{self.server.etag}"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, content

    def _head(self, status: int, body: bytes, headers: dict[str, str], sized: bool = True) -> None:
        self.send_response(status)
        length = {"Content-Length": str(len(body))} if sized else {"Connection": "close"}
        for name, value in (headers | length).items():
            self.send_header(name, value)
        self.end_headers()
