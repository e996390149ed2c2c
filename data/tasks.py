"""What a run trains its samples for: text-to-image, edits, and pictures that are to be drawn again as they are.

A reconstruction is an edit made of any picture: the picture is reference and target, the instruction a fixed one.  It
teaches that what nobody asks to change stays.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

T2I, EDIT, RECONSTRUCTION = TASKS = ("t2i", "edit", "reconstruction")
MIXED = "mixed"
_INSTRUCTIONS = {"zh": "请保持图片不变。", "en": "Keep the picture as it is."}
DEFAULT_SHARES = {T2I: 5.0, EDIT: 4.0, RECONSTRUCTION: 1.0}


def check_task(trained: Mapping[str, object], run: str | Path, wanted: Collection[str], instead: str) -> None:
    """Check that a tool fits what a run was trained for.

    trained: the run's configuration; {} = no run, which fits.  wanted: tasks, mixed included where it fits.
    Raises: ValueError that names the run, its task and the tool for it.
    """
    task = EDIT if "train" in trained else trained.get("task", T2I)  # train_edit_ddp.py has the first, not the second
    if trained and task not in wanted:
        raise ValueError(f"{run} was trained for --task {task}, and this is for {' or '.join(wanted)}; use {instead}")


def own_task(is_edit: bool) -> str:
    """Return the task that a sample is of by what it holds."""
    return EDIT if is_edit else T2I


def keeping_instruction(language: str) -> str:
    """Return what a reconstruction is told, in the language of the sample's caption: Chinese, else English."""
    return _INSTRUCTIONS.get(language, _INSTRUCTIONS["en"])
