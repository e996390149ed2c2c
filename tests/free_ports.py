"""Ports for servers of a test that no other process takes between the look and the use."""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int = 1) -> int:
    """Return the first of `count` free ports in a row on 127.0.0.1.

    They lie below those that the kernel gives to clients and to port 0, which is where a port found free is taken a
    moment later; and they are drawn, so that two test runs side by side do not look at the same.
    """
    highest = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    for _ in range(1000):
        first = random.SystemRandom().randrange(10000, highest - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise RuntimeError(f"no {count} free ports in a row between 10000 and {highest}")
