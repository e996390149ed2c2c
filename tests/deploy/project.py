"""A copy of this project, in which jobs may write, that runs with the interpreter of the test."""

import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def make_project(project: Path) -> Path:
    """Link everything into the folder; `launch.sh` finds its set-up done."""
    project.mkdir()
    for path in REPOSITORY.iterdir():
        if path.name not in (".git", ".venv", ".cache", "runs", "launch.sh", "__pycache__"):
            (project / path.name).symlink_to(path)
    shutil.copy(REPOSITORY / "launch.sh", project)
    installed = project / ".venv" / "installed"
    installed.mkdir(parents=True)
    for name in ("requirements.txt", "requirements-dev.txt"):
        shutil.copy(REPOSITORY / name, installed)
    (installed / "python").write_text("{}.{}\n".format(*sys.version_info))
    python = project / ".venv" / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return project
