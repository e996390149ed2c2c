"""`launch.sh`: real set-ups from local wheels, what it hands to torchrun on pretended machines, and real launches."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
VARIABLES = (
    "NGPU", "NNODES", "NODE_RANK", "RDZV_CONF", "RDZV_ENDPOINT", "PYTHON", "OMP_NUM_THREADS", "MAX_RESTARTS",
    "GLOO_SOCKET_IFNAME", "GLIBC_TUNABLES",
)  # fmt: skip


def start(folder, *arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.Popen(
        [str(folder / "launch.sh"), *arguments], env=clean | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def run(folder, *arguments, **environment):
    """Return (exit code, stdout, stderr)."""
    process = start(folder, *arguments, **environment)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.fixture
def project(tmp_path):
    """A folder, with a blank in its name, that has launch.sh and requirements which need no network."""
    project = tmp_path / "a project"
    project.mkdir()
    shutil.copy(REPOSITORY / "launch.sh", project)
    with zipfile.ZipFile(project / "thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "print('thing', __import__('sys').argv[1:])\n")
        wheel.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        wheel.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("thing-1.0.dist-info/RECORD", "")
    (project / "requirements.txt").write_text("./thing-1.0-py3-none-any.whl\n")
    (project / "requirements-dev.txt").write_text("")
    return project


# ---- Set-up ----------------------------------------------------------------------------------------------------------


def test_set_up_once_safely_and_again_when_requirements_change(project):
    offline = {"PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    # Two at once: one works, the other waits for it; both then run the module.
    both = [start(project, "-m", "thing", "--flag", "a b", **offline) for _ in range(2)]
    done = [(*process.communicate(timeout=100), process.returncode) for process in both]
    assert [(out, code) for out, _, code in done] == [("thing ['--flag', 'a b']\n", 0)] * 2
    assert sum("setting up .venv" in err for _, err, _ in done) == 1
    # Nothing to do: silent, and nothing is written.
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*") if "__pycache__" not in str(path)}
    assert run(project, "-m", "thing") == (0, "thing []\n", "")  # the interpreter of .venv stays without PYTHON too
    assert before == {path: path.stat().st_mtime_ns for path in project.rglob("*") if "__pycache__" not in str(path)}
    # The test packages come with the first command that needs them, and stay.
    code, _, err = run(project, "setup", **offline)
    assert code == 0 and "updating .venv" in err
    assert run(project, "setup", **offline) == (0, "", "")
    assert run(project, "-m", "thing") == (0, "thing []\n", "")
    # A requirement that cannot be installed: an error, and what is there is not taken for done.
    (project / "requirements.txt").write_text("./thing-1.0-py3-none-any.whl\n./missing-1.0-py3-none-any.whl\n")
    code, out, err = run(project, "-m", "thing", **offline)
    assert code != 0 and out == "" and "missing-1.0" in err
    code, out, err = run(project, "-m", "thing", **offline)
    assert code != 0 and out == "" and "setting up .venv" in err


def test_a_set_up_that_was_killed_starts_again(project):
    offline = {"PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    killed = start(project, "-m", "thing", **offline)
    while not (project / ".venv" / "bin" / "python").exists():  # the packages are not there yet
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    code, out, err = run(project, "-m", "thing", **offline)
    assert (code, out) == (0, "thing []\n") and "setting up .venv" in err


def test_a_python_that_does_not_fit(project, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    code, _, err = run(project, "-m", "thing", PYTHON=str(tmp_path / "python"))
    assert code == 2 and "is not a Python 3.11 or 3.12" in err and not (project / ".venv").exists()
    for name in ("python3.12", "python3.11", "python3"):
        shutil.copy(tmp_path / "python", tmp_path / name)
    code, _, err = run(project, "-m", "thing", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert code == 2 and "no Python 3.11 or 3.12" in err and "PYTHON=" in err


# ---- What torchrun is given ------------------------------------------------------------------------------------------


@pytest.fixture
def machine(project, tmp_path):
    """Return a function that launches on a pretended machine: (exit code, torchrun's arguments, variables, stderr)."""
    fake = project / ".venv" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    installed = project / ".venv" / "installed"
    installed.mkdir()
    for name in ("requirements.txt", "requirements-dev.txt"):
        shutil.copy(project / name, installed)
    (installed / "python").write_text("3.11\n")
    (project / "train_mmdit.py").write_text("")

    def launch(*arguments, cores=2, gpus=0, **environment):
        programs = tmp_path / "programs"
        programs.mkdir(exist_ok=True)
        # nproc answers with these variables when they are set, as the real one does.
        (programs / "nproc").write_text(f"#!/bin/sh\necho ${{OMP_NUM_THREADS:-{cores}}}\n")
        (programs / "nvidia-smi").write_text("#!/bin/sh\n")
        for program in programs.iterdir():
            program.chmod(0o755)
        if not gpus:
            (programs / "nvidia-smi").unlink()
        fake.write_text(f"""#!/bin/sh
case "$*" in
    -c*version_info*) echo 3.11 ;;
    -c*device_count*) echo {gpus} ;;
    *) for argument in "$@"; do echo "$argument"; done; echo ====; env ;;
esac
""")
        fake.chmod(0o755)
        code, out, err = run(project, *arguments, PATH=f"{programs}:{os.environ['PATH']}", **environment)
        given, _, variables = out.partition("====\n")
        return code, given.splitlines(), dict(line.split("=", 1) for line in variables.splitlines() if "=" in line), err

    return launch


@pytest.mark.skipif(os.geteuid() != 0, reason="installs packages only as root")
def test_the_tests_of_deployments_install_what_is_missing(machine, project, tmp_path):
    packages = project / "tests/deploy/packages.txt"
    packages.parent.mkdir(parents=True)
    packages.write_text("# Two\nthere\nmissing\n")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "dpkg-query").write_text('#!/bin/sh\ncase "$*" in *there) printf installed ;; *) exit 1 ;; esac\n')
    apt_get = programs / "apt-get"
    given = ["-m", "pytest", "-m", "deploy", "-rs", "tests/deploy", "-k", "slurm"]
    had_policy = Path("/usr/sbin/policy-rc.d").exists()
    # Services of the packages stay off, the policy that sees to it goes away again, and the tests run.
    apt_get.write_text(f"#!/bin/sh\nls /usr/sbin/policy-rc.d && echo $* >> {tmp_path}/calls\n")
    code, arguments, _, err = machine("test-deploy", "-k", "slurm")
    assert (code, arguments, err) == (0, given, "installing missing\n")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["update", "install -y --no-install-recommends missing"]
    assert Path("/usr/sbin/policy-rc.d").exists() == had_policy
    # Without a network they run all the same, and skip.
    apt_get.write_text("#!/bin/sh\nexit 100\n")
    code, arguments, _, err = machine("test-deploy", "-k", "slurm")
    assert (code, arguments) == (0, given) and "tests that need missing will be skipped" in err
    # Nothing to do: silent.
    packages.write_text("there\n")
    assert machine("test-deploy", "-k", "slurm")[3] == ""


