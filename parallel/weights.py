"""Released safetensors weights: whole on one process, or each rank's own part of a sharded model.

Rank 0 alone reads the headers; every rank then reads the byte ranges of its own shards, straight into place, with a few
reads in flight.  A location is a .safetensors file or a folder of them: a local path, `https://`, `http://` or `s3://`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.distributed import gather_results, is_main, num_ranks
from parallel.lora import base_parameters
from parallel.safetensors_files import StoredFile, StoredTensor, find_files, read_headers
from parallel.shard_reads import Read, Rows, plan_reads, run_reads, shard_rows
from parallel.slices import local_slice
from utils.byte_source import open_source

T = TypeVar("T")

log = logging.getLogger("train")


def has_weights(location: str | Path) -> bool:
    """Return whether a location holds safetensors at all; every rank takes part and agrees.

    Raises: ValueError on every rank if rank 0 cannot find out.
    """
    return _from_main(lambda: bool(find_files(location)[0]))


def weight_files(folder: str | Path) -> dict[str, Path]:
    """Return the file of every tensor in a local folder of safetensors, having checked their headers and the index.

    Raises: ValueError if the files are not sound.
    """
    return {name: Path(entry.file.location) for name, entry in read_headers(folder).items()}


def read_safetensors(location: str | Path) -> dict[str, Tensor]:
    """Return every tensor of a location, whole, on the CPU, in the stored dtype; on this process alone.

    Raises: ValueError if the files are not sound; OSError if they cannot be read.
    """
    stored = read_headers(location)
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in stored.items()}
    with ExitStack() as files:
        run_reads(_open_reads(tensors, stored, files))
    return tensors


def load_weights(model: nn.Module, location: str | Path, optional: Iterable[str] = ()) -> frozenset[str]:
    """Fill a model that has its memory, sharded or not; every rank takes part.  Returns the filled parameters' names.

    optional: names that the location may lack (extensions); they keep their values, as adapters do (`parallel.lora`).
    Values are converted to the parameters' dtype and device.  Beside its shards a rank holds a few MB a read in flight.
    Raises: ValueError, on every rank and before a parameter changes, for damaged files and for missing, extra or
    wrong-shaped tensors.  ValueError on every rank if a read fails midway: the parameters are then of no use.
    """
    started = time.perf_counter()
    stored = _from_main(lambda: read_headers(location))
    parameters = base_parameters(model)
    with ExitStack() as files:
        _agreed(lambda: _check_fit(parameters, stored, location, optional))
        reads = _agreed(lambda: _open_reads(parameters, stored, files))
        num_bytes = _agreed(lambda: run_reads(reads), "the weights are loaded in part, so this run cannot go on: ")
    seconds = time.perf_counter() - started
    log.info("%d tensors from %s, %.2f GB by this rank in %.1f s", len(stored), location, num_bytes / 1e9, seconds)
    return frozenset(stored)


def _check_fit(
    parameters: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    location: str | Path,
    optional: Iterable[str],
) -> None:
    """Raise ValueError unless the stored tensors are those of the parameters, save for some of the optional ones."""
    missing = sorted(parameters.keys() - stored.keys() - set(optional))
    extra = sorted(stored.keys() - parameters.keys())
    if missing or extra:
        raise ValueError(
            f"{location} does not fit the model: {len(missing)} tensors missing (first {missing[:3]}), "
            f"{len(extra)} not of this model (first {extra[:3]})"
        )
    for name, entry in stored.items():
        parameter, where = parameters[name], f"{name} in {entry.file.location}"
        if entry.shape != tuple(parameter.shape):
            raise ValueError(f"{where} has shape {entry.shape}, the model needs {tuple(parameter.shape)}")
        if entry.dtype != parameter.dtype and not (entry.dtype.is_floating_point and parameter.is_floating_point()):
            raise ValueError(f"{where} has dtype {entry.dtype}, which does not become the model's {parameter.dtype}")


def _open_reads(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], files: ExitStack) -> list[Read]:
    """Open the files that hold this rank's shards and return the reads that fill them.

    files: closes them.
    Raises: OSError if a file is not there, or is not the one whose header was read.
    """
    rows: dict[StoredFile, list[Rows]] = {}
    for name, entry in stored.items():
        tensor = tensors[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        rows.setdefault(entry.file, []).extend(shard_rows(entry, local.detach(), local_slice(tensor)))
    reads = []
    for file, parts in rows.items():
        if parts:
            source = files.enter_context(closing(open_source(file.location, pinned=(file.size, file.version))))
            reads += [(source, group) for group in plan_reads(parts, source)]
    return reads


def _from_main(function: Callable[[], T]) -> T:
    """Return, on every rank, what `function()` gives on rank 0; what it raises there, all raise as ValueError."""
    outcome: list = [None, None]
    if is_main():
        try:
            outcome[0] = function()
        except Exception as error:  # whatever it is, the others must hear of it
            outcome[1] = _message(error)
    if num_ranks() > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]


def _agreed(function: Callable[[], T], introduction: str = "") -> T:
    """Return `function()`; if it raises on any rank, all raise a ValueError with the first such rank's message."""
    result, problem = None, None
    try:
        result = function()
    except Exception as error:  # whatever it is, the others must hear of it
        problem = _message(error)
    problems = gather_results(lambda: problem)
    if failed := [number for number, text in enumerate(problems) if text is not None]:
        everywhere = len(failed) == len(problems)
        raise ValueError(introduction + problems[failed[0]] + ("" if everywhere else f" (on rank {failed[0]})"))
    return result


def _message(error: Exception) -> str:
    """Return what a user needs to see of an error."""
    return str(error) if isinstance(error, (ValueError, OSError)) else repr(error)
