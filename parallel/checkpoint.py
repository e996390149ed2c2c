"""Sharded checkpoints that are published, never modified.

A step is written through `torch.distributed.checkpoint` to a folder beside its final name, checksummed on the way, read
back and compared, described by commit.json (every file with its size and CRC-32, and the run's state), synced, and
renamed into place.  What has no valid commit.json does not exist.  Loading checks every byte before it unpickles
anything or changes a tensor, and works on any mesh and any number of ranks.

Tensors are named; a name must mean the same (sharded or replicated) tensor on every rank that has it.
"""

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from parallel.checked_writer import CheckedWriter, without_torch_crc32
from parallel.commit_record import RECORD, damage, read_record, sync_folder, write_record
from parallel.distributed import gather_results, num_ranks, on_main, rank

log = logging.getLogger("train")


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies."""
    return Path(folder) / f"step-{step:08d}"


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict) -> Path:
    """Write and publish the checkpoint of `step`; every rank takes part.  Returns its folder.

    state: JSON-able, the same on every rank.  A valid checkpoint of this step that is already there is kept as it is.
    Raises: ValueError on every rank, with nothing published, if any rank could not write, or if what lies on the disk
    is not what was written.
    """
    final = step_folder(folder, step)
    beside = final.with_name(f".{final.name}.partial")
    if on_main(lambda: _problem(folder, step) is None):
        return final
    try:
        if any(other != state for other in gather_results(lambda: state)):
            raise ValueError("the state differs between ranks")
        on_main(lambda: _make_empty(beside))
        writer = CheckedWriter(beside)
        with _quiet(), without_torch_crc32():
            dcp.save(dict(tensors), storage_writer=writer)
        files = {name: entry for written in gather_results(lambda: writer.written) for name, entry in written.items()}
        if problem := _first(gather_results(lambda: damage(beside, files, _own_share()))):
            raise OSError(f"{problem}; is the disk full or broken?")
        record = {"step": step, "state": state, "files": files, "torch": torch.__version__, "num_ranks": num_ranks()}
        on_main(lambda: _publish(beside, final, record))
    except (Exception, dcp.CheckpointException) as error:  # the latter is not an Exception
        on_main(lambda: shutil.rmtree(beside, ignore_errors=True))
        raise ValueError(f"checkpoint of step {step} could not be written to {final}: {_cause(error)}") from error
    return final


def load(folder: Path, step: int, tensors: dict[str, Tensor]) -> dict:
    """Fill `tensors` in place from the checkpoint of `step` and return its state; every rank takes part.

    tensors: what this rank holds; together the ranks must ask for all that is stored, on any number of them.
    Raises: ValueError, before a tensor changes, if the checkpoint is damaged, or its names, shapes or dtypes differ.
    """
    path = step_folder(folder, step)
    if problem := _shared_problem(folder, step):
        raise ValueError(f"{path} is not a valid checkpoint: {problem}")
    stored = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in _stored_tensors(path).items()}
    own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    wanted = {name: entry for of_rank in gather_results(lambda: own) for name, entry in of_rank.items()}
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    other = [
        f"{name} is {stored[name]} there, {wanted[name]} here"
        for name in wanted.keys() & stored.keys()
        if stored[name] != wanted[name]
    ]
    if missing or extra or other:
        raise ValueError(
            f"{path} belongs to another model or optimizer: {len(missing)} tensors not in it (first {missing[:3]}), "
            f"{len(extra)} only in it (first {extra[:3]}), {len(other)} of another shape or dtype {sorted(other)[:3]}"
        )
    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(path))
    except dcp.CheckpointException as error:
        raise ValueError(f"{path} is valid but could not be read: {_cause(error)}") from error
    return read_record(path)["state"]


def latest(folder: Path) -> int | None:
    """Return the newest step whose checkpoint is valid to the last byte, or None; every rank takes part and agrees.

    A newer one that is damaged is named in a warning.
    """
    for step in on_main(lambda: _steps(folder)):
        if (problem := _shared_problem(folder, step)) is None:
            return step
        if rank() == 0:
            log.warning("skipping damaged checkpoint %s: %s", step_folder(folder, step), problem)
    return None


def load_latest(folder: Path, tensors: dict[str, Tensor]) -> tuple[int, dict | None]:
    """Fill `tensors` from the newest valid checkpoint and return its step and state; 0 and None if there is none.

    Raises: ValueError as `load` does.
    """
    step = latest(folder)
    return (0, None) if step is None else (step, load(folder, step, tensors))


class StoredTensors:
    """The tensors of one checkpoint, read one at a time on this process alone, whatever mesh saved them.

    path, step, state: of the checkpoint.  specs: name → (shape, dtype) of every tensor in it.
    """

    def __init__(self, folder: Path, step: int | None = None):
        """Check every byte of the checkpoint of `step`, or find the newest valid one.

        Raises: ValueError if it is missing or damaged, or none is valid.
        """
        if step is None:
            if (step := latest(folder)) is None:
                raise ValueError(f"no valid checkpoint in {folder}; has the run saved one yet?")
        elif step not in (present := _steps(folder)):
            raise ValueError(f"no checkpoint of step {step} in {folder}; there are {sorted(present) or 'none'}")
        elif problem := _problem(folder, step):
            raise ValueError(f"{step_folder(folder, step)} is not a valid checkpoint: {problem}")
        self.path = step_folder(folder, step)
        self.step, self.state = step, read_record(self.path)["state"]
        self._reader = _ReaderWithMetadata(self.path)
        self.specs = {
            name: (torch.Size(entry.size), entry.properties.dtype)
            for name, entry in self._reader.metadata.state_dict_metadata.items()
        }

    def read(self, name: str) -> Tensor:
        """Return one full tensor on the CPU.  At its peak this takes the tensor twice.

        Raises: ValueError if the checkpoint has been deleted since it was opened, or its disk fails.
        """
        shape, dtype = self.specs[name]
        tensor = torch.empty(shape, dtype=dtype)
        try:
            with _quiet():
                dcp.load({name: tensor}, storage_reader=self._reader, no_dist=True)
        except dcp.CheckpointException as error:
            raise ValueError(f"{name} can no longer be read from {self.path}: {_cause(error)}") from error
        return tensor


class _ReaderWithMetadata(dcp.FileSystemReader):
    """Unpickles a large checkpoint's table of contents once, not at every load."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.metadata = super().read_metadata()

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self.metadata


