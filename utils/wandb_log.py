"""A run's curves and pictures for Weights & Biases, whose library is imported only if a run asks for it."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from utils.tensorboard_log import tag


def check_wandb(project: str) -> None:
    """Raises: ValueError if a project is named and the library is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ValueError(f"--wandb {project} needs the package wandb: .venv/bin/pip install wandb; or leave it out")


class WandbLog:
    """Logs to one run of `project`, named after the run folder; a resumed run goes on in it.

    Steps that are done again after a resume keep their first numbers there: the service takes none for an earlier step.
    """

    def __init__(self, folder: Path, project: str, config: Mapping[str, object]):
        import wandb

        self._wandb = wandb
        kept = folder / "wandb_id.txt"
        run_id = kept.read_text(encoding="utf-8").strip() if kept.exists() else wandb.util.generate_id()
        kept.write_text(run_id + "\n", encoding="utf-8")
        self._run = wandb.init(
            project=project, name=folder.name, id=run_id, resume="allow", dir=str(folder), config=dict(config)
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log a point of each curve."""
        self._run.log({tag(name): value for name, value in values.items()}, step=step)

    def image(self, step: int, name: str, picture: np.ndarray, prompts: Sequence[str]) -> None:
        """Log a uint8 (H, W, 3) picture with its prompts as caption."""
        self._run.log({name: self._wandb.Image(picture, caption=" | ".join(prompts))}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
