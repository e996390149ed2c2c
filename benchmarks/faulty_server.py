"""A web server of one folder whose requests fail at a chosen rate, as a process of its own for `benchmarks.remote`.

python -m benchmarks.faulty_server FOLDER WAIT_S KINDS    prints its port; each line it reads is a new rate of failures

KINDS: which failures in equal parts: 503, cut (half of the body), flip (a wrong bit), reset, stall (no answer).
"""

import random
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_MAX_S = 600.0  # ends by itself
_STALL_S = 60.0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the answer to its headers

    def log_message(self, *_) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer("")

    def do_GET(self) -> None:
        time.sleep(self.server.wait_s)
        fails = random.random() < self.server.rate
        self._answer(random.choice(self.server.kinds) if fails else "")

    def _answer(self, fault: str) -> None:
        content = self.server.files.get(self.path)
        if fault == "stall":
            time.sleep(_STALL_S)
        if fault in ("reset", "stall"):
            self.close_connection = True
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2]), len(content) - 1)) if asked else (0, len(content) - 1)
        body = b"" if fault == "503" else content[first : last + 1]
        self.send_response(503 if fault == "503" else 206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif fault == "flip":
            place = random.randrange(len(body))
            self.wfile.write(body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :])
        elif self.command == "GET":
            self.wfile.write(body)


def main() -> None:
    folder, wait_s = Path(sys.argv[1]), float(sys.argv[2])
    random.seed(0)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads, server.rate, server.wait_s = True, 0.0, wait_s
        server.kinds = sys.argv[3].split(",")
        server.files = {f"/{path.name}": path.read_bytes() for path in folder.glob("*.tar")}
        server.handle_error = lambda *_: None  # a client that gave up is no news
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Timer(_MAX_S, server.shutdown).start()
        print(server.server_port, flush=True)
        for line in sys.stdin:
            server.rate = float(line)
            print("ok", flush=True)


if __name__ == "__main__":
    main()
