"""Turn a run's checkpoint into what other programs open: `python -m tools.export --run runs/mmdit --output FOLDER`.

    --format diffusers   a whole pipeline folder: `QwenImagePipeline.from_pretrained(FOLDER)`, `tools.sample --model`
    --format comfyui     one file for ComfyUI's models/diffusion_models/

Works on one CPU process, from a checkpoint of any mesh, one tensor at a time.  The result is written beside its final
name, read back, compared with the checkpoint, and only then renamed.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from model.mmdit import MMDiT, MMDiTConfig
from parallel.checkpoint import StoredTensors
from parallel.commit_record import sync_folder
from parallel.safetensors_writer import TensorSpec, write_safetensors, write_sharded
from parallel.weights import weight_files
from tools.model_card import facts, licenses, model_card
from utils.config import parse, run_main

STEM = "diffusion_pytorch_model"
LANGUAGES = ("zh", "en", "other")  # the rows of the language embedding
LANGUAGE_EMBED = "language_embed.weight"
TIME_BIAS = "time_text_embed.timestep_embedder.linear_2.bias"  # what the language embedding is added to
# ComfyUI takes the released names as they are, recognises the model by txt_norm.weight, and knows zero_cond_t from an
# empty tensor of this name.  Source: ComfyUI, comfy/model_detection.py detect_unet_config, "Qwen Image"; comfy/sd.py
# load_diffusion_model_state_dict.
COMFYUI_ZERO_COND_T = "__index_timestep_zero__"
_SPARE_BYTES = 64 << 20  # of disk, for headers, folders and the card

log = logging.getLogger("export")


@dataclass(frozen=True)
class Config:
    run: str  # run folder: config.json names the model, checkpoints/ holds the weights
    output: str  # diffusers: a new folder; comfyui: a new .safetensors file
    step: str = "latest"  # which checkpoint; latest = the newest valid one
    weights: Literal["ema", "raw"] = "ema"  # the moving average, or the weights as trained
    format: Literal["diffusers", "comfyui"] = "diffusers"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the exported transformer
    max_shard_gb: float = 5.0  # diffusers: size of a weight file at most, in 10^9 bytes
    language: Literal["", "zh", "en", "other"] = ""  # whose language embedding to build in, for a run that trained one
    model: str = ""  # folder in the released layout, if the run's has moved: the other parts come from it
    license: str = ""  # of the weights, for the card; else that of the model folder's own card
    data_license: str = ""  # of the training data, for the card
    hard_links: bool = False  # share the other parts' weight files with the model folder instead of copying them
    overwrite: bool = False  # replace an earlier export


class ExportedWeights:
    """The tensors of the export, each read from the checkpoint when it is asked for.

    specs: name → shape and dtype, in the order of the network.
    """

    def __init__(self, stored: StoredTensors, prefix: str, config: MMDiTConfig, dtype: torch.dtype, language: str):
        """prefix: of the tensors' names in the checkpoint; config: of the network without a language embedding.

        Raises: ValueError if the checkpoint is of another network, or its language embedding would be lost.
        """
        self._stored, self._prefix = stored, prefix
        with torch.device("meta"):
            wanted = {name: tensor.shape for name, tensor in MMDiT(config).state_dict().items()}
        found = {
            name.removeprefix(prefix): shape for name, (shape, _) in stored.specs.items() if name.startswith(prefix)
        }
        self._time_bias = self._language_row(language) if found.pop(LANGUAGE_EMBED, None) else None
        if language and self._time_bias is None:
            raise ValueError(f"--language {language}: the run has no language embedding; leave the flag out")
        if found != wanted:
            different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            raise ValueError(
                f"the checkpoint does not fit the model folder's transformer/config.json: {len(different)} tensors "
                f"differ, first {different[0]} ({found.get(different[0])} in the checkpoint, "
                f"{wanted.get(different[0])} in the model); is --model the folder that the run was trained with?"
            )
        self.specs = {name: TensorSpec(tuple(shape), dtype) for name, shape in wanted.items()}

    def _language_row(self, language: str) -> Tensor:
        """Return the language's embedding, (D,).  No other program has one; added to a bias it says the same."""
        rows = self._stored.read(self._prefix + LANGUAGE_EMBED)
        if not language and rows.any():
            raise ValueError(
                "the run trained a language embedding, which neither diffusers nor ComfyUI knows; name with "
                f"--language ({', '.join(LANGUAGES)}) the one to build into the weights, exactly, for prompts in it"
            )
        return rows[LANGUAGES.index(language)] if language else torch.zeros_like(rows[0])

    def read(self, name: str) -> Tensor:
        """Return one tensor as the export holds it."""
        tensor = self._stored.read(self._prefix + name)
        if name == TIME_BIAS and self._time_bias is not None:
            tensor = tensor + self._time_bias
        return tensor.to(self.specs[name].dtype)


