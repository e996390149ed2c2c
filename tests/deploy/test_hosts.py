"""The hosts of these tests are hosts: names and addresses of their own, one can be lost or cut off and come back."""

import subprocess
import sys

import pytest

from tests.deploy.hosts import Hosts
from tests.deploy.programs import wait_for

pytestmark = pytest.mark.deploy
LISTEN = "import socket; s = socket.create_server(('', 4000)); print('ready', flush=True)\nwhile True: s.accept()"
CONNECT = "import socket; socket.create_connection(('n1', 4000), timeout=1)"


def reaches(hosts: Hosts) -> bool:
    """Whether n2 reaches n1's server by its name."""
    return hosts.start("n2", sys.executable, "-c", CONNECT, stderr=subprocess.DEVNULL).wait(timeout=20) == 0


def test_a_host_can_be_cut_off_and_lost(tmp_path):
    with Hosts(["n1", "n2"], tmp_path) as hosts:
        assert hosts.start("n1", "sh", "-c", "test $(uname -n) = n1").wait(timeout=20) == 0
        server = hosts.start("n1", sys.executable, "-c", LISTEN, stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"ready\n"
        assert reaches(hosts)
        hosts.cut("n1")
        assert not reaches(hosts) and server.poll() is None
        hosts.mend("n1")
        wait_for(lambda: reaches(hosts), 20, "n1 to be back")
        hosts.kill("n1")
        assert server.wait(timeout=10) == -9 and not reaches(hosts)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(name in left for name in hosts.namespaces.values())  # others' may be there
