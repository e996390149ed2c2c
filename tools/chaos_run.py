"""One run of a training command with faults: launched, watched, and launched again until it is complete."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tools.chaos_report import Outcome
from tools.faulty_store import checkpoint_url
from utils.exit_codes import FINAL
from utils.fault_disk import DISK_VARIABLE
from utils.fault_injection import FOLDER_VARIABLE, STORE_VARIABLE, VARIABLE, Fault

_POLL_S = 0.02
_AGAIN = "starting all ranks again"  # what utils.torchrun says when it has noticed a fault
_MOST_LAUNCHES = 30
_TMPFS = "size=512m,nr_inodes=2000"  # room for some checkpoints of a small model, and soon filled


class Launcher:
    """Launches `command` on this machine, as launch.sh does.

    folder: new; each run gets one inside.  command: a script and its flags.  hang_s: see the script's --hang_s.
    timeout_s: limit of a run, all of its launches together.
    """

    def __init__(self, folder: Path, command: list[str], ranks: int, hang_s: float, timeout_s: float):
        """Raises: ValueError for a command that cannot be rehearsed."""
        if not command or not command[0].endswith(".py"):
            raise ValueError(f"give the command after --, such as -- train_mmdit.py --num_steps 12; got {command}")
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"--folder {folder} is not empty: an earlier rehearsal would be resumed")
        self.folder, self.words, self.ranks = folder, command, ranks
        self._timeout_s, self._hang_s = timeout_s, hang_s

    def number(self, flag: str) -> int:
        """Return the value of a flag of the command as the script reads it: the last, "--num-steps=12" as well.

        Raises: ValueError if it is not there.
        """
        values = []
        for word, following in zip(self.words, [*self.words[1:], ""], strict=True):
            name, equals, value = word.partition("=")
            if name.replace("-", "_") == flag.replace("-", "_"):
                values.append(value if equals else following)
        try:
            return int(values[-1])
        except (ValueError, IndexError):
            raise ValueError(f"the command needs {flag} and a number, so that faults can be placed") from None

    def run(self, name: str, faults: list[Fault], place: str = "local", flags: tuple[str, ...] = ()) -> Outcome:
        """Run until complete, or until nothing helps; stops every process it has started.

        place: "local"; "tmpfs", the run folder is in a file system of its own, which this process may mount; "s3", the
        checkpoints go to the store of `tools.faulty_store`.  flags: more for the command.
        """
        folder = self.folder / name
        folder.mkdir(parents=True)
        outcome = Outcome(name, faults, folder, place)
        self._flags, self._environment = [*flags], {}
        if place == "tmpfs":
            disk = folder.absolute() / "disk"
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", _TMPFS, "chaos", str(disk)], check=True)
            outcome.run, self._environment = disk / "run", {DISK_VARIABLE: str(disk)}
        if place == "s3":
            self._flags += ["--checkpoint_folder", checkpoint_url(name)]
            self._environment = {STORE_VARIABLE: os.environ["AWS_ENDPOINT_URL"]}
        began = time.monotonic()
        while len(outcome.codes) < _MOST_LAUNCHES:
            left = self._timeout_s - (time.monotonic() - began)
            outcome.codes.append(self._launch(outcome, max(left, 1.0)))
            if outcome.codes[-1] == 0 or outcome.codes[-1] in FINAL or outcome.codes[-1] == "timeout":
                break
            outcome.ended_at.append(time.monotonic())
        outcome.took_s = time.monotonic() - began
        return outcome

    def _launch(self, outcome: Outcome, timeout_s: float) -> int | str:
        notes = outcome.folder.absolute() / "notes"
        notes.mkdir(exist_ok=True)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        for name in (DISK_VARIABLE, STORE_VARIABLE):
            os.environ.pop(name, None)  # of the run before
        os.environ.update(self._environment)
        os.environ["TMPDIR"] = str(notes)
        os.environ[VARIABLE] = "; ".join(fault.name for fault in outcome.faults)
        os.environ[FOLDER_VARIABLE] = str(outcome.folder.absolute() / "struck")
        process = subprocess.Popen(
            [sys.executable, "-m", "utils.torchrun", f"--nproc_per_node={self.ranks}", "--max_restarts=3",
             "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0", "--local_addr=127.0.0.1", *self.words,
             "--run_folder", str(outcome.run), "--hang_s", str(self._hang_s), *self._flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        reader = threading.Thread(target=_read, args=(process, outcome), daemon=True)
        reader.start()
        deadline, seen = time.monotonic() + timeout_s, 0.0
        while process.poll() is None and time.monotonic() < deadline:
            for note in notes.glob("torchrun-*/stepped"):  # touched by the first step of every start
                stepped = note.stat().st_mtime if note.exists() else seen
                if stepped > seen:
                    seen = stepped
                    outcome.stepped_at.append(time.monotonic())
            time.sleep(_POLL_S)
        if process.poll() is None:
            process.kill()  # the ranks end with it
            process.wait()
            return "timeout"
        reader.join()
        return process.returncode


def _read(process: subprocess.Popen, outcome: Outcome) -> None:
    """Keep what is printed, and when the launcher noticed a fault."""
    with (outcome.folder / "printed.txt").open("a", encoding="utf-8") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
            if _AGAIN in line:
                outcome.ended_at.append(time.monotonic())
