"""Exit codes in words: every signal that can end a process has a name, the shell's."""

import signal
import subprocess

from utils.exit_codes import HANG, NAMES, ending


def test_every_signal_has_the_name_that_the_shell_has_for_it():
    for number in range(1, 65):
        name = ending(-number)
        if number not in (32, 33):  # which the C library keeps for itself
            shells = subprocess.run(["bash", "-c", f"kill -l {number}"], capture_output=True, text=True).stdout.strip()
            first, last = signal.SIGRTMIN, signal.SIGRTMAX
            if shells.startswith("RTMAX-"):
                shells = f"RTMIN+{last - int(shells.removeprefix('RTMAX-')) - first}"  # the shell counts from both ends
            assert name == f"SIG{shells}" and "\n" not in name, number
    assert ending(-33) == "signal 33" and ending(-65) == "signal 65"
    assert len({ending(-number) for number in range(1, 65)}) == 64


def test_codes_have_their_meaning_beside_them():
    assert ending(0) == "exit code 0" and ending(7) == "exit code 7"
    assert ending(HANG) == f"exit code {HANG} ({NAMES[HANG]})"
