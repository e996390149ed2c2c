"""Turn a run's checkpoint into what other programs open: `python -m tools.export --run runs/mmdit --output FOLDER`.

    --format diffusers   a whole pipeline folder, for `QwenImagePipeline.from_pretrained` and `tools.sample --model`, of
                         an edit run for `QwenImageEditPlusPipeline` and `tools.edit`, its planner in text_encoder/
    --format comfyui     one .safetensors file, for ComfyUI's models/diffusion_models/
    --merge              of a run that trained adapters: with these built in (tools.export_lora writes them alone)

Works on one CPU process, from a checkpoint of any mesh, one tensor at a time.  The result is written beside its final
name, read back, compared with the checkpoint, and only then renamed.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from model.mmdit import MMDiTConfig
from parallel.checkpoint import StoredTensors
from parallel.commit_record import sync_folder
from parallel.safetensors_writer import TensorSpec, write_safetensors, write_sharded
from parallel.weights import weight_files
from tools.adapter import Adapter, MergedWeights
from tools.exported_planner import ExportedPlanner
from tools.exported_weights import ExportedWeights, NoWeights
from tools.model_card import facts, licenses, model_card
from tools.pipeline_parts import copy_parts, find_parts, find_transformer
from utils.config import parse, run_main
from utils.run_state import checkpoint_folder

# ComfyUI takes the released names as they are.  It builds the released sizes but for the number of layers, and tells
# zero_cond_t from an empty tensor of this name.
# Source: ComfyUI, comfy/model_detection.py detect_unet_config ("Qwen Image"), comfy/sd.py
# load_diffusion_model_state_dict.
COMFYUI_ZERO_COND_T = "__index_timestep_zero__"
RECORD = "export.json"  # in an exported folder: what its weights are, for programs
FACTS = {"run", "step", "weights", "dtype"}  # among the metadata of an exported file
_SPARE_BYTES = 64 << 20  # of disk, for headers, folders and the card


@dataclass(frozen=True)
class Config:
    run: str  # a run folder: config.json names its model folder, checkpoints/ holds its weights
    output: str  # diffusers: a new folder; comfyui: a new .safetensors file
    step: str = "latest"  # which checkpoint, by its step; latest = the newest valid one
    weights: Literal["ema", "raw"] = "ema"  # the moving average, or the weights as trained
    format: Literal["diffusers", "comfyui"] = "diffusers"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of what was trained; the other parts keep theirs
    max_shard_gb: float = 5.0  # diffusers: largest weight file, in 10^9 bytes
    language: Literal["", "zh", "en", "other"] = ""  # after --num_languages 3: the one to build into the weights
    model: str = ""  # folder in the released layout, where the run's has moved; the other parts come from it
    license: str = ""  # of the weights, for the card; "" = the one that the model folder's README.md states
    data_license: str = ""  # of the training data, for the card
    hard_links: bool = False  # share the other parts' weight files with the model folder instead of copying them
    overwrite: bool = False  # replace an earlier export
    merge: bool = False  # build a run's adapters (--lora_rank) into the network that they were trained on


def read_trained(run: Path) -> dict:
    """Return a run's configuration.  Raises: ValueError if the folder holds none."""
    path = run / "config.json"
    if not path.is_file():
        raise ValueError(f"{run} is no run folder: it has no config.json; give --run the --run_folder of a training")
    trained = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(trained.get("model"), str):
        raise ValueError(f"{path} is not that of a run: it names no model; give --run the --run_folder of a training")
    return trained


def find_model(given: str, trained: dict) -> Path:
    """Return the folder that a run began with.

    given: where it is now, or "".
    Raises: ValueError if it is not there.
    """
    model = Path(given or trained["model"])
    if not model.is_dir():
        raise ValueError(f"the run's model folder {model} is not here; name it with --model")
    return model


def chosen_step(step: str) -> int | None:
    """Return the step that --step names; None for the latest.  Raises: ValueError if it is neither."""
    if step != "latest" and not step.isdecimal():
        raise ValueError(f"--step must be latest or a number, got {step!r}")
    return None if step == "latest" else int(step)


