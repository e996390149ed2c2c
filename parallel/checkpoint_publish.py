"""One checkpoint's way from memory to its name: written beside it by all ranks, verified, committed by rank 0."""

import contextlib
import platform
import secrets
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.checked_writer import damage, write_and_verify
from parallel.checkpoint_layout import INDEX, Layout, tensor_bytes
from parallel.checkpoint_retention import note_verified, step_name
from parallel.checkpoint_storage import Storage
from parallel.commit_record import render_record
from parallel.distributed import gather_results, is_main, num_ranks, on_main

Write = Callable[[str], dict[str, dict]]  # folder name → this rank's files as `write_and_verify` gives them


def publish(
    storage: Storage, step: int, layout: Layout, write: Write, record: dict, group: dist.ProcessGroup | None = None
) -> None:
    """Write and publish the checkpoint of `step`; every rank takes part.

    write: writes and verifies this rank's files.  record: JSON-able, what the commit record holds beside the files;
    rank 0's counts.  group: for the ranks' agreement, when this is not the main thread.
    Raises: ValueError on every rank, with nothing published, if any rank could not write, or what lies in the storage
    is not what was written.
    """
    name, beside = step_name(step), None
    try:
        beside = on_main(lambda: _begin(storage, name), group)

        def own() -> tuple[dict, list]:
            written = write(beside)
            return {file: _entry(of_file) for file, of_file in written.items()}, layout.parts(written)

        of_ranks = gather_results(own, group)
        files = {file: entry for of_rank, _ in of_ranks for file, entry in of_rank.items()}
        parts = [part for _, of_rank in of_ranks for part in of_rank]
        on_main(lambda: _commit(storage, beside, name, layout.index(parts), files, record), group)
    except Exception as error:
        if is_main() and beside is not None:
            with contextlib.suppress(OSError):
                storage.delete(beside)
        cause = str(error) or repr(error)
        raise ValueError(f"checkpoint of step {step} could not be written to {storage.path(name)}: {cause}") from error
    note_verified(storage, step)


def write_tensors(storage: Storage, layout: Layout, tensors: dict[str, Tensor]) -> Write:
    """Return what writes this rank's files straight from its tensors."""

    def write(beside: str) -> dict[str, dict]:
        files = layout.local_tensors(tensors)
        return write_and_verify(storage, beside, {file: map(tensor_bytes, parts) for file, parts in files.items()})

    return write


def describe(step: int, state: dict, tensors: dict[str, Tensor]) -> dict:
    """Return what a commit record says of a checkpoint: the run's state, the mesh, the versions of the software."""
    meshes = {tensor.device_mesh for tensor in tensors.values() if hasattr(tensor, "device_mesh")}
    named = sorted(
        {tuple(zip(mesh.mesh_dim_names or (), map(int, mesh.shape), strict=False)) for mesh in meshes}, key=str
    )
    return {
        "step": step,
        "state": state,
        "num_ranks": num_ranks(),
        "meshes": [dict(mesh) for mesh in named],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": _version("numpy")},
    }


def _begin(storage: Storage, name: str) -> str:
    beside = storage.beside(name, secrets.token_hex(4))
    storage.begin(beside)
    return beside


def _commit(storage: Storage, beside: str, name: str, index: bytes, files: dict, record: dict) -> None:
    render_record(record)  # before anything is written: it may not be JSON-able
    written = write_and_verify(storage, beside, {INDEX: [memoryview(index)]})
    rendered = render_record(record | {"files": files | {INDEX: _entry(written[INDEX])}})
    if problem := damage(storage, beside, files | written, slice(0)):  # are all there, in the size they should have?
        raise OSError(problem)
    storage.publish(beside, name, rendered)


def _entry(written: dict) -> dict:
    return {"size": written["size"], "crc32": written["crc32"]}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
