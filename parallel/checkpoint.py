"""Sharded checkpoints that are published, never modified.

A step's files are written beside its final name (`checkpoint_storage`), checksummed on the way, read back and
compared, described by commit.json (every file with its size and CRC-32, and the run's state), synced, and published at
once.  What has no valid commit.json does not exist.  Loading checks every byte before it changes a tensor, and works on
any mesh and any number of ranks.  `checkpoint_saver.CheckpointSaver` saves in the background.

folder: a local path, or an s3:// URL as a str.
Tensors are named; a name must mean the same (sharded or replicated) tensor on every rank that has it.  What belongs to
one rank goes under a name with that rank in it.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from parallel import checkpoint_retention as retention
from parallel.checked_writer import read_file
from parallel.checkpoint_differences import compare
from parallel.checkpoint_layout import INDEX, Layout
from parallel.checkpoint_publish import describe, publish, write_tensors
from parallel.checkpoint_reader import CheckpointReader
from parallel.checkpoint_retention import Retention, note_verified, problem, record_of, step_name, steps
from parallel.checkpoint_storage import Storage, open_storage
from parallel.distributed import gather_results, num_ranks, on_main, rank
from utils.checksum import crc32
from utils.counts import count
from utils.state_changes import before_change

log = logging.getLogger("train")


def step_folder(folder: Path | str | Storage, step: int) -> Path | str:
    """Return where the checkpoint of `step` lies."""
    if isinstance(folder, Storage):
        folder = folder.folder
    return f"{folder}/{step_name(step)}" if isinstance(folder, str) else Path(folder) / step_name(step)


def save(folder: Path | str, step: int, tensors: dict[str, Tensor], state: dict) -> Path | str:
    """Write and publish the checkpoint of `step`; every rank takes part.  Returns where it lies.

    state: JSON-able, the same on every rank.  A valid checkpoint of this step that is already there is kept as it is.
    Raises: ValueError on every rank, with nothing published, if any rank could not write, or if what lies on the disk
    is not what was written.
    """
    storage = open_storage(folder)
    if on_main(lambda: problem(storage, step) is None):
        return step_folder(folder, step)
    check_alike(storage, step, state)
    layout = Layout(tensors, storage.file_bytes)
    publish(storage, step, layout, write_tensors(storage, layout, tensors), describe(step, state, tensors))
    return step_folder(folder, step)


def check_alike(storage: Storage, step: int, state: dict) -> None:
    """Raise ValueError on every rank unless all have the same state."""
    states = gather_results(lambda: state)
    if any(other != states[0] for other in states):
        raise ValueError(
            f"checkpoint of step {step} could not be written to {storage.path(step_name(step))}: "
            "the state differs between ranks; what belongs to one rank goes under a key with that rank in it"
        )


def load(folder: Path | str, step: int, tensors: dict[str, Tensor], partly: tuple[str, ...] = ("optimizer.",)) -> dict:
    """Fill `tensors` in place from the checkpoint of `step` and return its state; every rank takes part.

    tensors: what this rank holds; together the ranks must ask for all that is stored, on any number of them.
    partly: prefixes of names under which the state of whole parameters may be missing or too many, as
    `checkpoint_differences.compare` says: a parameter that was frozen and is trained now keeps its fresh state.
    Raises: ValueError, before a tensor changes, if the checkpoint is damaged, or its names, shapes or dtypes differ.
    """
    storage = open_storage(folder)
    if found := shared_problem(storage, step):
        raise ValueError(f"{step_folder(folder, step)} is not a valid checkpoint: {found}")
    return load_verified(storage, step, tensors, partly)


def latest(folder: Path | str | Storage) -> int | None:
    """Return the newest step whose checkpoint is valid to the last byte, or None; every rank takes part and agrees.

    A newer one that is damaged is named in a warning.
    """
    storage = open_storage(folder)
    for step in on_main(lambda: steps(storage)):
        if (found := shared_problem(storage, step)) is None:
            return step
        if rank() == 0:
            count("checkpoint_verify_failures")
            log.warning("skipping damaged checkpoint %s: %s", step_folder(folder, step), found)
    return None


def load_latest(
    folder: Path | str | Storage, tensors: dict[str, Tensor], partly: tuple[str, ...] = ("optimizer.",)
) -> tuple[int, dict | None]:
    """Fill `tensors` from the newest valid checkpoint and return its step and state; 0 and None if there is none.

    Every byte is read once to check it and once to use it.
    Raises: ValueError as `load` does.
    """
    step = latest(folder)
    return (0, None) if step is None else (step, load_verified(open_storage(folder), step, tensors, partly))


def prune(folder: Path | str, keep_last: int, keep_every: int = 0) -> None:
    """Delete what is older than the newest `keep_last` sound checkpoints, and what interrupted saves left behind.

    keep_every: steps that it divides stay for ever.  The record goes first: a half-deleted checkpoint cannot be taken
    for a whole one.  What cannot be deleted is named in a warning.
    """
    on_main(lambda: retention.prune(open_storage(folder), Retention(keep_last, keep_every), {}))


class StoredTensors:
    """The tensors of one checkpoint, read one at a time on this process alone, whatever mesh saved them.

    path, step, state: of the checkpoint.  specs: name → (shape, dtype) of every tensor in it.
    """

    def __init__(self, folder: Path | str, step: int | None = None):
        """Check every byte of the checkpoint of `step`, or find the newest valid one.

        Raises: ValueError if it is missing or damaged, or none is valid.
        """
        storage = open_storage(folder)
        if step is None:
            if (step := latest(folder)) is None:
                raise ValueError(f"no valid checkpoint in {folder}; has the run saved one yet?")
        elif step not in (present := steps(storage)):
            raise ValueError(f"no checkpoint of step {step} in {folder}; there are {sorted(present) or 'none'}")
        elif found := problem(storage, step):
            raise ValueError(f"{step_folder(folder, step)} is not a valid checkpoint: {found}")
        self.path = step_folder(folder, step)
        record, self._reader = _open(storage, step)
        self.step, self.state = step, record["state"]
        self.specs = _specs(self._reader)

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


def load_tensors(folder: Path | str, step: int, prefix: str) -> dict[str, Tensor]:
    """Return the full CPU tensors whose names start with `prefix`, on this process alone, whatever mesh saved them.

    Raises: ValueError if the checkpoint is missing or damaged, or has no such tensor.
    """
    stored = StoredTensors(folder, step)
    names = [name for name in stored.specs if name.startswith(prefix)]
    if not names:
        raise ValueError(f"{step_folder(folder, step)} holds no tensor named {prefix}*")
    return {name: stored.read(name) for name in names}


def load_verified(
    storage: Storage, step: int, tensors: dict[str, Tensor], partly: tuple[str, ...], without: tuple[str, ...] = ()
) -> dict:
    """Do what `load` does with a checkpoint whose every byte is known to be right.

    without: prefixes of names that are not looked at in it.
    """
    path, (record, reader) = storage.path(step_name(step)), _shared_reader(storage, step)
    specs = _specs(reader).items()
    stored = {name: (tuple(shape), dtype) for name, (shape, dtype) in specs if not name.startswith(without)}
    own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    wanted = {name: entry for of_rank in gather_results(lambda: own) for name, entry in of_rank.items()}
    fresh = compare(str(path), stored, wanted, partly)
    try:
        with _quiet():
            present = {name: tensor for name, tensor in tensors.items() if name not in fresh}
            before_change()
            dcp.load(present, storage_reader=reader)
    except dcp.CheckpointException as error:
        raise ValueError(f"{path} is valid but could not be read: {_cause(error)}") from error
    return record["state"]


def _open(storage: Storage, step: int) -> tuple[dict, dcp.StorageReader]:
    """Return the record of a verified checkpoint, and what reads its tensors."""
    return _reader(storage, step, *_contents(storage, step))


def _shared_reader(storage: Storage, step: int) -> tuple[dict, dcp.StorageReader]:
    """Return the same on every rank; rank 0 alone reads the record and the table of contents."""
    try:
        return _reader(storage, step, *on_main(lambda: _contents(storage, step)))
    except OSError as error:
        raise ValueError(f"{storage.path(step_name(step))} is valid but could not be read: {error}") from error


def _contents(storage: Storage, step: int) -> tuple[dict, bytes]:
    """Return the record and the table of contents, which the first format has elsewhere."""
    record = record_of(storage, step)
    if record["format"] == 1:
        return record, b""
    index = read_file(storage, step_name(step), INDEX)
    if crc32(index) != record["files"][INDEX]["crc32"]:
        raise OSError(f"{INDEX} changed since it was checked")
    return record, index


def _reader(storage: Storage, step: int, record: dict, index: bytes) -> tuple[dict, dcp.StorageReader]:
    if record["format"] == 1:  # torch's own reader, which unpickles
        return record, _FirstFormatReader(storage.path(step_name(step)))
    return record, CheckpointReader(storage, step_name(step), index)


class _FirstFormatReader(dcp.FileSystemReader):
    """Unpickles a large checkpoint's table of contents once, not at every load."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.metadata = super().read_metadata()

    def read_metadata(self, *args, **kwargs):
        return self.metadata


def _specs(reader: dcp.StorageReader) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return name → (shape, dtype) of what a checkpoint holds."""
    entries = reader.read_metadata().state_dict_metadata
    return {name: (torch.Size(entry.size), entry.properties.dtype) for name, entry in entries.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning that one process alone loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
        yield


def shared_problem(storage: Storage, step: int) -> str | None:
    """Return what is wrong with a checkpoint, or None; the ranks share the reading and agree."""
    share = slice(rank(), None, num_ranks())
    problems = gather_results(lambda: problem(storage, step, share))
    if not any(problems):
        note_verified(storage, step)
    return next((found for found in problems if found), None)


def _cause(error: dcp.CheckpointException) -> str:
    """Return what went wrong, on the first rank where it did."""
    culprit, (cause, _) = next(iter(error.failures.items()))
    return f"rank {culprit}: {cause!r}"
