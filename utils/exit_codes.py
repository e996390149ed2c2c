"""What the exit code of a training process says, to the launcher, a scheduler's script and people."""

import signal

ERROR = 1  # a fault, with its traceback
USER_ERROR = 2  # a flag, a file or a value that a user can correct; the same as for an unknown flag
# sysexits.h uses 64 to 78, shells 126 and more, Python 1.
HANG = 80  # a phase took longer than its deadline, or a rank stopped answering; stacks lie in the run folder
ROLLED_BACK = 81  # start again: from an older checkpoint, without the stretch of data after which training went wrong
DIVERGED = 82  # rolled back too often
NO_PROGRESS = 83  # restarted too often without a newer checkpoint
PEER_LOST = 84  # another rank died
# 85 is utils.stop_note.TO_BE_CONTINUED, of the launcher.
UNSAVED = 86  # checkpoints could not be saved; what came after the newest one is lost

# The launcher does not start the ranks again after these: it would only happen again.
FINAL = frozenset({USER_ERROR, DIVERGED, NO_PROGRESS})

NAMES = {
    ERROR: "an error",
    USER_ERROR: "a configuration error",
    HANG: "a hang",
    ROLLED_BACK: "a roll-back",
    DIVERGED: "too many roll-backs",
    NO_PROGRESS: "too many restarts without progress",
    PEER_LOST: "the loss of another rank",
    UNSAVED: "checkpoints that could not be saved",
}


def ending(code: int) -> str:
    """Return how a process ended, in words; code: as subprocess has it, a signal's number below zero."""
    if code >= 0:
        return f"exit code {code}" + (f" ({NAMES[code]})" if code in NAMES else "")
    try:
        return signal.Signals(-code).name
    except ValueError:  # of the real-time signals Python knows the first and the last
        first, last = (getattr(signal, name, 0) for name in ("SIGRTMIN", "SIGRTMAX"))  # not on macOS
        return f"SIGRTMIN+{-code - first}" if first < -code < last else f"signal {-code}"


class Stopped(SystemExit):
    """Ends this process with one of the codes above; `message` is printed once, by `utils.config.run_main`."""

    def __init__(self, code: int, message: str):
        super().__init__(code)
        self.message = message
