"""Released safetensors weights: whole on one process, or each rank's own part of a sharded model."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.slices import local_slice


def weight_files(folder: str | Path) -> dict[str, Path]:
    """Return the file of every tensor in a folder of safetensors.

    Raises: ValueError if there is none, if a file that the index names is missing or unreadable, if the index and the
    files disagree, or if two files hold the same tensor.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no .safetensors file in {folder}; give a folder in the released layout with weights in it")
    where: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a readable safetensors file ({error}); copy it again") from error
        for name in names:
            if name in where:
                raise ValueError(f"{name} is in both {where[name].name} and {file.name} of {folder}; keep one")
            where[name] = file
    for index in folder.glob("*.safetensors.index.json"):
        listed = json.loads(index.read_text())["weight_map"]
        wrong = sorted(
            name for name in listed.keys() | where.keys() if where.get(name) != folder / listed.get(name, "")
        )
        if wrong:
            raise ValueError(f"{index} and the files beside it disagree on {len(wrong)} tensors, first {wrong[0]}")
    return where


def has_weights(folder: str | Path) -> bool:
    """Return whether a folder holds safetensors at all."""
    return any(Path(folder).glob("*.safetensors"))


def read_safetensors(folder: str | Path) -> dict[str, Tensor]:
    """Return every tensor of a folder, whole, on the CPU, in the stored dtype."""
    tensors = {}
    for file in sorted(set(weight_files(folder).values())):
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return tensors


def load_weights(model: nn.Module, folder: str | Path, optional: Iterable[str] = ()) -> None:
    """Fill a materialised, possibly sharded model; each rank reads only the part of each tensor that it holds.

    optional: names that the folder may lack (extensions); they keep their values.
    Raises: ValueError, before a parameter changes, for missing, extra or wrong-shaped tensors.
    """
    where = weight_files(folder)
    parameters = dict(model.named_parameters())
    missing = sorted(parameters.keys() - where.keys() - set(optional))
    extra = sorted(where.keys() - parameters.keys())
    if missing or extra:
        raise ValueError(
            f"{folder} does not fit the model: {len(missing)} tensors missing (first {missing[:3]}), "
            f"{len(extra)} not of this model (first {extra[:3]})"
        )
    by_file: dict[Path, list[str]] = {}
    for name, file in where.items():
        by_file.setdefault(file, []).append(name)
    for check in (True, False):  # every shape is checked before anything is written
        for file, names in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    stored, parameter = opened.get_slice(name), parameters[name]
                    if check and tuple(stored.get_shape()) != tuple(parameter.shape):
                        raise ValueError(
                            f"{file}: {name} has shape {tuple(stored.get_shape())}, the model needs "
                            f"{tuple(parameter.shape)}"
                        )
                    if not check:
                        _fill(parameter, stored)


def _fill(parameter: Tensor, stored) -> None:
    """Copy this rank's box of a stored tensor into its local shard."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel():
        with torch.no_grad():
            local.copy_(stored[local_slice(parameter)])