@pytest.mark.parametrize(
    ("settings", "processes", "threads"),
    [
        ({"cores": 2}, 2, 1),
        ({"cores": 1}, 1, 1),
        ({"cores": 2, "OMP_NUM_THREADS": "2"}, 2, 2),  # as the user says
        ({"cores": 2, "NGPU": "1"}, 1, 2),
        ({"cores": 2, "NGPU": "4"}, 4, 1),
        ({"cores": 2, "gpus": 8}, 8, 1),
        ({"cores": 2, "gpus": 8, "NGPU": "2"}, 2, 1),
    ],
    ids=str,
)
def test_processes_and_threads(machine, settings, processes, threads):
    code, given, variables, err = machine(**settings)
    assert code == 0, err
    assert f"--nproc_per_node={processes}" in given
    assert given[-3:] == ["train_mmdit.py", "--dp_replicate=-1", "--dp_shard=1"]
    assert variables["OMP_NUM_THREADS"] == str(threads)
    assert ("GLIBC_TUNABLES" in variables) == ("gpus" not in settings)


def test_one_machine_meets_on_loopback_at_a_port_of_its_own(machine):
    code, given, variables, _ = machine("train_mmdit.py", "--tp", "2", "--data", "/a b/*.tar")
    assert code == 0
    assert given == [
        "-m", "utils.torchrun", "--nnodes=1", "--nproc_per_node=2", "--max_restarts=3", "--rdzv_backend=c10d",
        "--rdzv_endpoint=127.0.0.1:0", "--local_addr=127.0.0.1", "train_mmdit.py", "--tp", "2", "--data", "/a b/*.tar",
    ]  # fmt: skip
    assert variables["GLOO_SOCKET_IFNAME"] == "lo" and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in variables


