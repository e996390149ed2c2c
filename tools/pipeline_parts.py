"""The parts of a released pipeline folder that training leaves as they are: all but the transformer."""

import contextlib
import json
import os
import shutil
from pathlib import Path

from parallel.weights import has_weights

INDEX = "model_index.json"


def find_parts(model: Path) -> dict[str, Path]:
    """Return the files that go along with a transformer: name in the folder → where it lies.

    They are model_index.json, the files of the parts that it names, and the licence.
    Raises: ValueError if a part is missing.
    """
    index = model / INDEX
    if not index.is_file():
        raise ValueError(f"{model} has no {INDEX}, without which diffusers opens no folder; add the released one")
    found = {INDEX: index}
    for part, value in json.loads(index.read_text(encoding="utf-8")).items():
        # A part has a library and a class; [null, null] stands for one that is left out.
        if part == "transformer" or not (isinstance(value, list) and all(value)):
            continue
        files = [path for path in sorted((model / part).rglob("*")) if path.is_file()]
        if not files:
            raise ValueError(f"{model} has no {part}/, which its {INDEX} names; add the released one")
        found |= {str(path.relative_to(model)): path for path in files}
    found |= {path.name: path for path in sorted(model.iterdir()) if path.stem.upper() in ("LICENSE", "NOTICE")}
    # The files of a downloaded folder may be links into a cache.
    return {name: path.resolve() for name, path in found.items()}


def find_transformer(model: Path) -> dict[str, Path]:
    """Return the transformer's files, for a run that did not train it, as `find_parts` does.

    Raises: ValueError if it has no weights.
    """
    if not has_weights(model / "transformer"):
        raise ValueError(
            f"the run trained no renderer and {model} has no weights in transformer/; name one with --model"
        )
    files = sorted(path for path in (model / "transformer").rglob("*") if path.is_file())
    return {str(path.relative_to(model)): path.resolve() for path in files}


def copy_parts(files: dict[str, Path], folder: Path, hard_links: bool) -> None:
    """Put files into a folder; with hard_links, weights share their bytes with the source where the disk allows it."""
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if hard_links and source.suffix == ".safetensors":
            with contextlib.suppress(OSError):  # another disk, or one without hard links
                os.link(source, target)
                continue
        shutil.copyfile(source, target)
