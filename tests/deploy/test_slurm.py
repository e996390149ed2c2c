"""Jobs on a real Slurm of two nodes: what it runs, warns, puts back into the queue, and does not."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deploy.hosts import Hosts
from tests.deploy.programs import wait_for
from tests.deploy.project import make_project
from tests.deploy.slurm import Slurm
from tests.script_runs import run_script
from utils.exit_codes import NO_PROGRESS
from utils.run_events import read_events

pytestmark = pytest.mark.deploy

# What a trainer does, without training: it leaves a note that says where it ran.
TRAINER = r"""
import json, os, pathlib, sys, time

mode, folder = sys.argv[1], pathlib.Path(sys.argv[2])
start, rank, host = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["RANK"], os.uname().nodename
print(f"rank {rank} on {host}, start {start}", flush=True)
folder.mkdir(parents=True, exist_ok=True)
if mode in ("wrong", "crash"):
    sys.exit({"wrong": 2, "crash": 3}[mode])
if mode == "note" and start == "0":
    sys.path.insert(0, ".")
    from utils.stop_note import leave_note

    leave_note("the end of --max_hours")
note = {name: os.environ[name] for name in ("WORLD_SIZE", "MASTER_PORT")} | {"host": host}
(folder / f"start-{start}-rank-{rank}.json").write_text(json.dumps(note))
"""
# The script itself.  The learning rate must not depend on --num_steps, since a STOP file ends the run.
TRAIN = [
    "--global_batch_size", "8", "--save_every", "10", "--eval_every", "0", "--sample_every", "0", "--log_every", "1",
    "--log_samples", "--max_tokens_per_micro_batch", "120", "--lr_schedule", "constant", "--warmup_steps", "5",
]  # fmt: skip
SLOW = ";".join(f"slow=0.5@rank=1,step={step},phase=forward" for step in range(1, 150))
SAVE_S = 70  # Slurm looks at limits every 30 s, and warns at the last look before, so 70 s to 100 s before the limit


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


def submit(slurm: Slurm, project: Path, *arguments: str, nodes: int = 2, **environment: str) -> str:
    """Run ./launch.sh slurm and return the job's number.  environment: what the job takes along."""
    options = ("--nodes", str(nodes), "--gpus", "1", "--no_exclusive")  # several jobs then share the nodes
    environment = {"MIN_RUN_S": "0", "MAX_REQUEUES": "1", "MAX_RESTARTS": "0"} | environment
    return slurm(
        "./launch.sh", "slurm", *options, *arguments, cwd=project, env=slurm.environment | environment
    ).split()[1]