def read_trained(run: Path) -> dict:
    """Return a run's configuration.  Raises: ValueError if the folder holds none."""
    path = run / "config.json"
    if not path.is_file():
        raise ValueError(f"{run} is no run folder: it has no config.json; give --run the --run_folder of a training")
    return json.loads(path.read_text(encoding="utf-8"))


def pipeline_files(model: Path) -> dict[str, Path]:
    """Return the files of a released folder that go along unchanged: name in the folder → where it lies.

    That is model_index.json, the parts that it names but for the transformer, and the licence.
    Raises: ValueError if a part is missing.
    """
    index = model / "model_index.json"
    if not index.is_file():
        raise ValueError(
            f"{model} has no model_index.json, so diffusers could not open the export; add the released one"
        )
    parts = [name for name, value in json.loads(index.read_text(encoding="utf-8")).items() if _is_part(value)]
    found = {index.name: index}
    for part in parts:
        if part == "transformer":
            continue
        files = [path for path in sorted((model / part).rglob("*")) if path.is_file()]
        if not files:
            raise ValueError(f"{model} has no {part}/, which its model_index.json names; copy it there")
        found |= {str(path.relative_to(model)): path for path in files}
    for path in sorted(model.glob("*")):
        if path.is_file() and path.stem.upper() in ("LICENSE", "LICENCE", "NOTICE"):
            found[path.name] = path
    # A downloaded folder's files may be links into a cache.
    return {name: path.resolve() for name, path in found.items()}


def _is_part(value: object) -> bool:
    """Return whether an entry of model_index.json is a part of the pipeline: [library, class], both named."""
    return isinstance(value, list) and len(value) == 2 and all(value)


def check_output(cfg: Config, output: Path, sources: Iterable[Path]) -> None:
    """Raises: ValueError if the output's name is wrong, it exists and may not be replaced, or it holds a source."""
    if (cfg.format == "comfyui") != (output.suffix == ".safetensors"):
        kind = "one file: name it something.safetensors" if cfg.format == "comfyui" else "a folder: name one"
        raise ValueError(f"--format {cfg.format} makes {kind}, got --output {output}")
    if cfg.max_shard_gb <= 0:
        raise ValueError(f"--max_shard_gb must be above 0, got {cfg.max_shard_gb}")
    for source in sources:
        if source.resolve().is_relative_to(output.resolve()):
            raise ValueError(f"--output {output} holds {source}, which the export is made from; name another place")
    if not output.exists():
        return
    if not cfg.overwrite:
        raise ValueError(f"{output} exists; name another --output, or replace it with --overwrite")
    earlier = output.is_file() if cfg.format == "comfyui" else (output / "model_index.json").is_file()
    if not earlier:
        raise ValueError(f"{output} is not an earlier export; --overwrite leaves it alone, name another --output")


def check_space(output: Path, num_bytes: int) -> None:
    """Raises: ValueError if the disk of `output` has less than this free."""
    free = shutil.disk_usage(output.parent).free
    if free < num_bytes + _SPARE_BYTES:
        raise ValueError(
            f"the export needs {num_bytes / 1e9:.2f} GB and {output.parent.resolve()} has {free / 1e9:.2f} GB free; "
            "make room, or name an --output on another disk"
        )


@contextlib.contextmanager
def published(output: Path) -> Iterator[Path]:
    """Give a path beside `output`; rename what was made there when all went well, else delete it."""
    beside = output.with_name(f".{output.name}.partial")
    replaced = output.with_name(f".{output.name}.replaced")
    try:
        _delete(beside)  # left by an export that was killed
        yield beside
        _delete(replaced)
        if output.exists():
            output.rename(replaced)
        beside.rename(output)
        sync_folder(output.parent)
        _delete(replaced)
    finally:
        _delete(beside)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_files(files: dict[str, Path], folder: Path, hard_links: bool) -> None:
    """Put files into a folder; with hard_links, weights share their bytes with the source where the disk allows it."""
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if hard_links and source.suffix == ".safetensors":
            with contextlib.suppress(OSError):  # another disk, or one without hard links
                os.link(source, target)
                continue
        shutil.copyfile(source, target)


