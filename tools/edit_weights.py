"""The model behind an edit run or a released folder: renderer, VAE, and the text encoder that sees and plans."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from model.encoders import Encoders
from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import without_gradient
from parallel import checkpoint
from parallel.lora import is_adapter
from parallel.weights import has_weights, read_safetensors
from tools.adapter import Adapter, MergedWeights
from utils.run_state import checkpoint_folder

# Names under which runs keep the renderer: train_edit_ddp.py and, of the same network, train_mmdit.py.
_RAW_PREFIXES = ("renderer.", "model.")
_EMA, _PLANNER = "ema.", "planner."


@dataclass(frozen=True, eq=False)
class EditModel:
    """A loaded model; trained: the configuration of its run, or {}; source: where the weights came from."""

    network: MMDiT
    encoders: Encoders
    folder: Path
    trained: dict
    source: str


def load_edit_model(model: Path, step: int, weights: str, device: torch.device, dtype: torch.dtype) -> EditModel:
    """Load a run folder, or a folder in the released layout with weights in `transformer/`, frozen.

    step: of a run's checkpoint, -1 = the newest; weights: of its renderer, ema or raw.  What a run did not train comes
    from the folder that it began with.
    Raises: ValueError if the folder is neither, nothing valid is there, or weights are missing or of no such model.
    """
    if weights not in ("ema", "raw"):
        raise ValueError(f"--weights must be ema or raw, got {weights!r}")
    folder, trained, stored = model, {}, None
    if (model / "config.json").is_file():
        trained = json.loads((model / "config.json").read_text(encoding="utf-8"))
        if "model" not in trained:
            raise ValueError(
                f"{model / 'config.json'} is not that of a run: give a run folder, or one with transformer/"
            )
        folder = Path(trained["model"])
        stored = checkpoint.StoredTensors(checkpoint_folder(model), None if step < 0 else step)
    elif not (folder / "transformer").is_dir():
        raise ValueError(f"{model} is neither a run folder (config.json) nor in the released layout (transformer/)")
    groups = _groups(stored) if stored else {}
    source = f"{stored.path} ({weights})" if stored else str(model)

    config = MMDiTConfig.from_folder(folder / "transformer", num_languages=trained.get("num_languages", 0))
    with torch.device("meta"):
        network = MMDiT(config)
    prefix = _EMA if weights == "ema" else next((p for p in _RAW_PREFIXES if p in groups), None)
    if prefix in groups:
        tensors = _read(stored, prefix, groups[prefix])
        if any(map(is_adapter, tensors)):
            merged = MergedWeights(
                Adapter.from_run(stored, weights, trained), folder / "transformer", config, torch.float32
            )
            tensors = {name: merged.read(name) for name in merged.specs}
            source += f", adapters on {folder}"
    elif has_weights(folder / "transformer"):
        tensors = read_safetensors(folder / "transformer")
        source += f", renderer of {folder}" if stored else ""
    else:
        raise ValueError(f"no renderer: {source} has none ({weights}), nor is there a .safetensors in {folder}")
    _fill(network, tensors, source)
    network.to(device, dtype).eval().requires_grad_(False)

    encoders = Encoders(folder, device, dtype, with_vision=True)
    if _PLANNER in groups:
        planner = _read(stored, _PLANNER, groups[_PLANNER])
        # `Planner` calls the model that it trains vlm.
        _overwrite(encoders.text.vlm, {name.removeprefix("vlm."): t for name, t in planner.items()}, source)
    return EditModel(network, encoders, folder, trained, source)


def _groups(stored: checkpoint.StoredTensors) -> dict[str, list[str]]:
    """Return the names of a checkpoint's tensors by their first part, dot included."""
    groups: dict[str, list[str]] = {}
    for name in stored.specs:
        groups.setdefault(name.split(".", 1)[0] + ".", []).append(name)
    return groups


def _read(stored: checkpoint.StoredTensors, prefix: str, names: list[str]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): stored.read(name) for name in names}


def _fill(network: MMDiT, tensors: Mapping[str, Tensor], source: str) -> None:
    """Give a network on the meta device its weights; those that nothing depends on may be missing, and become 0."""
    needless = {id(parameter) for parameter in without_gradient(network)}
    tensors, named = dict(tensors), dict(network.named_parameters())
    for name, parameter in named.items():
        if name not in tensors and id(parameter) in needless:
            tensors[name] = torch.zeros(parameter.shape)
    missing, unknown = sorted(named.keys() - tensors.keys()), sorted(tensors.keys() - named.keys())
    if missing or unknown:
        raise ValueError(
            f"{source}: {len(missing)} of the renderer's weights are missing, first {missing[:1]}, and {len(unknown)} "
            f"are of no such model, first {unknown[:1]}; give a run of train_edit_ddp.py or a folder of this model"
        )
    network.load_state_dict(tensors, strict=True, assign=True)


@torch.no_grad()
def _overwrite(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Put a run's trained weights into the model that it began with."""
    named = dict(model.named_parameters())
    wrong = sorted(n for n, t in tensors.items() if n not in named or named[n].shape != t.shape)
    if wrong:
        raise ValueError(
            f"{source}: {len(wrong)} of the planner's weights do not fit {type(model).__name__}: {wrong[:1]}"
        )
    for name, tensor in tensors.items():
        named[name].copy_(tensor)
