"""How far tools.prepare is: a bar on a terminal, elsewhere a line now and then."""

import logging
import sys
import time

from tqdm import tqdm

_PLAIN_EVERY_S = 10.0
log = logging.getLogger("prepare")


class Progress:
    """Counts the pictures of one process; that of rank 0 is shown, for ranks have equal shares."""

    def __init__(self, total: int, is_shown: bool, num_ranks: int):
        self._is_shown, self._interactive = is_shown, is_shown and sys.stderr.isatty()
        self._what = "pictures" if num_ranks == 1 else f"pictures of 1 of {num_ranks} processes"
        self._bar = tqdm(
            total=total, unit=" pictures", disable=not self._interactive, dynamic_ncols=True, smoothing=0.1,
            desc=None if num_ranks == 1 else f"rank 0 of {num_ranks}",
        )  # fmt: skip
        self._total, self._done, self._skipped = total, 0, 0
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self._is_shown and not self._interactive and self._done:
            self._line(time.monotonic())
        self._bar.close()

    def skip(self, count: int) -> None:
        """Count what an earlier start has done; it does not go into the speed."""
        self._skipped += count
        if self._interactive:
            self._bar.initial += count
            self._bar.update(count)

    def advance(self) -> None:
        """Count one picture."""
        self._done += 1
        self._bar.update()
        now = time.monotonic()
        if self._is_shown and not self._interactive and now - self._last_line >= _PLAIN_EVERY_S:
            self._last_line = now
            self._line(now)

    def _line(self, now: float) -> None:
        speed = self._done / max(now - self._started, 1e-9)
        left = tqdm.format_interval((self._total - self._skipped - self._done) / speed)
        log.info("%d/%d %s, %.1f pictures/s, %s left", self._skipped + self._done, self._total, self._what, speed, left)
