"""Counts of what happens anywhere in this process, for whoever watches it: threads of the loader, caches, readers."""

import threading
from collections import Counter

_counts: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()  # "+= 1" is a read and a write


def count(name: str, kind: str = "", amount: int = 1) -> None:
    """Add `amount` to a counter; kind: one of a few words, never a path or a key.  Safe from every thread."""
    with _lock:
        _counts[name, kind] += amount


def counts() -> dict[tuple[str, str], int]:
    """Return {(name, kind): count} since the process began."""
    with _lock:
        return dict(_counts)
