"""A run's curves, pictures, texts and distributions for TensorBoard, under tags that group what belongs together."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_LABELLED = re.compile(r"(val_(?:plan_)?(?:loss|exact)|(?:plan_)?loss)(?:_(.+))?")
_LANGUAGES = ("zh", "en", "other")  # as data.captions.LANGUAGE_ROWS has them
_GROUPS = {
    "lr": "optimizer", "step_s": "speed", "samples_per_s": "speed", "tokens_per_s": "speed", "tflops": "speed",
    "mfu": "speed", "mem_gib": "memory",
}  # fmt: skip


def tag(name: str) -> str:
    """Return the tag of a number of metrics.jsonl: "<group>/<name>"."""
    if name in _GROUPS:
        return f"{_GROUPS[name]}/{name}"
    if name.endswith("grad_norm"):
        return f"optimizer/{name}"
    if found := _LABELLED.fullmatch(name):
        kind, label = "validation" if name.startswith("val_") else "train", found[2]
        if label is None:
            return f"{kind}/{name}"
        axis = "time" if re.fullmatch(r"t\d+", label) else "language" if label in _LANGUAGES else "category"
        return f"{kind}_by_{axis}/{name}"
    return f"time/{name}" if name.endswith(("_s", "_exposed")) else f"data/{name}"


class TensorBoardLog:
    """Writes to <folder>/tb.  What an earlier start wrote for `start_step` and later is hidden by TensorBoard."""

    def __init__(self, folder: Path, start_step: int):
        from torch.utils.tensorboard import SummaryWriter  # not before it is needed: slow, and rank 0's alone

        self._writer = SummaryWriter(str(folder / "tb"), purge_step=start_step, flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write a point of each curve."""
        for name, value in values.items():
            self._writer.add_scalar(tag(name), value, step)

    def image(self, step: int, name: str, picture: np.ndarray, prompts: Sequence[str]) -> None:
        """Write a uint8 (H, W, 3) picture and, as a numbered text, the prompts it was drawn from."""
        self._writer.add_image(name, picture, step, dataformats="HWC")
        if prompts:
            listed = "\n".join(f"{i}. {_escaped(prompt)}" for i, prompt in enumerate(prompts, 1))
            self._writer.add_text(f"{name}/prompts", listed, step)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Write how `values` are distributed."""
        self._writer.add_histogram(f"data/{name}", values, step)

    def table(self, step: int, name: str, rows: Mapping[str, object]) -> None:
        """Write a text of two columns."""
        lines = [f"| {_escaped(key)} | {_escaped(_text(value))} |" for key, value in rows.items()]
        self._writer.add_text(f"run/{name}", "\n".join(["| | |", "|---|---|", *lines]), step)

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _escaped(text: str) -> str:
    """Return text that TensorBoard's Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]()#+.!|-])", r"\\\1", html.escape(text.replace("\n", " "), quote=False))
