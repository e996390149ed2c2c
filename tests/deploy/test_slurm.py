"""Jobs on a real Slurm of two nodes: what it runs, warns, puts back into the queue, and does not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.hosts import Hosts
from tests.deploy.programs import wait_for
from tests.deploy.project import make_project
from tests.deploy.slurm import Slurm
from utils.exit_codes import NO_PROGRESS

pytestmark = pytest.mark.deploy

# What a trainer does, without training: it leaves a note that says where it ran, and whether it was warned.
TRAINER = r"""
import json, os, pathlib, signal, sys, time

warned = []
signal.signal(signal.SIGUSR1, lambda *_: warned.append(1))
mode, folder = sys.argv[1], pathlib.Path(sys.argv[2])
start, rank, host = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["RANK"], os.uname().nodename
print(f"rank {rank} on {host}, start {start}", flush=True)
folder.mkdir(parents=True, exist_ok=True)
if mode in ("wrong", "crash"):
    sys.exit({"wrong": 2, "crash": 3}[mode])
deadline = time.monotonic() + (60 if mode == "wait" and start == "0" else 1)
while not warned and time.monotonic() < deadline:
    time.sleep(0.1)
note = {name: os.environ[name] for name in ("WORLD_SIZE", "MASTER_PORT")} | {"host": host, "warned": bool(warned)}
if warned or (mode == "note" and start == "0"):
    sys.path.insert(0, ".")
    from utils.stop_note import leave_note

    leave_note("a signal")
(folder / f"start-{start}-rank-{rank}.json").write_text(json.dumps(note))
"""
TRAIN = [
    "train_mmdit.py", "--cache_folder", "cache", "--global_batch_size", "8", "--num_steps", "40", "--save_every", "5",
    "--eval_every", "0", "--sample_every", "0", "--log_every", "1", "--log_samples",
    "--max_tokens_per_micro_batch", "120",
]  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = make_project(tmp_path_factory.mktemp("slurm") / "a project")
    (project / "trainer.py").write_text(TRAINER)
    return project


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("daemons")
    with Hosts(["n1", "n2"], folder) as hosts, Slurm(hosts, folder) as slurm:
        yield slurm


def submit(slurm: Slurm, project: Path, *arguments: str) -> str:
    """Run ./launch.sh slurm and return the job's number."""
    options = ("--nodes", "2", "--gpus", "1", "--no_exclusive")  # several jobs then share the nodes
    return slurm("./launch.sh", "slurm", *options, *arguments, cwd=project).split()[1]