def check_output(cfg: Config, output: Path, sources: Iterable[Path]) -> None:
    """Check that the output can be made without harm; sources: folders that the export is made from.

    Raises: ValueError if its name is wrong, or as `check_replaceable` does.
    """
    if (cfg.format == "comfyui") != (output.suffix == ".safetensors"):
        kind = "one file: name it something.safetensors" if cfg.format == "comfyui" else "a folder: name one"
        raise ValueError(f"--format {cfg.format} makes {kind}, got --output {cfg.output}")
    check_replaceable(output, cfg.overwrite, sources)


def check_replaceable(output: Path, overwrite: bool, sources: Iterable[Path]) -> None:
    """Raises: ValueError if the output exists and may not be replaced, or holds a folder that it is made from."""
    for source in sources:
        if source.resolve().is_relative_to(output):
            raise ValueError(f"--output {output} holds {source}, which the export is made from; name another place")
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"{output} exists; name another --output, or replace it with --overwrite")
    if not is_export(output):
        raise ValueError(f"{output} is not an earlier export, so --overwrite leaves it; name another --output")


def is_export(path: Path) -> bool:
    """Return whether a folder or file was made by this tool: nothing else may be deleted."""
    if path.is_dir():
        return (path / RECORD).is_file()
    try:
        with safe_open(path, framework="pt") as opened:
            return FACTS <= (opened.metadata() or {}).keys()
    except SafetensorError:
        return False


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises: ValueError if the disk of `folder` has less than this free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        raise ValueError(
            f"the export takes {num_bytes / 1e9:.2f} GB and the disk of {folder} has {free / 1e9:.2f} GB free; make "
            "room, or name an --output on another disk"
        )


@contextlib.contextmanager
def published(output: Path) -> Iterator[Path]:
    """Give a path beside `output`; rename what was made there when all went well, else delete it.

    Raises: ValueError if the file system refuses.
    """
    beside, replaced = (output.with_name(f".{output.name}.{what}") for what in ("partial", "replaced"))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _delete(beside)  # left by an export that was killed
        yield beside
        _delete(replaced)
        if output.exists():
            output.rename(replaced)
        beside.rename(output)
        sync_folder(output.parent)
        _delete(replaced)
    except OSError as error:
        raise ValueError(f"the export to {output} failed: {error}") from error
    finally:
        _delete(beside)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def write_comfyui(
    path: Path,
    weights: ExportedWeights | MergedWeights,
    read: Callable[[str], Tensor],
    zero_cond_t: bool,
    metadata: dict[str, str],
) -> None:
    """Write the one file that ComfyUI reads."""
    specs = dict(weights.specs)
    if zero_cond_t:
        specs[COMFYUI_ZERO_COND_T] = TensorSpec((0,), torch.float32)
    write_safetensors(path, specs, lambda name: read(name) if name in weights.specs else torch.empty(0), metadata)


def compare(files: dict[str, Path], specs: Iterable[str], read: Callable[[str], Tensor]) -> None:
    """Read a result back, one tensor at a time, and compare every byte with the checkpoint.

    files: the file of every tensor that was written; specs: the names that were to be.
    Raises: ValueError for the first difference.
    """
    if names := sorted(files.keys() ^ set(specs)):
        raise ValueError(f"{len(names)} tensors are not in both result and checkpoint, first {names[0]}")
    for name in specs:
        if not _holds(files[name], name, read(name)):
            raise ValueError(f"{name} in {files[name].name} is not what was written; is the disk broken?")