@pytest.mark.parametrize(
    ("node_rank", "is_host"), [("0", ["--rdzv_conf=is_host=1"]), ("3", ["--rdzv_conf=is_host=0"]), ("", [])]
)
def test_several_machines_meet_where_they_are_told(machine, node_rank, is_host):
    settings = {"NNODES": "4", "NGPU": "8", "RDZV_ENDPOINT": "node0:29400", "NODE_RANK": node_rank}
    _, given, variables, _ = machine(MAX_RESTARTS="0", **settings)
    assert given[2:-3] == [
        "--nnodes=4", "--nproc_per_node=8", "--max_restarts=0", "--rdzv_backend=c10d", "--rdzv_endpoint=node0:29400",
        *is_host,
    ]  # fmt: skip
    _, more, *_ = machine(RDZV_CONF="timeout=900", **settings)
    assert more[7 : 7 + 1] == [f"{is_host[0]},timeout=900" if is_host else "--rdzv_conf=timeout=900"]
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1" and "GLOO_SOCKET_IFNAME" not in variables


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["train_mmdt.py"], {}, "no script train_mmdt.py"),
        (["trian"], {}, "do not know 'trian'"),
        (["-m"], {}, "-m needs a module"),
        ([], {"NGPU": "0"}, "NGPU"),
        ([], {"NGPU": "two"}, "NGPU"),
        ([], {"NNODES": "0"}, "NNODES"),
        ([], {"NNODES": "2"}, "RDZV_ENDPOINT"),
        ([], {"NNODES": "3:2", "RDZV_ENDPOINT": "a:1"}, "MIN is more than MAX"),
        ([], {"NNODES": "2", "RDZV_ENDPOINT": "a:1", "NODE_RANK": "x"}, "NODE_RANK must be"),
        ([], {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS"),
    ],
    ids=str,
)
def test_a_wrong_call_is_one_clear_line(machine, arguments, environment, said):
    code, given, _, err = machine(*arguments, **environment)
    assert code == 2 and given == [] and err.startswith("error: ") and said in err and err.count("\n") == 1


def test_test_runs_pytest_with_its_arguments_and_help_explains(machine, project):
    assert machine("test", "-k", "a b")[1] == ["-m", "pytest", "-k", "a b"]
    code, out, err = run(project, "--help")
    assert (
        code == 0 and err == "" and all(name in out for name in ("NGPU", "NNODES", "RDZV_ENDPOINT", "test", "PYTHON"))
    )


# ---- Real launches ---------------------------------------------------------------------------------------------------


@pytest.fixture
def real(project):
    """The project with the packages of the environment that runs this test."""
    (project / ".venv" / "installed").mkdir(parents=True)
    shutil.copy(project / "requirements.txt", project / ".venv" / "installed")
    (project / ".venv" / "installed" / "python").write_text("{}.{}\n".format(*sys.version_info))
    (project / ".venv" / "bin").mkdir()
    python = project / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shutil.copytree(REPOSITORY / "utils", project / "utils")
    return project


MEET = r"""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
print(f"sum {total.item()} of {dist.get_world_size()}\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_two_launches_at_once_do_not_meet(real):
    (real / "meet.py").write_text(MEET)
    both = [start(real, "meet.py", NGPU="2", OMP_NUM_THREADS="1") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert out.splitlines() == ["sum 3.0 of 2"] * 2


def test_two_machines_meet(real):
    (real / "meet.py").write_text(MEET)
    port = 20000 + os.getpid() % 10000
    common = {"NNODES": "2", "NGPU": "1", "RDZV_ENDPOINT": f"127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
    both = [start(real, "meet.py", NODE_RANK=rank, **common) for rank in ("0", "1")]
    for process in both:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert out == "sum 3.0 of 2\n"


def test_signals_reach_the_ranks_and_exit_codes_come_back(real):
    (real / "wait.py").write_text("""
import os, pathlib, signal, sys, time
def save(*_):
    pathlib.Path(f"saved-{os.environ['RANK']}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path(f"ready-{os.environ['RANK']}").touch()
time.sleep(60)
""")
    process = start(real, "wait.py", NGPU="2")
    deadline = time.monotonic() + 60
    while not all((real / f"ready-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # to the process that was launch.sh, as a scheduler does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err
    assert all((real / f"saved-{rank}").exists() for rank in range(2))

    (real / "fail.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    code, _, err = run(real, "fail.py", NGPU="1", MAX_RESTARTS="0")
    assert code == 128 + signal.SIGKILL and "rank 0" in err and "ended with SIGKILL" in err


def test_a_rank_that_a_real_time_signal_ended_is_named(real):
    """Of signals 34 to 64 Python has a name for the first and the last; an out-of-band kill may be any."""
    (real / "fail.py").write_text("import os; os.kill(os.getpid(), 35)\n")
    code, _, err = run(real, "fail.py", NGPU="1", MAX_RESTARTS="0")
    assert code == 128 + 35 and "ended with SIGRTMIN+1\n" in err and "Traceback" not in err, err