def notes(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def jobs(slurm, project):
    """Jobs side by side: the first needs half a minute until Slurm looks at its time limit."""
    slurm.environment |= {"MIN_RUN_S": "0", "MAX_REQUEUES": "1", "MAX_RESTARTS": "0"}
    crash = submit(slurm, project, "trainer.py", "crash", "runs/crash")
    slurm.environment["MAX_RESTARTS"] = "1"
    return {
        "crash": crash,
        "limit": submit(slurm, project, "--time", "1", "--save_s", "20", "trainer.py", "wait", "runs/limit"),
        "wrong": submit(slurm, project, "trainer.py", "wrong", "runs/wrong"),
        "no progress": submit(slurm, project, "trainer.py", "crash", "runs/no progress"),
        "note": submit(slurm, project, "trainer.py", "note", "runs/note"),
        "array": submit(slurm, project, "--array", "0-1", "trainer.py", "once", "runs/task %a"),
        "plain": slurm(
            "sbatch", "--parsable", "--nodes=2", "--gpus-per-node=2", "--oversubscribe", "--time=30",
            "deploy/slurm/train.sbatch", "trainer.py", "once", "runs/a b", cwd=project,
        ).strip(),
    }  # fmt: skip


def test_the_plain_file_runs_on_two_nodes_of_two(slurm, project, jobs):
    job = jobs["plain"]
    assert slurm.wait_for_end(job, 120)["JobState"] == "COMPLETED", (project / f"slurm-{job}.log").read_text()
    found = notes(project / "runs/a b").values()
    assert [(note["WORLD_SIZE"], note["warned"]) for note in found] == [("4", False)] * 4
    assert sorted(note["host"] for note in found) == ["n1", "n1", "n2", "n2"]
    for node, other in (("n1", "n2"), ("n2", "n1")):  # a log of each node, of its own ranks alone
        log = (project / f"slurm-{job}/node-{node}.log").read_text()
        assert log.count(f"on {node}, start 0") == 2 and f"on {other}" not in log


def test_a_wrong_flag_is_not_started_again_a_crash_is(slurm, project, jobs):
    for name, restarts, code, said in (
        ("wrong", 0, 2, "gave up with exit code 2"),
        ("no progress", 0, NO_PROGRESS, f"gave up with exit code {NO_PROGRESS}"),
        ("crash", 1, 3, "not started again after 1 times"),
    ):
        ended = slurm.wait_for_end(jobs[name], 120)
        log = (project / f"runs/slurm/{jobs[name]}.log").read_text()
        assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", str(restarts), f"{code}:0"), log
        assert said in log
    # The launcher tried twice before it found that it gets nowhere.
    assert (project / f"runs/slurm/{jobs['no progress']}/node-n1.log").read_text().count("on n1, start 0") == 2


def test_tasks_of_an_array_do_not_meet(slurm, project, jobs):
    numbers = slurm("squeue", "--array", "-h", "-o", "%i", "-j", jobs["array"], check=False).split()
    assert all(number.startswith(jobs["array"]) for number in numbers)
    for task in ("0", "1"):
        wait_for(lambda task=task: len([*(project / "runs").glob(f"task {task}/*")]) == 2, 120, f"task {task}")
    found = [notes(project / f"runs/task {task}") for task in ("0", "1")]
    assert [[note["WORLD_SIZE"] for note in task.values()] for task in found] == [["2", "2"]] * 2


def test_ranks_that_stop_early_are_continued(slurm, project, jobs):
    ended = slurm.wait_for_end(jobs["note"], 120)
    log = (project / f"runs/slurm/{jobs['note']}.log").read_text()
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "1" and "to be continued" in log, log


def test_before_the_time_limit_it_saves_requeues_and_goes_on(slurm, project, jobs):
    ended = slurm.wait_for_end(jobs["limit"], 180)
    log = (project / f"runs/slurm/{jobs['limit']}.log").read_text()
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "1", log
    assert "telling the ranks to save" in log and "back into the queue" in log and "start 1:" in log
    assert {name: note["warned"] for name, note in notes(project / "runs/limit").items()} == {
        "start-0-rank-0": True, "start-0-rank-1": True, "start-1-rank-0": False, "start-1-rank-1": False,
    }  # fmt: skip


def test_a_lost_node_costs_no_sample(slurm, project):
    """One node loses its power while the real script trains; the job waits for it and goes on from the last save."""
    job = submit(slurm, project, *TRAIN, "--run_folder", "runs/lost")
    undisturbed = subprocess.Popen(
        [sys.executable, *TRAIN, "--run_folder", "runs/undisturbed"], cwd=project, stderr=subprocess.PIPE, text=True
    )
    run = project / "runs/lost"
    wait_for(lambda: (run / "checkpoints/step-00000010").exists(), 120, "a checkpoint")
    slurm.hosts.kill("n2")
    wait_for(lambda: slurm.job(job)["Restarts"] == "1", 60, "Slurm to notice")
    slurm.start_node("n2")
    ended = slurm.wait_for_end(job, 120)
    assert ended["JobState"] == "COMPLETED", (project / f"runs/slurm/{job}.log").read_text()
    assert undisturbed.wait(timeout=60) == 0, undisturbed.stderr.read()
    seen, expected = ((project / f"runs/{name}/samples_seen.jsonl").read_text() for name in ("lost", "undisturbed"))
    assert seen == expected and seen.count("\n") == 40
    log = (project / f"runs/slurm/{job}/node-n1.log").read_text()
    resumed = [int(line.split("from step ")[1].split()[0]) for line in log.splitlines() if "from step " in line]
    assert resumed[0] == 0 and 10 <= resumed[-1] < 40 and resumed[-1] % 5 == 0
