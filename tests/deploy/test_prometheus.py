"""A real Prometheus: the rules through promtool, and a run on two ranks whose fault raises the one alert it must."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.free_ports import free_ports

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool: apt-get install prometheus"),
]

# The train script itself, with a fault: rank 1 stands still in step 30.
FAULTY = """
import sys, time
import torch
import train_mmdit
from utils.config import parse, run_main

fault, calls = sys.argv.pop(1), 0
original = train_mmdit.sample_losses

def sample_losses(model, batch, cfg):
    global calls
    calls += torch.is_grad_enabled()
    rank = torch.distributed.get_rank()
    if fault == "stall" and rank == 1 and calls == 30:
        time.sleep(600)
    return original(model, batch, cfg)

train_mmdit.sample_losses = sample_losses
run_main(train_mmdit.main, parse(train_mmdit.Config))
"""


def promtool(*arguments: str, cwd: Path = PROMETHEUS) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_and_the_configuration_are_valid():
    promtool("check", "rules", "rules.yaml")
    promtool("check", "config", "prometheus.yaml")


def test_every_rule_fires_where_it_must_and_not_before():
    promtool("test", "rules", "rules_test.yaml", cwd=REPOSITORY / "tests" / "deploy")


class Prometheus:
    """The program itself, scraping and judging every second."""

    def __init__(self, folder: Path, targets: list[str]):
        self.port = free_ports()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(PROMETHEUS / "rules.yaml")],
            "scrape_configs": [{"job_name": "trainer", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.log = (folder / "prometheus.log").open("w")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{self.port}"],
            stdout=self.log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ask(self, path: str, **parameters: str) -> dict:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict]:
        return self.ask("query", query=expression)["result"]

    def firing(self) -> set[str]:
        return {a["labels"]["alertname"] for a in self.ask("alerts")["alerts"] if a["state"] == "firing"}

    def wait_for(self, what, seconds: float):
        deadline, found = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                if found := what():
                    return found
            except OSError:  # not up yet
                pass
            time.sleep(0.2)
        raise AssertionError(f"waited {seconds} s for {what}, and it was {found}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def stalled_run(tmp_path_factory):
    """A run on two ranks, of which one stands still in step 30, and a Prometheus that watches it."""
    folder = tmp_path_factory.mktemp("prometheus")
    first = free_ports(2)
    (folder / "faulty.py").write_text(FAULTY)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(folder / "faulty.py"), "stall", "--run_folder", str(folder / "stalled-run"),
        "--cache_folder", str(folder / "cache"), "--num_steps", "1000", "--global_batch_size", "4",
        "--max_tokens_per_micro_batch", "400", "--eval_every", "20", "--eval_samples", "2", "--sample_every", "0",
        "--save_every", "10", "--metrics_port", str(first), "--profile_every", "10", "--probe_every", "10",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    output = (folder / "run.log").open("w")
    run = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    prometheus = Prometheus(folder, [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"])
    try:
        yield prometheus
    finally:
        prometheus.close()
        os.killpg(run.pid, 9)
        run.wait()
        output.close()


def test_a_stalled_rank_raises_exactly_the_alert_for_it(stalled_run):
    def steps():
        return {s["metric"]["rank"]: float(s["value"][1]) for s in stalled_run.query("trainer_step")}

    stalled_run.wait_for(lambda: len(steps()) == 2 and min(steps().values()) >= 25, 400)
    assert stalled_run.firing() == set()  # while it ran, saved and validated, nothing was wrong
    fired = stalled_run.wait_for(stalled_run.firing, 120)
    assert fired == {"TrainerNoStep"}
    [alert] = [a for a in stalled_run.ask("alerts")["alerts"] if a["state"] == "firing"]
    assert alert["labels"]["run"] == "stalled-run" and "has done no step for" in alert["annotations"]["summary"]
    assert set(steps().values()) == {29.0}  # both wait: the step of the one needs the other


def test_every_panel_of_the_dashboard_gets_an_answer(stalled_run):
    """After the test above: what a CPU can show has data, and every expression is one that Prometheus takes."""
    dashboard = json.loads((REPOSITORY / "deploy/grafana/training.json").read_text())
    marks = [(mark["name"], mark["target"]["expr"]) for mark in dashboard["annotations"]["list"]]
    panels = [(p["title"], t["expr"]) for p in dashboard["panels"] for t in p.get("targets", [])]
    empty = set()
    for title, expression in marks + panels:
        expression = expression.replace("$__rate_interval", "1h").replace('"$run"', '".*"').replace('"$rank"', '".*"')
        if not stalled_run.query(expression):
            empty.add(title)
    # No GPU; no shard cache was asked for anything (0 / 0 of it is a number); the run stands, so no time is left.
    assert {title for title in empty if not title.startswith("GPU")} <= {"Time left"}