def notes(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def training(slurm, project):
    """A job of the real script on both nodes, one rank each, which has done a step: (number, run folder)."""
    flags = ["--run_folder", "runs/trained", "--cache_folder", "cache", "--num_steps", "100000"]
    job = submit(
        slurm, project, "--save_s", str(SAVE_S), "train_mmdit.py", *TRAIN, *flags, MAX_REQUEUES="6", INJECT_FAULTS=SLOW
    )
    run = project / "runs/trained"
    wait_for(lambda: seen(run), 240, f"a step: {log_of(project, job)}")
    return job, run


@pytest.fixture(scope="module")
def jobs(slurm, project, training):
    """Jobs side by side, while another one trains."""
    wanted = {
        "crash": (["trainer.py", "crash", "runs/crash"], {"nodes": 1}),
        "wrong": (["trainer.py", "wrong", "runs/wrong"], {"nodes": 1}),
        "no progress": (["trainer.py", "crash", "runs/no progress"], {"nodes": 1, "MAX_RESTARTS": "1"}),
        "note": (["trainer.py", "note", "runs/note"], {"nodes": 1}),
        "array": (["--array", "0-1", "trainer.py", "once", "runs/task %a"], {}),
    }
    with ThreadPoolExecutor(2) as pool:
        given = {name: pool.submit(submit, slurm, project, *a, **k) for name, (a, k) in wanted.items()}
    plain = slurm(
        "sbatch", "--parsable", "--nodes=2", "--gpus-per-node=2", "--oversubscribe", "--time=30",
        "deploy/slurm/train.sbatch", "trainer.py", "once", "runs/a b", cwd=project,
    ).strip()  # fmt: skip
    return {name: job.result() for name, job in given.items()} | {"plain": plain}


def log_of(project: Path, job: str) -> str:
    path = project / f"runs/slurm/{job}.log"
    return path.read_text() if path.exists() else ""


def seen(run: Path) -> list[str]:
    """Return the whole lines of a run's samples_seen.jsonl."""
    path = run / "samples_seen.jsonl"
    return [line for line in path.read_text().splitlines(True) if line[-1] == "\n"] if path.exists() else []


def checkpoints(run: Path) -> list[int]:
    """Return the steps of the published checkpoints."""
    records = (run / "checkpoints").glob("step-*/commit.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in records)


def warned_at(run: Path) -> list[int]:
    """Return the steps before which the run was stopped by a signal, once it had begun."""
    stops = [event for event in read_events(run) if event["event"] == "stop" and event["reason"] == "signal"]
    return [event["step"] for event in stops if event["step"]]


def first_steps(run: Path) -> list[int]:
    """Return the step that each start began with."""
    lines = (run / "train.log").read_text().splitlines()
    return [int(line.split("from step ")[1].split()[0]) for line in lines if "from step " in line]


def test_before_the_time_limit_it_saves_and_goes_back_into_the_queue(slurm, project, training, jobs):
    """The warning reaches the ranks of the real script, and the next start goes on from the step they agreed on."""
    job, run = training
    # Only now does the time limit come near, so that how long starts take on this machine decides nothing.
    hours, minutes, seconds = map(int, slurm.job(job)["RunTime"].split(":"))
    slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={hours * 60 + minutes + (seconds + SAVE_S + 64) // 60}")
    wait_for(lambda: warned_at(run), 240, "the warning")
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=600")  # one is enough
    step = warned_at(run)[-1]
    wait_for(lambda: step in first_steps(run), 240, f"a start from step {step}: {log_of(project, job)}")
    log = log_of(project, job)
    assert "telling the ranks to save" in log and "saved, to be continued: back into the queue" in log, log


def test_the_plain_file_runs_on_two_nodes_of_two(slurm, project, jobs):
    job = jobs["plain"]
    assert slurm.wait_for_end(job, 240)["JobState"] == "COMPLETED", (project / f"slurm-{job}.log").read_text()
    found = notes(project / "runs/a b").values()
    assert [note["WORLD_SIZE"] for note in found] == ["4"] * 4
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
        ended = slurm.wait_for_end(jobs[name], 240)
        log = (project / f"runs/slurm/{jobs[name]}.log").read_text()
        assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", str(restarts), f"{code}:0"), log
        assert said in log
    # The launcher tried twice before it found that it gets nowhere.
    assert (project / f"runs/slurm/{jobs['no progress']}/node-n1.log").read_text().count("on n1, start 0") == 2


def test_tasks_of_an_array_do_not_meet(slurm, project, jobs):
    numbers = slurm("squeue", "--array", "-h", "-o", "%i", "-j", jobs["array"], check=False).split()
    assert all(number.startswith(jobs["array"]) for number in numbers)
    for task in ("0", "1"):
        wait_for(lambda task=task: len([*(project / "runs").glob(f"task {task}/*")]) == 2, 240, f"task {task}")
    found = [notes(project / f"runs/task {task}") for task in ("0", "1")]
    assert [[note["WORLD_SIZE"] for note in task.values()] for task in found] == [["2", "2"]] * 2


def test_ranks_that_stop_early_are_continued(slurm, project, jobs):
    ended = slurm.wait_for_end(jobs["note"], 240)
    log = (project / f"runs/slurm/{jobs['note']}.log").read_text()
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "1" and "to be continued" in log, log


def test_a_lost_node_costs_no_sample(slurm, project, training, jobs):
    """A node of the same job then loses its power; it goes on from the last save when the node is back.

    What all its starts together have trained on, and the weights they end with, are those of one undisturbed run.
    """
    job, run = training
    for other in jobs.values():
        slurm.wait_for_end(other, 240)
    restarts, newest = int(slurm.job(job)["Restarts"]), checkpoints(run)[-1]
    wait_for(lambda: checkpoints(run)[-1] > newest, 120, "another checkpoint")
    slurm.hosts.kill("n2")
    wait_for(lambda: int(slurm.job(job)["Restarts"]) > restarts, 120, "Slurm to notice")
    slurm.start_node("n2")
    starts = len(first_steps(run))
    wait_for(lambda: len(first_steps(run)) > starts, 240, f"another start: {log_of(project, job)}")
    first = first_steps(run)[-1]
    assert first > newest and first % 10 == 0
    wait_for(lambda: len(seen(run)) > first + 2, 120, "steps of the last start")
    (run / "STOP").touch()
    assert slurm.wait_for_end(job, 120)["JobState"] == "COMPLETED", log_of(project, job)
    lines = seen(run)
    undisturbed = project / "runs/undisturbed"
    flags = ["--run_folder", str(undisturbed), "--cache_folder", str(project / "cache"), "--num_steps", str(len(lines))]
    code, printed = run_script("train_mmdit.py", [*TRAIN, *flags], ranks=2)
    assert code == 0, printed
    assert lines == seen(undisturbed) and [json.loads(line)["step"] for line in lines] == [*range(len(lines))]
    folders = [folder / f"checkpoints/step-{len(lines):08d}" for folder in (run, undisturbed)]
    ours, expected = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    records = [json.loads(files.pop("commit.json")) for files in (ours, expected)]  # these have times and paths, too
    assert len(ours) >= 3 and ours == expected  # an index and a file of each rank: weights, EMA, optimizer
    assert records[0]["state"]["data"] == records[1]["state"]["data"]
