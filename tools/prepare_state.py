"""prepare.json: what an output folder of tools.prepare was made from, so that no two makings ever mix."""

import dataclasses
import fcntl
import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from parallel.distributed import is_main
from tools.prepare_shards import Output, written_aside

FORMAT = 1
_STATE = "prepare.json"


@dataclass
class State:
    """What was found, or is written, in prepare.json."""

    content: dict
    lock: object = None  # an open file, kept as long as the process makes shards

    @property
    def is_complete(self) -> bool:
        return self.content["complete"]


def begin(
    output: Output, config: object, may_change: Collection[str], inputs: str, num_rows: int, num_shards: int
) -> State:
    """Check, on rank 0, that the folder is new or begun with this configuration and input; make it ready.

    Raises: ValueError, on every rank, if it is not, if another process is at work there, or if it cannot be written.
    """
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    content = {
        "format": FORMAT,
        "config": {name: value for name, value in settings.items() if name not in may_change},
        "input_fingerprint": inputs,
        "num_rows": num_rows,
        "num_shards": num_shards,
        "complete": False,
    }
    seen: list = [None] * dist.get_world_size()
    dist.all_gather_object(seen, inputs)
    if len(set(seen)) > 1:
        raise ValueError("the ranks do not see the same input; is it being changed, or not the same on every machine?")
    problem, state = None, None
    if is_main():
        try:
            state = _begin(output, content)
        except ValueError as error:
            problem = str(error)
    found = [problem, state and state.content]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        raise ValueError(found[0])
    return state or State(found[1])


def _begin(output: Output, content: dict) -> State:
    path, folder = output.folder / _STATE, output.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ours = (output.work.name, f"{_STATE}.")  # the second: left by a start that was killed
        others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(ours)]
    except OSError as error:
        raise ValueError(f"--output {folder} cannot be a folder: {error.strerror}") from error
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        _check_same(folder, earlier, content)
        if earlier["complete"]:
            _check_shards(folder, earlier)
            return State(earlier)
    elif others:
        raise ValueError(
            f"--output {folder} holds other files ({', '.join(sorted(others)[:3])} …) and no {_STATE}; give "
            "a new folder"
        )
    output.work.mkdir(exist_ok=True)
    lock = _lock(output)
    for leftover in (*output.work.glob("*.tmp"), *folder.glob("*.tmp")):  # of a start that was killed
        leftover.unlink()
    with written_aside(path) as file:
        file.write(_as_json(content))
    return State(content, lock)


def complete(output: Output, state: State, num_shards: int) -> None:
    """Record every shard's size and remove the work folder.  Raises: ValueError if a shard is missing."""
    missing = [output.shard(n).name for n in range(num_shards) if not output.shard(n).exists()]
    if missing:
        raise ValueError(f"{len(missing)} shards are missing in {output.folder}, first {missing[0]}")
    shards = {output.shard(n).name: output.shard(n).stat().st_size for n in range(num_shards)}
    state.content = state.content | {"complete": True, "shards": shards}
    with written_aside(output.folder / _STATE) as file:
        file.write(_as_json(state.content))
    shutil.rmtree(output.work)


def _check_same(folder: Path, earlier: dict, now: dict) -> None:
    if earlier.get("format") != FORMAT:
        raise ValueError(f"{folder} was made by another version of this tool; give another --output")
    changed = [
        f"--{name}: {earlier['config'].get(name)!r} there, {value!r} here"
        for name, value in now["config"].items()
        if earlier["config"].get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{folder} was made with another configuration:\n  " + "\n  ".join(changed)
            + "\nuse the same values to resume it, or another --output"
        )  # fmt: skip
    if earlier["input_fingerprint"] != now["input_fingerprint"]:
        raise ValueError(
            f"the input has changed since {folder} was begun: {earlier['num_rows']} rows then, {now['num_rows']} now; "
            "give another --output"
        )


def _check_shards(folder: Path, earlier: dict) -> None:
    for name, size in earlier["shards"].items():
        there = (folder / name).stat().st_size if (folder / name).exists() else None
        if there != size:
            found = "missing" if there is None else f"of {there} bytes"
            raise ValueError(
                f"{folder / name} is {found}, it was made with {size}; remove the folder and make it again"
            )


def _lock(output: Output) -> object:
    file = (output.work / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(
            f"another process is writing to {output.folder}; wait for it or give another --output"
        ) from error
    return file


def _as_json(content: dict) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
