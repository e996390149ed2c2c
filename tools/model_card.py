"""The model card of an exported run: what the weights are, what they were trained on, and how to use them."""

import json
import re
from pathlib import Path

from data.shards import BUILT_IN
from parallel.weights import has_weights

_BUILT_IN_LICENSE = "Twemoji graphics, CC-BY 4.0, copyright Twitter, Inc and other contributors; Unicode CLDR names"
_UNKNOWN = "unknown"  # the identifier that model hubs use


def licenses(model: Path, data: str, license: str = "", data_license: str = "") -> tuple[str, str]:
    """Return the licences of the weights and of the data, as far as they are known.

    model: the folder that the run began with; its own card is asked where `license` is empty.
    data: the run's --data; the built-in sets' licence is known where `data_license` is empty.
    """
    if not data_license:
        data_license = _BUILT_IN_LICENSE if data in BUILT_IN else _UNKNOWN
    card = model / "README.md"
    if not license and card.is_file():
        front = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8"), re.DOTALL)
        found = re.search(r"^license:\s*(\S+)\s*$", front[1], re.MULTILINE) if front else None
        license = found[1].strip("'\"") if found else ""
    return license or _UNKNOWN, data_license


def facts(
    run: Path, trained: dict, model: Path, step: int, weights: str, dtype: str, licenses: tuple[str, str]
) -> dict[str, str]:
    """Return what a reader must know of exported weights, by name, as text.

    trained: the run's configuration.  weights: ema or raw.  licenses: of the weights and of the data.
    """
    found = {
        "run": run.resolve().name,
        "step": str(step),
        "samples seen": str(step * trained["global_batch_size"]),
        "weights": "moving average (EMA)" if weights == "ema" else "as trained (raw)",
        "dtype": dtype,
        "started from": model.resolve().name
        if has_weights(model / "transformer") and not trained["from_scratch"]
        else f"random weights in the shape of {model.resolve().name}",
        "data": trained["data"],
        "license": licenses[0],
        "data license": licenses[1],
    }
    metrics = run / "metrics.jsonl"
    if metrics.is_file():
        with metrics.open(encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                if line["step"] == step and "val_loss" in line:
                    found["validation loss"] = f"{line['val_loss']:.4f}"
    difference = run / "git.diff"
    if difference.is_file():
        commit, _, changes = difference.read_text(encoding="utf-8").partition("\n")
        found["code"] = commit.removeprefix("# ") + (", with local changes" if changes.strip() else "")
    return found


def model_card(found: dict[str, str], trained: dict) -> str:
    """Return the text of README.md.  found: from `facts`; trained: the run's configuration."""
    table = "\n".join(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in found.items())
    width, height = trained["sample_size"][1], trained["sample_size"][0]
    dtype = found["dtype"]
    return f"""---
license: {found["license"]}
library_name: diffusers
pipeline_tag: text-to-image
---
# {found["run"]}, step {found["step"]}

| | |
|---|---|
{table}

## Use

```python
import torch
from diffusers import QwenImagePipeline

# torch_dtype casts every part alike; without it the text encoder keeps the dtype it is stored in.
pipeline = QwenImagePipeline.from_pretrained("path/to/this/folder", torch_dtype=torch.{dtype})
picture = pipeline(
    {json.dumps(trained["sample_prompts"][0], ensure_ascii=False)}, negative_prompt=" ", true_cfg_scale={trained["sample_cfg_scale"]},
    num_inference_steps={trained["sample_steps"]}, width={width}, height={height}, max_sequence_length=1024,
).images[0]
```

## Settings

```json
{json.dumps(trained, indent=2, ensure_ascii=False)}
```
"""
