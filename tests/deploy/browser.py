"""A headless Chromium, spoken to over two pipes in its DevTools protocol: no driver and no port."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-webgl", "--disable-webgl2", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page of a browser with an empty profile in `folder`."""

    def __init__(self, folder: Path, width: int = 1600, height: int = 1200):
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()

        def pipes() -> None:  # where the browser expects them
            a, b = os.dup(to_browser), os.dup(from_browser)  # out of the way of 3 and 4
            os.dup2(a, 3)
            os.dup2(b, 4)

        flags = [*_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False,
            preexec_fn=pipes, env=os.environ | {"HOME": str(folder)},
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", None
        [page] = [t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]

    def open(self, url: str) -> None:
        """Go to a page; it may go on loading."""
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str):
        """Return the value of a JavaScript expression in the page."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60):
        """Return the value of an expression once it is true."""
        deadline, value = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.2)
        raise AssertionError(f"after {seconds} s still {value!r}: {expression}")

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        """Write what is seen, or all of the page, as a PNG."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _clip(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": size | {"scale": 1}}

    def _call(self, method: str, **params) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)
