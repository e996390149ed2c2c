"""Hosts that can be killed and cut off: network namespaces with addresses and names of their own, joined by a bridge.

They share the machine's files, as hosts of a cluster share theirs.  Needs root and iproute2.
"""

import os
import random
import secrets
import signal
import subprocess
from pathlib import Path

import pytest

from tests.deploy.programs import require


class Hosts:
    """`names` as hosts, each with the address `address[name]`; the machine itself is `gateway`, as a login node."""

    def __init__(self, names: list[str], folder: Path):
        require("ip", "nsenter", "unshare", root=True)
        # Names of interfaces have at most 15 characters, and must not clash with those of another test process.
        self._id = secrets.token_hex(4)
        subnet = _free_subnet()
        self.gateway = f"{subnet}.1"
        self.address = {name: f"{subnet}.{11 + i}" for i, name in enumerate(names)}
        self.namespaces = {name: f"t{self._id}-{name}" for name in names}
        self._link = {name: f"v{self._id}{i}" for i, name in enumerate(names)}
        self._processes: list[subprocess.Popen] = []
        self._table = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.address.items())]
        self._table.write_text("\n".join(lines) + "\n")

    def __enter__(self) -> "Hosts":
        try:
            bridge = f"b{self._id}"
            _ip(f"link add {bridge} type bridge")
            _ip(f"addr add {self.gateway}/24 dev {bridge}")
            _ip(f"link set {bridge} up")
            for name, namespace in self.namespaces.items():
                _ip(f"netns add {namespace}")
                _ip(f"link add {self._link[name]} type veth peer name eth0 netns {namespace}")
                _ip(f"link set {self._link[name]} master {bridge} up")
                _ip(f"-n {namespace} addr add {self.address[name]}/24 dev eth0")
                _ip(f"-n {namespace} link set eth0 up")
                _ip(f"-n {namespace} link set lo up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name, namespace in self.namespaces.items():
            self.kill(name)
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
            subprocess.run(["ip", "link", "delete", self._link[name]], capture_output=True)
        subprocess.run(["ip", "link", "delete", f"b{self._id}"], capture_output=True)
        for process in self._processes:
            process.wait(timeout=10)

    def start(self, name: str, *command: str, **options) -> subprocess.Popen:
        """Start a program on the host, which believes itself to be called `name`."""
        # `ip netns exec` would mount another /sys, in which slurmd does not start.
        inside = f'hostname {name} && mount --bind {self._table} /etc/hosts && exec "$@"'
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self.namespaces[name]}", "unshare", "--mount", "--uts",
             "sh", "-c", inside, "sh", *command],
            start_new_session=True, **options,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def kill(self, name: str) -> None:
        """End everything on the host at once, as a power cut would."""
        pids = subprocess.run(["ip", "netns", "pids", self.namespaces[name]], capture_output=True, text=True).stdout
        for pid in pids.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass

    def cut(self, name: str) -> None:
        """Pull the host's cable: nothing arrives, and nobody is told."""
        _ip(f"link set {self._link[name]} down")

    def mend(self, name: str) -> None:
        """Put the cable back."""
        _ip(f"link set {self._link[name]} up")


def _free_subnet() -> str:
    """Return the first three numbers of a network that no interface of this machine has."""
    taken = subprocess.run(["ip", "-4", "addr"], check=True, capture_output=True, text=True).stdout
    while True:
        subnet = f"10.{random.SystemRandom().randrange(200, 250)}.{random.SystemRandom().randrange(250)}"
        if f"{subnet}." not in taken:
            return subnet


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)
