"""A note from the ranks of a host to its launcher: they stopped early, to be continued, though nothing failed.

Ranks that saved and left end with exit code 0: with any other torchrun would start them again.  But a scheduler must
tell "stopped before its node goes away" from "complete".  So they leave a note, and the launcher ends with
TO_BE_CONTINUED instead of 0 (`utils.torchrun`, deploy/slurm/train.sbatch, deploy/k8s/).
"""

import os
from pathlib import Path

TO_BE_CONTINUED = 85  # the launcher's exit code: start the same command again
VARIABLE = "STOP_NOTE"  # in the ranks' environment: the path of the note


def leave_note(reason: str) -> None:
    """Tell the launcher of this host, if there is one, why its ranks stop early; any number of them may."""
    if path := os.environ.get(VARIABLE):
        Path(path).write_text(reason + "\n", encoding="utf-8")