def load_tensors(folder: Path, step: int, prefix: str) -> dict[str, Tensor]:
    """Return the full CPU tensors whose names start with `prefix`, on this process alone, whatever mesh saved them.

    Raises: ValueError if the checkpoint is missing or damaged, or has no such tensor.
    """
    stored = StoredTensors(folder, step)
    names = [name for name in stored.specs if name.startswith(prefix)]
    if not names:
        raise ValueError(f"{step_folder(folder, step)} holds no tensor named {prefix}*")
    return {name: stored.read(name) for name in names}


def prune(folder: Path, keep_last: int) -> None:
    """Delete what is older than the newest `keep_last` sound checkpoints, and what interrupted saves left behind.

    The record goes first: a half-deleted checkpoint cannot be taken for a whole one.  What cannot be deleted is named
    in a warning.
    """

    def delete() -> None:
        steps = _steps(folder)
        sound = [step for step in steps if _problem(folder, step, share=slice(0)) is None]
        old = [step_folder(folder, step) for step in steps if step < min(sound[: max(1, keep_last)], default=0)]
        for path in [*old, *Path(folder).glob(".step-*.partial")]:
            try:
                (path / RECORD).unlink(missing_ok=True)
                shutil.rmtree(path)
            except OSError as error:
                log.warning("could not delete %s: %s", path, error)

    on_main(delete)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning that one process alone saves or loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
        yield


def _publish(beside: Path, final: Path, record: dict) -> None:
    write_record(beside, record)
    if final.exists():  # damaged, else save would have returned
        shutil.rmtree(final)
    beside.rename(final)
    sync_folder(final.parent)


def _problem(folder: Path, step: int, share: slice = slice(None)) -> str | None:
    """Return what is wrong with a checkpoint, or None; only the files of `share`, sorted by name, are read through."""
    path = step_folder(folder, step)
    try:
        record = read_record(path)
        if record["step"] != step:
            return f"its commit record is that of step {record['step']}"
        return damage(path, record["files"], share)
    except (OSError, ValueError) as error:
        return str(error)


def _shared_problem(folder: Path, step: int) -> str | None:
    """Return what is wrong with a checkpoint, or None; the ranks share the reading and agree."""
    return _first(gather_results(lambda: _problem(folder, step, _own_share())))


def _stored_tensors(path: Path) -> dict:
    """Return name → torch.distributed.checkpoint's TensorStorageMetadata; only after the checksums matched."""
    return dcp.FileSystemReader(path).read_metadata().state_dict_metadata


def _steps(folder: Path) -> list[int]:
    """Return the steps that have a folder, newest first."""
    names = (entry.name for entry in Path(folder).iterdir()) if Path(folder).is_dir() else ()
    return sorted((int(n[5:]) for n in names if n.startswith("step-") and n[5:].isdigit()), reverse=True)


def _make_empty(beside: Path) -> None:
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir(parents=True)


def _cause(error: BaseException) -> str:
    """Return what went wrong, on the first rank where it did."""
    if isinstance(error, dcp.CheckpointException):
        culprit, (cause, _) = next(iter(error.failures.items()))
        return f"rank {culprit}: {cause!r}"
    return str(error) or repr(error)


def _first(problems: list[str | None]) -> str | None:
    return next((problem for problem in problems if problem), None)


def _own_share() -> slice:
    """Return this rank's part of a list that the ranks divide among them."""
    return slice(rank(), None, num_ranks())
