"""The model card of an exported run: what the weights are, what they were trained on, and how to use them."""

import json
import re
from pathlib import Path

from data.shards import BUILT_IN
from parallel.weights import has_weights

_BUILT_IN_LICENSE = "Twemoji graphics, CC-BY 4.0, copyright Twitter, Inc and other contributors; Unicode CLDR names"
_UNKNOWN = "unknown"  # also what model hubs call it


def licenses(model: Path, trained: dict, license: str, data_license: str) -> dict[str, str]:
    """Return the licences of the weights and of the data, as far as they are known.

    model: the folder that the run began with; what its own card states is taken where `license` is empty.
    data_license: likewise; the built-in sets' is known.
    """
    card = model / "README.md"
    if not license and card.is_file():
        front = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8"), re.DOTALL)
        stated = re.search(r"^license: *['\"]?([\w.-]+)['\"]? *$", front[1], re.MULTILINE) if front else None
        license = stated[1] if stated else ""
    if not data_license and trained.get("data") in BUILT_IN:
        data_license = _BUILT_IN_LICENSE
    return {"license": license or _UNKNOWN, "data license": data_license or _UNKNOWN}


def facts(run: Path, trained: dict, model: Path, export: dict[str, str], licenses: dict[str, str]) -> dict[str, str]:
    """Return what a reader must know of exported weights, by name, as text.

    trained: the run's configuration; model: the folder that it began with.
    export: step, weights and dtype, and what else was chosen; licenses: from `licenses`.
    """
    start = model.resolve().name
    if trained.get("from_scratch") or not has_weights(model / "transformer"):
        start = f"random weights in the shape of {start}"
    found = {"run": run.resolve().name} | export | {"started from": start}
    found |= {"data": str(trained.get("data", _UNKNOWN))} | licenses
    step = int(export["step"])
    if "global_batch_size" in trained:
        found["samples seen"] = f"{step * trained['global_batch_size']:,}"
    metrics = run / "metrics.jsonl"
    if metrics.is_file():
        with metrics.open(encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                if line["step"] == step and "val_loss" in line:
                    found["validation loss"] = f"{line['val_loss']:.4f}"
    difference = run / "git.diff"  # "# commit …", then the local changes
    if difference.is_file():
        commit, _, changes = difference.read_text(encoding="utf-8").partition("\n")
        found["code"] = commit.removeprefix("# ") + (", with local changes" if changes.strip() else "")
    return found


def model_card(known: dict[str, str], trained: dict) -> str:
    """Return the text of README.md.  known: from `facts`; trained: the run's configuration."""
    is_edit = "train" in trained or trained.get("task") == "edit"
    table = "\n".join(f"| {name} | {text} |" for name, text in known.items())
    use = _use_edit(known, trained) if is_edit else _use_text_to_image(known, trained)
    return f"""---
license: {known["license"]}
library_name: diffusers
pipeline_tag: {"image-to-image" if is_edit else "text-to-image"}
---
# {known["run"]}, step {known["step"]}

| | |
|---|---|
{table}

## Use

{use}

## Settings

```json
{json.dumps(trained, indent=2, ensure_ascii=False)}
```
"""


_ALIKE = "# torch_dtype makes all parts alike; without it they keep the dtypes they are stored in, which do not mix."


def _use_text_to_image(known: dict[str, str], trained: dict) -> str:
    height, width = trained.get("sample_size", (1024, 1024))
    prompt = json.dumps(trained.get("sample_prompts", ("a cat",))[0], ensure_ascii=False)
    return f"""```python
import torch
from diffusers import QwenImagePipeline

{_ALIKE}
pipeline = QwenImagePipeline.from_pretrained("path/to/this/folder", torch_dtype=torch.{known["dtype"]})
picture = pipeline(
    {prompt}, negative_prompt=" ", true_cfg_scale={trained.get("sample_cfg_scale", 4.0)},
    num_inference_steps={trained.get("sample_steps", 50)}, width={width}, height={height}, max_sequence_length=1024,
).images[0]
```"""


def _use_edit(known: dict[str, str], trained: dict) -> str:
    return f"""```python
import torch
from diffusers import QwenImageEditPlusPipeline
from PIL import Image
from transformers import AutoProcessor

{_ALIKE}
# The processor is that of Qwen/Qwen-Image-Edit-2509; a folder that has a processor/ needs none to be named.
processor = AutoProcessor.from_pretrained("Qwen/Qwen-Image-Edit-2509", subfolder="processor")
pipeline = QwenImageEditPlusPipeline.from_pretrained(
    "path/to/this/folder", processor=processor, torch_dtype=torch.{known["dtype"]}
)
picture = pipeline(
    [Image.open("a.png")], "Make the background pink.", negative_prompt=" ",
    true_cfg_scale={trained.get("sample_cfg_scale", 4.0)}, num_inference_steps={trained.get("sample_steps", 50)},
).images[0]
```

The pipeline shows references to the network at {1024 * 1024} pixels, to the text encoder at {384 * 384}; this run was
trained at {trained.get("reference_pixels")} and {trained.get("condition_pixels")}.  `python -m tools.edit --model
path/to/this/folder` takes others (--reference_pixels, --condition_pixels), and writes the plan as well."""
