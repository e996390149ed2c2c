"""Command line, errors and run folder, through real processes where several ranks take part."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from utils import config, exit_codes
from utils.config import parse, write_run_folder
from utils.stop_note import TO_BE_CONTINUED

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Config:
    # Length
    num_steps: int = 100  # optimizer steps
    lr: float = 1e-3  # peak learning rate
    # Watching
    log_samples: bool = False  # list each step's samples
    sample_size: tuple[int, int] = (64, 64)  # height, width in pixels
    run_folder: str = "runs/a"  # everything this run writes


@dataclass(frozen=True)
class LaterConfig(Config):
    """The same script after two fields were added to it."""

    ema_decay: float = 0.99
    beta2: float = 0.95


def test_flags_have_underscores_and_booleans_two_forms():
    assert parse(Config, args=[]) == Config()
    given = parse(Config, args=["--num_steps", "7", "--lr", "3e-4", "--log_samples", "--sample_size", "64", "96"])
    assert given == Config(num_steps=7, lr=3e-4, log_samples=True, sample_size=(64, 96))
    assert parse(Config, args=["--log-samples", "--num-steps=7"]) == Config(num_steps=7, log_samples=True)
    assert parse(Config, args=["--no_log_samples"]) == parse(Config, args=["--no-log-samples"]) == Config()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--eval_evry", "3"], "--eval_evry"),
        (["--num_steps", "many"], "--num_steps"),
        (["--sample_size", "64"], "sample"),
    ],
)
def test_a_wrong_flag_is_an_error_that_names_it(args, named, capsys):
    with pytest.raises(SystemExit) as exit_code:
        parse(Config, args=args)
    assert exit_code.value.code == 2
    captured = capsys.readouterr()
    assert named in captured.out + captured.err


def test_only_the_first_rank_of_a_machine_speaks(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(config, "_GRACE_S", 0)
    with pytest.raises(SystemExit) as exit_code:
        parse(Config, args=["--eval_evry", "3"])
    assert exit_code.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_help_shows_the_comments(capsys):
    with pytest.raises(SystemExit) as exit_code:
        parse(Config, "What it trains.", args=["--help"])
    assert exit_code.value.code == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("What it trains.", "--num_steps", "optimizer steps", "--no_log_samples"))


SCRIPT = """
import os, sys
sys.path.insert(0, {repository!r})
from dataclasses import dataclass
from utils import config, exit_codes
from utils.config import parse, run_main
from utils.exit_codes import NO_PROGRESS, Stopped

@dataclass(frozen=True)
class Config:
    fault: str = "all"  # which error to make

def main(cfg):
    if cfg.fault == "all":
        raise ValueError("--tp 3 does not divide the 4 heads; use one of [1, 2, 4]")
    if cfg.fault == "one" and os.environ["RANK"] == "1":
        raise ValueError("LOCAL_RANK 1 has no GPU")
    if cfg.fault == "library":
        import json
        json.loads("{{")
    if cfg.fault == "stopped":
        raise Stopped(NO_PROGRESS, "enough of it")
    if cfg.fault == "thread":
        import threading, time
        threading.Thread(target=time.sleep, args=(90,)).start()
        raise RuntimeError("this rank is done for")
    if cfg.fault == "one":
        import time
        time.sleep(60)

