"""Which frozen encoder it is: a short hash of a model folder's configuration and weights."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open

_NAMES_ONLY = ("transformers_version", "torch_dtype", "dtype", "architectures")  # who saved it, not what it computes
_SMALL = 4096  # numbers; of a larger tensor only the first and the last row are looked at


def folder_identity(folder: str | Path) -> str:
    """Return a hash of `config.json` and all .safetensors files, the same however the weights are cut into files.

    Of large tensors it sees the ends only: seconds, not minutes, for 16 GB, and training moves every row.
    Raises: ValueError if the folder has no configuration or no weights.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json or no .safetensors; give a folder in the released layout")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if not key.startswith("_") and key not in _NAMES_ONLY}
    tensors = {name: digest for file in files for name, digest in _tensor_digests(file).items()}
    return hashlib.sha256(json.dumps([config, tensors], sort_keys=True).encode()).hexdigest()[:16]


def _tensor_digests(path: Path) -> dict[str, str]:
    digests = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            stored = file.get_slice(name)
            shape = stored.get_shape()
            if torch.Size(shape).numel() <= _SMALL:
                parts = [file.get_tensor(name)]
            else:
                parts = [stored[:1], stored[-1:]]
            digest = hashlib.sha256(repr((stored.get_dtype(), shape)).encode())
            for part in parts:
                digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
            digests[name] = digest.hexdigest()
    return digests