def _holds(file: Path, name: str, expected: Tensor) -> bool:
    """Return whether a file has these bytes under a name."""
    with safe_open(file, framework="pt") as opened:  # once a tensor: whatever was read through it counts as memory
        actual = opened.get_tensor(name)
        if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
            return False
        # As bytes, a NaN is equal to itself and -0 is not 0.
        return torch.equal(actual.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def main(cfg: Config) -> None:
    # What is asked for
    run, output = Path(cfg.run), Path(cfg.output).resolve()
    trained = read_trained(run)
    model = find_model(cfg.model, trained)
    if cfg.max_shard_gb <= 0:
        raise ValueError(f"--max_shard_gb must be above 0, got {cfg.max_shard_gb}")
    if cfg.merge != (trained.get("lora_rank", 0) > 0):
        raise ValueError(
            "--merge: the run trained no adapters but the network itself; leave the flag out" if cfg.merge else
            "the run trained adapters: --merge builds them into the network, tools.export_lora writes them alone"
        )  # fmt: skip
    step = chosen_step(cfg.step)
    check_output(cfg, output, (run, model))
    parts, trains = find_parts(model) if cfg.format == "diffusers" else {}, trained.get("train", "renderer")
    if "renderer" not in trains:
        if cfg.format == "comfyui":
            raise ValueError(
                "the run trained the planner alone, which ComfyUI's file has no place for: --format diffusers"
            )
        parts |= find_transformer(model)
    config = replace(MMDiTConfig.from_folder(model / "transformer"), num_languages=0)
    if cfg.format == "comfyui" and replace(config, num_layers=60, zero_cond_t=False) != MMDiTConfig():
        print("note: ComfyUI builds the released sizes only; it will not open this model's", flush=True)

    # What the checkpoint holds
    print(f"checking every byte of the checkpoint in {checkpoint_folder(run)}", flush=True)
    stored = StoredTensors(checkpoint_folder(run), step)
    planner = ExportedPlanner(stored, model, getattr(torch, cfg.dtype))
    if planner.names and cfg.format == "comfyui":
        print("note: the run trained its planner too, which is not in this file: export it with --format diffusers")
    if planner.names:
        parts = {name: path for name, path in parts.items() if not name.startswith("text_encoder/")}
    weights: ExportedWeights | MergedWeights | NoWeights
    if "renderer" not in trains:
        weights = NoWeights()
    elif cfg.merge:
        adapter = Adapter.from_run(stored, cfg.weights, trained)
        weights = MergedWeights(adapter, model / "transformer", config, getattr(torch, cfg.dtype))
    else:
        weights = ExportedWeights(stored, cfg.weights, config, getattr(torch, cfg.dtype), cfg.language)
    known = facts(
        run, trained, model, {"step": str(stored.step), "weights": cfg.weights, "dtype": cfg.dtype}
        | ({"language": f"{cfg.language}, built into the weights"} if cfg.language else {})
        | ({"planner": f"trained, in text_encoder/, {cfg.dtype}"} if planner.names else {})
        | ({"adapters": f"rank {trained['lora_rank']}, built into the weights"} if cfg.merge else {}),
        licenses(model, trained, cfg.license, cfg.data_license),
    )  # fmt: skip

    # Write, compare, publish
    with published(output) as beside, tqdm(
        total=2 * weights.num_bytes, unit="B", unit_scale=True, desc="write, compare", disable=None
    ) as progress:  # fmt: skip
        copied = 0 if cfg.hard_links else sum(path.stat().st_size for path in parts.values())
        check_space(output.parent, weights.num_bytes + planner.num_bytes + copied)

        def read(name: str) -> Tensor:
            progress.update(weights.specs[name].num_bytes)
            return weights.read(name)

        if cfg.format == "comfyui":
            write_comfyui(beside, weights, read, config.zero_cond_t, known)
            with safe_open(beside, framework="pt") as opened:
                names = set(opened.keys()) - {COMFYUI_ZERO_COND_T}
            compare(dict.fromkeys(names, beside), weights.specs, read)
        else:
            transformer = beside / "transformer"
            transformer.mkdir(parents=True)
            copy_parts(parts, beside, cfg.hard_links)
            if planner.names:
                planner.write(beside / "text_encoder", cfg.max_shard_gb)
            (beside / RECORD).write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            (beside / "README.md").write_text(model_card(known, trained), encoding="utf-8")
            if weights.specs:
                text = json.dumps(config.to_json(), indent=2) + "\n"
                (transformer / "config.json").write_text(text, encoding="utf-8")
                largest = int(cfg.max_shard_gb * 1e9)
                write_sharded(transformer, "diffusion_pytorch_model", weights.specs, read, largest, {})
                compare(weight_files(transformer), weights.specs, read)
    size = weights.num_bytes + (planner.num_bytes if cfg.format == "diffusers" else 0)
    print(f"step {stored.step}, {cfg.weights}, {cfg.dtype}: {size / 1e9:.2f} GB, equal to the checkpoint")
    print(f"  {output}")
    if cfg.format == "diffusers":
        print("  its README.md names your data and settings: read it before you publish")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