def compare(files: dict[str, Path], weights: ExportedWeights, extra: set[str], progress: tqdm) -> None:
    """Read the result back, one tensor at a time, and compare every byte with the checkpoint.

    files: name → file, as found.  extra: names that the checkpoint does not have.
    Raises: ValueError for the first difference.
    """
    if files.keys() - extra != weights.specs.keys():
        names = sorted((files.keys() - extra) ^ weights.specs.keys())
        raise ValueError(f"the written files lack or add {len(names)} tensors, first {names[0]}; is the disk broken?")
    for name, spec in weights.specs.items():
        expected = weights.read(name)
        with safe_open(files[name], framework="pt") as opened:  # opened anew: what it maps counts as memory
            actual = opened.get_tensor(name)
            same = actual.dtype == expected.dtype and actual.shape == expected.shape
            if not same or not torch.equal(_bytes(actual), _bytes(expected)):
                raise ValueError(f"{name} in {files[name].name} is not what was written; is the disk broken?")
        progress.update(spec.num_bytes)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: NaNs are equal to themselves, and -0 is not 0."""
    return tensor.reshape(-1).view(torch.uint8)


def main(cfg: Config) -> None:
    run, output = Path(cfg.run), Path(cfg.output)
    trained = read_trained(run)
    model = Path(cfg.model or trained["model"])
    if not model.is_dir():
        raise ValueError(f"the run's model folder {model} is not here; name it with --model")
    check_output(cfg, output, (run, model))
    if cfg.step != "latest" and not cfg.step.isdecimal():
        raise ValueError(f"--step must be latest or a number, got {cfg.step!r}")
    parts = pipeline_files(model) if cfg.format == "diffusers" else {}
    config = replace(MMDiTConfig.from_folder(model / "transformer"), num_languages=0)
    print(f"checking the checkpoint's checksums in {run / 'checkpoints'}", flush=True)
    stored = StoredTensors(run / "checkpoints", None if cfg.step == "latest" else int(cfg.step))
    prefix = {"ema": "ema.", "raw": "model."}[cfg.weights]
    weights = ExportedWeights(stored, prefix, config, getattr(torch, cfg.dtype), cfg.language)

    num_bytes = sum(spec.num_bytes for spec in weights.specs.values())
    output.parent.mkdir(parents=True, exist_ok=True)
    check_space(output, num_bytes + sum(path.stat().st_size for path in parts.values()))
    found = facts(
        run, trained, model, stored.step, cfg.weights, cfg.dtype,
        licenses(model, trained["data"], cfg.license, cfg.data_license),
    )  # fmt: skip
    if cfg.language:
        found["language"] = f"{cfg.language}: its embedding is built into {TIME_BIAS}"

    with (
        published(output) as beside,
        tqdm(total=2 * num_bytes, unit="B", unit_scale=True, disable=None, desc="write, compare") as progress,
    ):
        specs, extra = weights.specs, set()

        def read(name: str) -> Tensor:
            if name in extra:
                return torch.empty(specs[name].shape, dtype=specs[name].dtype)
            tensor = weights.read(name)
            progress.update(specs[name].num_bytes)
            return tensor

        if cfg.format == "comfyui":
            if config.zero_cond_t:
                extra = {COMFYUI_ZERO_COND_T}
                specs = specs | {COMFYUI_ZERO_COND_T: TensorSpec((0,), torch.float32)}
            write_safetensors(beside, specs, read, found)
            files = dict.fromkeys(specs, beside)
        else:
            copy_files(parts, beside, cfg.hard_links)
            transformer = beside / "transformer"
            transformer.mkdir()
            write_sharded(transformer, STEM, specs, read, int(cfg.max_shard_gb * 1e9), {})
            (transformer / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")
            (beside / "README.md").write_text(model_card(found, trained), encoding="utf-8")
            files = weight_files(transformer)
        compare(files, weights, extra, progress)
    print(f"{found['weights']} of step {stored.step}, {cfg.dtype}, {num_bytes / 1e9:.2f} GB, equal to the checkpoint")
    print(f"  {output}")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
