"""How long to wait for an answer before asking again: learnt from the answers so far."""

import math
import threading
from collections import deque

_NUM_KEPT = 128  # the latest answers
_NUM_NEEDED = 32  # before them nothing is known
_QUANTILE, _FACTOR = 0.9, 4.0  # an answer that takes longer than this is hardly on its way
_MIN_S = 0.5


class QuickLimit:
    """A limit on the first attempt of a read, after which a second one is cheaper than more patience.

    Four times what nine of ten answers took, rounded up to a power of two, so that it takes few values; at least half a
    second, at most `max_s`, which it is until enough is known.  Second attempts are learnt from as well, so a server
    that has become slow is soon waited for.  Safe to use from several threads.
    """

    def __init__(self, max_s: float):
        self.seconds = self._max_s = max_s
        self._answers: deque[float] = deque(maxlen=_NUM_KEPT)  # seconds each
        self._num_noted = 0
        self._lock = threading.Lock()

    def note(self, seconds: float) -> None:
        """Learn from an answer that took so long."""
        with self._lock:
            self._answers.append(seconds)
            self._num_noted += 1
            if self._num_noted % (_NUM_NEEDED // 2) == 0 and len(self._answers) >= _NUM_NEEDED:
                usual = sorted(self._answers)[int(_QUANTILE * len(self._answers))]
                self.seconds = min(self._max_s, 2.0 ** math.ceil(math.log2(max(_MIN_S, _FACTOR * usual))))
