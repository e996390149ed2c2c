"""Write a run's adapters to one small file: `python -m tools.export_lora --run runs/mmdit --output cats.safetensors`.

    --format diffusers   for `pipeline.load_lora_weights(FILE)`
    --format comfyui     for ComfyUI's models/loras/; `diffusers` loads it too

`python -m tools.export --merge` builds them into the whole network instead.  Works on one CPU process, from a
checkpoint of any mesh.  The file is written beside its final name, read back, compared, and only then renamed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from parallel.checkpoint import StoredTensors
from parallel.safetensors_writer import TensorSpec, write_safetensors
from tools.adapter import Adapter
from tools.export import check_replaceable, check_space, chosen_step, compare, find_model, published, read_trained
from tools.model_card import facts, licenses
from utils.config import parse, run_main
from utils.run_state import checkpoint_folder

# Where `diffusers` looks for an adapter's settings, a JSON object in the file's metadata.
# Source: diffusers 0.42, loaders/lora_base.py LORA_ADAPTER_METADATA_KEY, utils/state_dict_utils.py.
_SETTINGS = "lora_adapter_metadata"


@dataclass(frozen=True)
class Config:
    run: str  # a run folder: config.json names its model folder, checkpoints/ holds its adapters
    output: str  # a new .safetensors file
    step: str = "latest"  # which checkpoint, by its step; latest = the newest valid one
    weights: Literal["ema", "raw"] = "ema"  # the moving average, or the adapters as trained
    format: Literal["diffusers", "comfyui"] = "diffusers"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    model: str = ""  # the run's model folder, where it has moved
    license: str = ""  # of the base's weights, for the metadata; "" = the one that the model folder's README.md states
    data_license: str = ""  # of the training data, for the metadata
    overwrite: bool = False  # replace an earlier export


class AdapterFile:
    """The tensors of a file.  specs: name → shape and dtype."""

    def __init__(self, adapter: Adapter, format: str, dtype: torch.dtype):
        """format: diffusers or comfyui."""
        # `diffusers` takes alpha from the metadata: beside these names, a tensor of it would make it take the file for
        # another program's, and find no layer.  Sources: diffusers 0.42, loaders/lora_pipeline.py
        # QwenImageLoraLoaderMixin.lora_state_dict, loaders/lora_conversion_utils.py
        # _convert_non_diffusers_qwen_lora_to_diffusers; ComfyUI, comfy/lora.py model_lora_keys_unet.
        self._tensors: dict[str, Tensor] = {}
        for layer, (down, up) in adapter.factors.items():
            if format == "diffusers":
                self._tensors[f"transformer.{layer}.lora_A.weight"] = down.to(dtype)
                self._tensors[f"transformer.{layer}.lora_B.weight"] = up.to(dtype)
            else:
                self._tensors[f"diffusion_model.{layer}.lora_down.weight"] = down.to(dtype)
                self._tensors[f"diffusion_model.{layer}.lora_up.weight"] = up.to(dtype)
                self._tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(adapter.alpha)
        self.specs = {name: TensorSpec(tuple(x.shape), x.dtype) for name, x in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        return self._tensors[name]


def settings(adapter: Adapter) -> dict[str, str]:
    """Return an adapter's settings as metadata that `diffusers` reads."""
    values = {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": sorted(adapter.factors)}
    return {_SETTINGS: json.dumps({f"transformer.{name}": value for name, value in values.items()})}


def main(cfg: Config) -> None:
    run, output = Path(cfg.run), Path(cfg.output).resolve()
    trained = read_trained(run)
    model = find_model(cfg.model, trained)
    if output.suffix != ".safetensors":
        raise ValueError(f"an adapter is one file: name it something.safetensors, got --output {cfg.output}")
    check_replaceable(output, cfg.overwrite, (run, model))
    stored = StoredTensors(checkpoint_folder(run), chosen_step(cfg.step))
    adapter = Adapter.from_run(stored, cfg.weights, trained)
    file = AdapterFile(adapter, cfg.format, getattr(torch, cfg.dtype))
    num_bytes = sum(spec.num_bytes for spec in file.specs.values())
    known = facts(
        run, trained, model, {"step": str(stored.step), "weights": cfg.weights, "dtype": cfg.dtype},
        licenses(model, trained, cfg.license, cfg.data_license),
    )  # fmt: skip
    with published(output) as beside:
        check_space(output.parent, num_bytes)
        metadata = known | (settings(adapter) if cfg.format == "diffusers" else {})
        write_safetensors(beside, file.specs, file.read, metadata)
        compare(dict.fromkeys(file.specs, beside), file.specs, file.read)
    print(
        f"step {stored.step}, {cfg.weights}, {cfg.dtype}: {len(adapter.factors)} layers, rank {adapter.rank}, alpha "
        f"{adapter.alpha:g}, {num_bytes / 1e6:.2f} MB, equal to the checkpoint\n  {output}"
    )


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
