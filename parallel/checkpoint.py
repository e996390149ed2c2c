"""Sharded checkpoints that are published, never modified.

A step is written to a folder beside its final name through `torch.distributed.checkpoint`, checked, described by
commit.json (every file with its size and CRC-32, and the run's state), synced, and renamed into place.  What has no
valid commit.json does not exist.  Loading checks every byte before it changes a tensor, and works on any mesh and any
number of ranks.

Tensors are named; a name must mean the same (sharded or replicated) tensor on every rank.
"""

import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

RECORD = "commit.json"
FORMAT = 1
log = logging.getLogger("train")


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies."""
    return Path(folder) / f"step-{step:08d}"


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict) -> Path:
    """Write and publish the checkpoint of `step`; every rank takes part.  Returns its folder.

    state: JSON-able, the same on every rank.  A valid checkpoint of this step that is already there is kept as it is.
    Raises: ValueError on every rank, with nothing published, if any rank could not write or what it wrote is short.
    """
    final = step_folder(folder, step)
    beside = final.with_name(f".{final.name}.partial")
    if _on_main(lambda: _problem(final) is None):
        return final
    _on_main(lambda: _make_empty(beside))
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(beside, thread_count=1, sync_files=True))
        _on_main(lambda: _check_written(beside))
        names = _on_main(lambda: sorted(path.name for path in beside.iterdir()))
        mine = names[_rank() :: _world()]
        parts = _gather(lambda: {name: _describe(beside / name) for name in mine})
        record = {
            "format": FORMAT,
            "step": step,
            "state": state,
            "world_size": _world(),
            "torch": torch.__version__,
            "files": {name: entry for part in parts for name, entry in sorted(part.items())},
        }
        _on_main(lambda: _publish(beside, final, record))
    except Exception as error:
        _on_main(lambda: shutil.rmtree(beside, ignore_errors=True))
        raise ValueError(f"checkpoint of step {step} could not be written to {final}: {_first_line(error)}") from error
    return final


def load(folder: Path, step: int, tensors: dict[str, Tensor], verify: bool = True) -> dict:
    """Fill `tensors` in place from the checkpoint of `step` and return its state; every rank takes part.

    verify=False: the caller has just found the checkpoint valid with `latest`.
    Raises: ValueError, before a tensor changes, if the checkpoint is damaged or its names or shapes differ.
    """
    path = step_folder(folder, step)
    if verify and (problem := verify_all(path)):
        raise ValueError(f"{path} is not a valid checkpoint: {problem}")
    stored = _stored_shapes(path)
    missing, extra = sorted(tensors.keys() - stored.keys()), sorted(stored.keys() - tensors.keys())
    other = [n for n in tensors if n in stored and tuple(tensors[n].shape) != stored[n]]
    if missing or extra or other:
        detail = [f"{n} is {stored[n]} there, {tuple(tensors[n].shape)} here" for n in other[:3]]
        raise ValueError(
            f"{path} belongs to another model or optimizer: {len(missing)} tensors not in it (first {missing[:3]}), "
            f"{len(extra)} only in it (first {extra[:3]}), {len(other)} of another shape {detail}"
        )
    dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(path))
    return json.loads((path / RECORD).read_text())["state"]


def latest(folder: Path) -> int | None:
    """Return the newest step whose checkpoint is valid to the last byte, or None; the same on every rank.

    A newer one that is damaged is named in a warning.
    """
    for step in _on_main(lambda: _steps(folder)):
        if (problem := verify_all(step_folder(folder, step))) is None:
            return step
        if _rank() == 0:
            log.warning("skipping damaged checkpoint %s: %s", step_folder(folder, step), problem)
    return None


def load_tensors(folder: Path, step: int, prefix: str) -> dict[str, Tensor]:
    """Return the full CPU tensors whose names start with `prefix`, on this process alone, whatever mesh saved them.

    Raises: ValueError if the checkpoint is damaged or has no such tensor.
    """
    path = step_folder(folder, step)
    if problem := _problem(path):
        raise ValueError(f"{path} is not a valid checkpoint: {problem}")
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if name.startswith(prefix)
    }
    if not tensors:
        raise ValueError(f"{path} holds no tensor named {prefix}*")
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints, the record first: no torn one can be taken for whole."""

    def delete() -> None:
        for step in _steps(folder)[max(1, keep_last) :]:
            (step_folder(folder, step) / RECORD).unlink(missing_ok=True)
            shutil.rmtree(step_folder(folder, step))

    _on_main(delete)


def verify_all(path: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, or None; the ranks share the reading and agree."""
    problems = _gather(lambda: _problem(path, _rank(), _world()))
    return next((problem for problem in problems if problem), None)


def _problem(path: Path, share: int = 0, num_shares: int = 1) -> str | None:
    """Check the record, the list of files, all sizes, and the checksums of files share, share + num_shares, …"""
    try:
        record = json.loads((path / RECORD).read_text())
        files = record["files"]
        if record["format"] != FORMAT:
            return f"format {record['format']}, this program reads {FORMAT}"
    except FileNotFoundError:
        return "it has no commit record"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its commit record cannot be read ({error})"
    found = {entry.name for entry in path.iterdir()} - {RECORD}
    if found != files.keys():
        return f"files differ from its record: {sorted(found ^ files.keys())[:3]}"
    for i, (name, entry) in enumerate(files.items()):
        size = (path / name).stat().st_size
        if size != entry["size"]:
            return f"{name} has {size} bytes, its record says {entry['size']}"
        if i % num_shares == share and _crc32(path / name) != entry["crc32"]:
            return f"{name} does not match its checksum"
    return None


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _steps(folder: Path) -> list[int]:
    """Return the steps that have a folder, newest first."""
    names = (entry.name for entry in Path(folder).iterdir()) if Path(folder).is_dir() else ()
    return sorted((int(n[5:]) for n in names if n.startswith("step-") and n[5:].isdigit()), reverse=True)


def _make_empty(beside: Path) -> None:
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir(parents=True)


def _check_written(beside: Path) -> None:
    """Raise if a file is shorter than the metadata says: a writer's failure is not always reported."""
    ends: dict[str, int] = {}
    for info in dcp.FileSystemReader(beside).read_metadata().storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        size = (beside / name).stat().st_size
        if size < end:
            raise OSError(f"{name} has {size} of {end} bytes; is the disk full?")


def _publish(beside: Path, final: Path, record: dict) -> None:
    with (beside / RECORD).open("w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(beside)
    if final.exists():  # invalid, else save would have returned
        shutil.rmtree(final)
    beside.rename(final)
    _sync_folder(final.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(path: Path) -> dict[str, int]:
    return {"size": path.stat().st_size, "crc32": _crc32(path)}


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _first_line(error: BaseException) -> str:
    """Return what went wrong on the first rank that failed."""
    failures = getattr(error, "failures", None)  # torch.distributed.checkpoint's CheckpointException
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {cause!r}"
    return str(error).splitlines()[0] if str(error) else repr(error)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(function: Callable) -> list:
    """Return function() of every rank, on every rank; an exception on one is raised on all."""
    try:
        result = (True, function())
    except Exception as error:  # whatever it is, the others must hear of it
        result = (False, f"rank {_rank()}: {error!r}")
    results = [result]
    if _world() > 1:
        results = [None] * _world()
        dist.all_gather_object(results, result)
    for succeeded, value in results:
        if not succeeded:
            raise OSError(value)
    return [value for _, value in results]


def _on_main(function: Callable):
    """Return function() of rank 0, run there alone, on every rank; an exception is raised on all."""
    return _gather(lambda: function() if _rank() == 0 else None)[0]
