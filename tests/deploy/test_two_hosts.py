"""train_mmdit.py on two hosts, of which one is lost, cut off, and brought back: no sample is skipped or repeated.

With -s it prints how long each recovery took; docs/cluster.md has the figures.
"""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.deploy.hosts import Hosts
from tests.deploy.programs import wait_for
from tests.deploy.project import make_project
from tests.script_runs import run_script

pytestmark = pytest.mark.deploy

NUM_STEPS = {"lost": 50, "elastic": 10000}  # of each run; the test ends the last
DEADLINE_S = 15
TRAIN = [
    "--global_batch_size", "2", "--save_every", "10", "--eval_every", "0", "--sample_every", "0", "--log_every", "1",
    "--log_samples", "--max_tokens_per_micro_batch", "120", "--timeout_s", str(DEADLINE_S), "--hang_s", str(DEADLINE_S),
]  # fmt: skip
# A host that says nothing for 3 s is lost; one more may join for 8 s.
CONF = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"


class Run:
    """A run on both hosts: n1 has the rendezvous' store."""

    def __init__(self, hosts: Hosts, project: Path, name: str, nodes: str, port: int):
        self.hosts, self.project, self.folder, self.name = hosts, project, project / "runs" / name, name
        self.nodes, self.port = nodes, port
        self.launchers = {name: self.start(name) for name in hosts.address}

    def start(self, host: str) -> subprocess.Popen:
        log = (self.project / f"{self.name}-{host}.log").open("a")
        variables = {
            "NNODES": self.nodes, "NGPU": "1", "RDZV_ENDPOINT": f"n1:{self.port}", "NODE_RANK": str(int(host != "n1")),
            "RDZV_CONF": CONF, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        settings = [f"{name}={value}" for name, value in variables.items()]
        command = [
            "env", *settings, "./launch.sh", "train_mmdit.py", *TRAIN, "--run_folder", f"runs/{self.name}",
            "--cache_folder", "cache", "--num_steps", str(NUM_STEPS[self.name]),
        ]  # fmt: skip
        return self.hosts.start(host, *command, cwd=self.project, stdout=log, stderr=log)

    def step(self) -> int:
        """Return the last logged step."""
        try:
            return json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        except (OSError, IndexError, ValueError):  # not there yet, or half a line
            return 0

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        wait_for(lambda: self.step() >= step, timeout_s, f"step {step} of {self.name}: {self.printed()}")

    def starts(self) -> list[tuple[int, int]]:
        """Return (ranks, first step) of each start."""
        lines = (self.folder / "train.log").read_text().splitlines()
        started = [line for line in lines if " ranks (" in line]
        return [
            (int(line.split(" ranks (")[0].split()[-1]), int(line.split("from step ")[1].split()[0]))
            for line in started
        ]

    def wait_for_start(self, number: int, timeout_s: float = 120) -> float:
        """Wait for start `number`, counted from 1, and for a step of it; return the seconds that took."""
        began = time.monotonic()
        wait_for(lambda: len(self.starts()) >= number, timeout_s, f"start {number} of {self.name}: {self.printed()}")
        started = time.time()
        metrics = self.folder / "metrics.jsonl"
        wait_for(lambda: metrics.stat().st_mtime > started, 60, f"a step of start {number}")
        return time.monotonic() - began

    def printed(self) -> str:
        paths = [self.project / f"{self.name}-{host}.log" for host in self.hosts.address]
        return "\n".join(path.read_text()[-3000:] for path in paths if path.exists())


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with Hosts(["n1", "n2"], tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("two-hosts") / "project")


def check_samples(run: Run) -> None:
    """Compare what the run has seen with what one process sees that nothing disturbs, in as many steps."""
    lines = [
        json.loads(line)
        for line in (run.folder / "samples_seen.jsonl").read_text().splitlines(True)
        if line[-1] == "\n"
    ]
    undisturbed = run.project / f"runs/undisturbed-{run.name}"
    flags = ["--run_folder", str(undisturbed), "--cache_folder", str(run.project / "cache"), "--num_steps"]
    code, printed = run_script("train_mmdit.py", [*TRAIN, *flags, str(len(lines))])
    assert code == 0, printed
    expected = [*map(json.loads, (undisturbed / "samples_seen.jsonl").read_text().splitlines())]
    assert len(lines) == NUM_STEPS[run.name] or run.name == "elastic"
    assert lines == expected[: len(lines)] and [line["step"] for line in lines] == [*range(len(lines))]


def test_a_host_that_is_killed_and_one_that_is_cut_off_come_back(hosts, project):
    run = Run(hosts, project, "lost", "2", 29401)
    run.wait_for_step(12)
    hosts.kill("n2")
    killed_at = run.step()
    time.sleep(2)
    run.launchers["n2"] = run.start("n2")
    print(f"\nkilled: a step {run.wait_for_start(2):.1f} s after the host's return")
    run.wait_for_step(run.starts()[-1][1] + 3)
    hosts.cut("n2")
    began = time.monotonic()
    # Nobody is told that nothing arrives: the ranks' deadline ends the wait.  The other host is then fenced, as a
    # scheduler does, since no launcher that is cut off ends by itself.
    log = project / "lost-n1.log"
    wait_for(lambda: log.read_text().count("starting all ranks again") >= 2, 120, "the ranks' deadline")
    print(f"cut off: the ranks gave up {time.monotonic() - began:.1f} s after the cut")
    hosts.kill("n2")
    hosts.mend("n2")
    run.launchers["n2"] = run.start("n2")
    print(f"cut off: a step {run.wait_for_start(3):.1f} s after the host's return")
    assert [launcher.wait(timeout=120) for launcher in run.launchers.values()] == [0, 0], run.printed()
    first, second, third = run.starts()
    assert first == (2, 0) and second[0] == third[0] == 2 and killed_at - 11 <= second[1] <= killed_at + 1
    assert second[1] <= third[1] < NUM_STEPS["lost"]
    check_samples(run)


def test_an_elastic_run_goes_on_with_the_host_that_is_left(hosts, project):
    run = Run(hosts, project, "elastic", "1:2", 29402)
    run.wait_for_step(12)
    hosts.kill("n2")
    print(f"\nelastic: a step of one host {run.wait_for_start(2):.1f} s after the other's loss")
    run.launchers["n2"] = run.start("n2")
    print(f"elastic: a step of two hosts {run.wait_for_start(3):.1f} s after its return")
    hosts.kill("n1"), hosts.kill("n2")
    assert [ranks for ranks, _ in run.starts()] == [2, 1, 2]
    check_samples(run)
