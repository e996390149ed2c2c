"""The planner of an edit run, as a text_encoder/ folder that `transformers` and the edit pipelines load."""

from pathlib import Path

import torch
from torch import Tensor

from model.text_encoder import load_vlm, quiet_transformers
from parallel.checkpoint import StoredTensors

_PLANNER = "planner.vlm."  # before the names of its weights in a checkpoint of train_edit_ddp.py


class ExportedPlanner:
    """The vision-language model of a run: what it trained, and the rest as the model folder has it."""

    def __init__(self, stored: StoredTensors, base: Path, dtype: torch.dtype):
        """base: the folder that the run began with.

        Raises: ValueError if it holds another model.
        """
        self._stored, self._base, self._dtype = stored, base, dtype
        self.names = [name.removeprefix(_PLANNER) for name in stored.specs if name.startswith(_PLANNER)]

    @property
    def num_bytes(self) -> int:
        """Of all its values, as far as the run trained them."""
        shapes = (self._stored.specs[_PLANNER + name][0] for name in self.names)
        return sum(torch.Size(shape).numel() for shape in shapes) * self._dtype.itemsize

    @torch.no_grad()
    def write(self, folder: Path, max_shard_gb: float) -> None:
        """Write the folder, then load it and compare every weight.  Takes the model's memory twice.

        Raises: ValueError for a weight of no such model, or one that is not read back as it was written.
        """
        model = load_vlm(self._base / "text_encoder", self._dtype)
        parameters = dict(model.named_parameters())
        for name in self.names:
            tensor = self._read(name)
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise ValueError(
                    f"the checkpoint's planner has {name}, {tuple(tensor.shape)}, and {self._base} has no such weight; "
                    "give --model the folder that the run was trained with"
                )
            parameters[name].copy_(tensor)
        with quiet_transformers():
            model.save_pretrained(folder, max_shard_size=int(max_shard_gb * 1e9))
        trained = set(self.names)
        for name, parameter in load_vlm(folder, self._dtype).named_parameters():
            expected = self._read(name) if name in trained else parameters[name]
            if not torch.equal(parameter, expected):
                raise ValueError(f"{name} in {folder} is not what was written; is the disk broken?")

    def _read(self, name: str) -> Tensor:
        return self._stored.read(_PLANNER + name).to(self._dtype)
