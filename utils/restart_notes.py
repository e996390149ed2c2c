"""Notes from the ranks of a machine to its launcher, which decides by them whether to start the ranks again."""

import os
from pathlib import Path

# Variables that utils.torchrun sets to the path of a note.
FIRST_STEP = "FIRST_STEP_NOTE"  # a step has been completed: what fails from now on may be the machine's fault
PROGRESS = "PROGRESS_NOTE"  # this start found a newer checkpoint than the last one


def leave_note(variable: str) -> None:
    """Leave a note, if there is a launcher to read it."""
    if (path := os.environ.get(variable)) and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).touch()
