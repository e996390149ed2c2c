"""The batch file that `./launch.sh slurm` makes, without a Slurm; tests/deploy/test_slurm.py runs it on a real one."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.slurm import TEMPLATE, Config, batch_file
from utils.exit_codes import FINAL
from utils.stop_note import TO_BE_CONTINUED

REPOSITORY = Path(__file__).resolve().parent.parent
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
COMMAND = ["train_mmdit.py", "--data", "/a b/*.tar", "--run_folder=runs/x y", "--note", "it's $HOME"]


def made(*command, project="/the project", **settings):
    return batch_file(Config(**settings), command or COMMAND, TEMPLATE.read_text(), Path(project))


def options(text):
    """Return sbatch's options as it reads them: up to the first command."""
    lines = [line for line in text.split("\nset ")[0].splitlines() if line.startswith("#SBATCH")]
    lines = [line.replace("\\\\", "\\") for line in lines]  # an escape for sbatch, between single quotes as well
    read = [shlex.split(line.removeprefix("#SBATCH"), comments=True)[0].removeprefix("--") for line in lines]
    return dict(option.split("=", 1) if "=" in option else (option, None) for option in read)


def test_options_are_filled_in_and_no_other_line_changes():
    plain, filled = TEMPLATE.read_text(), made(nodes=4, gpus=4, time="2-0", save_s=300, partition="gpu", account="a")
    assert options(filled) == options(plain) | {
        "job-name": "x y", "nodes": "4", "gpus-per-node": "4", "time": "2-0", "signal": "B:USR1@300",
        "output": "runs/slurm/%j.log", "chdir": "/the project", "partition": "gpu", "account": "a",
    }  # fmt: skip
    shared = options(made(exclusive=False, gpus=0, sbatch=("mem=64G", "constraint=h100", "overcommit")))
    assert not {"exclusive", "gpus-per-node"} & shared.keys()
    assert (shared["mem"], shared["constraint"], shared["overcommit"]) == ("64G", "h100", None)
    assert "export NGPU=2" in made(gpus=0) and "export NGPU=2" not in made()
    body = plain.split("set -uo pipefail")[1]
    assert filled.endswith(body)


def test_the_scripts_words_arrive_as_they_were_given():
    def words(text, **environment):
        line = next(line for line in text.splitlines() if line.startswith("set -- "))
        show = f"{line}\nprintf '%s\\n' \"$@\""
        return subprocess.run(["bash", "-c", show], env=environment, capture_output=True, text=True).stdout.splitlines()

    assert words(made()) == COMMAND
    task = made("a.py", "--seed", "%a", "--run_folder=runs/s %a/%a", array="0-7")
    assert words(task, SLURM_ARRAY_TASK_ID="5") == ["a.py", "--seed", "5", "--run_folder=runs/s 5/5"]
    assert words(made("a.py", "--seed", "%a")) == ["a.py", "--seed", "%a"]  # no array: the script's own


def test_codes_are_those_of_the_launcher():
    text = TEMPLATE.read_text()
    final = re.search(r"^    ([\d |]+)\) echo .*gave up", text, re.M)[1]
    assert {int(code) for code in final.split("|")} == FINAL
    assert f"    {TO_BE_CONTINUED}) requeue" in text


@pytest.mark.parametrize("settings", [{}, {"gpus": 0, "exclusive": False}, {"array": "0-7"}], ids=str)
def test_the_file_is_clean(settings, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(made(*COMMAND[:3], "--run_folder=runs/x %a", *COMMAND[4:], **settings))
    # SC2016: the script's own words are not for the shell.
    done = subprocess.run([SHELLCHECK, "--exclude=SC2016", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": 0}, "--nodes must be at least 1, got 0"), ({"gpus": -1}, "--gpus"), ({"save_s": 0}, "--save_s"),
        ({"time": "10 h"}, "DAYS-HOURS"), ({"time": "15"}, "--time 15 leaves less"),
        ({"time": "0-0:19:59"}, "leaves less"), ({"time": "19:59"}, "leaves less"),
        ({"time": "00:19:59"}, "leaves less"), ({"sbatch": ("--mem=0",)}, "without --"),
        ({"sbatch": ("nodes=3",)}, "say it with --nodes"), ({"sbatch": ("exclusive",)}, "say it with --exclusive"),
        ({"array": "0..7"}, "0-7%2, got '0..7'"), ({"array": "%a"}, "--array must be"), ({"array": "0-7%0"}, "--array"),
        ({"partition": "gpu\n#SBATCH --nodes=99"}, "--partition must be one line"),
        ({"job_name": "a\tb"}, "--job_name must be one line"),
        ({"project": "/a\n#SBATCH --nodes=99"}, "this folder's path must be one line"),
        ({"sbatch": ("comment=a\rb",)}, "without --"), ({"sbatch": ("ntasks-per-node=8",)}, "a node has one task"),
        ({"array": "0-7"}, "with %a in it"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_values_are_named(settings, said):
    with pytest.raises(ValueError, match=said):
        made(**settings)


def test_no_name_of_a_folder_becomes_an_option():
    with pytest.raises(ValueError, match="--job_name must be one line"):
        made("a.py", "--run_folder", "runs/a\n#SBATCH --nodes=99")
    odd = r"/it's a \ #1 \"狗\" $(x)"
    read = options(made("a.py", f"--run_folder={odd}", project=odd))
    assert (read["chdir"], read["job-name"]) == (odd, odd[1:])
    with pytest.raises(ValueError, match="with %a in it"):
        made("a.py", "--seed=1", array="0-7")
    with pytest.raises(ValueError, match="with %a in it"):
        made("a.py", "--seed=%a", "--run_folder=runs/a", array="0-7")


SLURM_CONF = "ClusterName=x\nSlurmctldHost=x(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/none\nCredType=cred/none\n"


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="no sbatch here; the other tests read the file themselves")
def test_sbatch_reads_what_was_meant(tmp_path):
    """It reads the file before it looks for a controller, of which there is none."""
    odd = r"it's a \ #1 \"狗\" $(x)"
    (tmp_path / "slurm.conf").write_text(f"{SLURM_CONF}MessageTimeout=1\nNodeName=x\nPartitionName=a Nodes=x\n")
    (tmp_path / "job").write_text(made("a.py", f"--run_folder=runs/{odd}", project=f"/tmp/{odd}"), encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(tmp_path / "slurm.conf"), "LC_ALL": "C.UTF-8"}
    read = subprocess.run(
        ["sbatch", "-vv", tmp_path / "job"], env=environment, capture_output=True, encoding="utf-8", timeout=60
    )
    assert f"job-name            : {odd}\n" in read.stderr and f"chdir               : /tmp/{odd}\n" in read.stderr


@pytest.mark.parametrize("limit", ["20", "20:00", "0:20:00", "0-1", "0-0:20", "1-0:0:0"])
def test_times_as_slurm_writes_them(limit):
    assert options(made(time=limit))["time"] == limit


def test_the_command_line():
    def run(*arguments):
        command = [sys.executable, "-m", "tools.slurm", *arguments]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, env={"PATH": "/bin"})

    done = run("--nodes", "3", "--print", "train_mmdit.py", "--help")  # behind the script all is the script's
    assert done.returncode == 0 and "set -- train_mmdit.py --help\n" in done.stdout, done.stderr
    assert options(done.stdout)["nodes"] == "3"
    missing = run("--nodes", "3")
    assert missing.returncode == 2 and "which script?" in missing.stderr