run_main(main, parse(Config))
"""


def launch(folder, module, *flags, **environment):
    """Run SCRIPT on two ranks; return (exit code, stdout and stderr)."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(repository=str(REPOSITORY)))
    done = subprocess.run(
        [sys.executable, "-m", module, "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0",
         "--local_addr=127.0.0.1", str(script), *flags],
        cwd=REPOSITORY, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_users_error_is_printed_once_and_without_a_traceback(tmp_path):
    code, shown = launch(tmp_path, "utils.torchrun")
    assert (code, shown) == (2, "error: --tp 3 does not divide the 4 heads; use one of [1, 2, 4]\n")


def test_torchrun_itself_repeats_the_error_in_its_table(tmp_path):
    code, shown = launch(tmp_path, "torch.distributed.run")
    assert code == 1
    assert "ValueError: --tp 3 does not divide" in shown[shown.index("Root Cause") :]


def test_an_error_of_a_later_rank_alone_is_heard(tmp_path):
    code, shown = launch(tmp_path, "utils.torchrun", "--fault=one")
    assert code == 2 and "error (rank 1): LOCAL_RANK 1 has no GPU" in shown


def test_a_librarys_value_error_keeps_its_traceback(tmp_path):
    code, shown = launch(tmp_path, "utils.torchrun", "--fault=library")
    assert code == 1 and 'json.loads("{")' in shown and "JSONDecodeError" in shown


def test_a_stop_has_its_own_exit_code_and_is_said_once(tmp_path):
    code, shown = launch(tmp_path, "utils.torchrun", "--fault=stopped")
    assert code == 83 and shown.count("stopped: enough of it") == 1 and "Traceback" not in shown


def test_a_failed_rank_does_not_wait_for_its_threads(tmp_path):
    started = time.monotonic()
    code, shown = launch(tmp_path, "utils.torchrun", "--fault=thread")
    assert code == 1 and "RuntimeError: this rank is done for" in shown and time.monotonic() - started < 60


def test_traceback_of_a_users_error_on_request(tmp_path):
    _, shown = launch(tmp_path, "utils.torchrun", TRACEBACK="1")
    assert "in main" in shown and "error: --tp 3" in shown


def test_a_wrong_flag_under_torchrun(tmp_path):
    code, shown = launch(tmp_path, "utils.torchrun", "--fautl=all")
    assert code == 2 and shown.count("Unrecognized options: --fautl") == 1 and "Traceback" not in shown


@pytest.fixture
def script(tmp_path):
    """A train script in a git repository of its own, changed since its last commit."""
    script = tmp_path / "source" / "train.py"
    script.parent.mkdir()
    script.write_text("first\n")
    git = ["git", "-C", str(script.parent), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    script.write_text("second\n")
    return script


def test_the_run_folder_says_what_ran(tmp_path, script):
    folder = tmp_path / "runs" / "a"
    write_run_folder(folder, Config(lr=0.5), str(script))
    assert json.loads((folder / "config.json").read_text()) == {
        "num_steps": 100, "lr": 0.5, "log_samples": False, "sample_size": [64, 64], "run_folder": "runs/a",
    }  # fmt: skip
    assert (folder / "train.py").read_text() == "second\n"
    head = subprocess.run(
        ["git", "-C", str(script.parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    diff = (folder / "git.diff").read_text()
    assert diff.startswith(f"# commit {head.stdout.strip()}\n") and "-first\n+second\n" in diff
    subprocess.run(["git", "-C", str(script.parent), "apply", "-R", str(folder / "git.diff")], check=True)
    assert script.read_text() == "first\n"


def test_without_git_there_is_no_diff(tmp_path, script, monkeypatch):
    monkeypatch.setenv("PATH", "")
    write_run_folder(tmp_path / "run", Config(), str(script))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "train.py"]


def test_resume_with_the_same_or_harmless_settings_keeps_what_was_there(tmp_path, script):
    write_run_folder(tmp_path / "run", Config(), str(script))
    write_run_folder(tmp_path / "run", Config(), str(script))
    assert len(list((tmp_path / "run").iterdir())) == 3
    script.write_text("third\n")
    write_run_folder(tmp_path / "run", Config(num_steps=200), str(script), {"num_steps"})
    assert json.loads((tmp_path / "run" / "config.json").read_text())["num_steps"] == 200
    assert json.loads((tmp_path / "run" / "config.1.json").read_text())["num_steps"] == 100
    assert (tmp_path / "run" / "train.py").read_text() == "third\n"
    assert (tmp_path / "run" / "train.1.py").read_text() == "second\n"


def test_another_configuration_is_refused_with_every_difference(tmp_path, script):
    write_run_folder(tmp_path / "run", Config(), str(script))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match="another configuration") as error:
        write_run_folder(
            tmp_path / "run", Config(lr=0.5, sample_size=(96, 64), num_steps=5), str(script), {"num_steps"}
        )
    assert "--lr: 0.001 there, 0.5 here" in str(error.value)
    assert "--sample_size: [64, 64] there, [96, 64] here" in str(error.value)
    assert "--num_steps" not in str(error.value) and "--run_folder" in str(error.value)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}


def test_a_field_added_since_counts_at_its_default(tmp_path, script):
    write_run_folder(tmp_path / "run", Config(), str(script))
    with pytest.raises(ValueError, match="--beta2: 0.95 there, 0.9 here"):
        write_run_folder(tmp_path / "run", LaterConfig(beta2=0.9), str(script))
    write_run_folder(tmp_path / "run", LaterConfig(), str(script))


def test_other_ranks_check_but_do_not_write(tmp_path, script, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    write_run_folder(tmp_path / "run", Config(), str(script))
    assert not (tmp_path / "run").exists()
    monkeypatch.delenv("RANK")
    write_run_folder(tmp_path / "run", Config(), str(script))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="--lr"):
        write_run_folder(tmp_path / "run", Config(lr=0.5), str(script))


def test_a_run_folder_that_cannot_be_made(tmp_path, script):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--run_folder .*file/run cannot be written"):
        write_run_folder(tmp_path / "file" / "run", Config(), str(script))


def test_the_page_of_exit_codes_has_them_all():
    page = (REPOSITORY / "docs" / "stops-and-faults.md").read_text(encoding="utf-8")
    cells = [(row.split("|")[1].strip(), row) for row in page.splitlines() if row.startswith("| ")]
    rows = {int(code): row for code, row in cells if code.isdigit()}
    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert set(rows) == codes | {0, TO_BE_CONTINUED}
    for code, name in exit_codes.NAMES.items():
        assert name in rows[code] and ("| no |" in rows[code]) == (code in exit_codes.FINAL)
