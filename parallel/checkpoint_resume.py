"""Where a run begins: at its newest checkpoint, at the weights of another run, or at its start."""

import logging
from pathlib import Path

import torch
from torch import Tensor

from parallel.checkpoint import latest, load_latest, load_verified, shared_problem
from parallel.checkpoint_retention import step_name, steps
from parallel.checkpoint_saver import CheckpointSaver
from parallel.checkpoint_storage import open_storage
from parallel.distributed import is_main, on_main
from parallel.lora import check_base
from utils.run_state import checkpoint_folder

_NO_WEIGHTS = ("optimizer.", "ema.")  # names of everything else begin with that of their network
log = logging.getLogger("train")


def resume(
    saver: CheckpointSaver, tensors: dict[str, Tensor], base: dict, model: str, init_from: str = "",
    run_folder: Path | None = None,
) -> tuple[int, dict | None]:  # fmt: skip
    """Fill `tensors` and return the first step to do and the checkpoint's state, 0 and None without one.

    tensors: all of the run, see `utils.run_state`.  base: `base_record` of the network; model: where that is from.
    init_from: where the weights come from as long as the run has no checkpoint of its own, see `load_weights`.
    run_folder: the run whose checkpoints these are to be, see `checkpoint_owner`; None asks and says nothing of it.
    Raises: ValueError, before a tensor changes, if what is there belongs to another run, model, optimizer or base.
    """
    if run_folder is not None:
        saver.claim(run_folder)
    step, state = load_latest(saver.storage, tensors)
    if state is None and init_from:
        load_weights(init_from, tensors, base, model)
    elif state is not None:
        check_base(state, base, model)
        saver.saved_step = step
    if saver.mode != "none":  # without its memory it should fail here, not at the first save
        saver.prepare(tensors)
    return step, state


def load_weights(source: str, tensors: dict[str, Tensor], base: dict, model: str) -> int:
    """Fill the weights, and their average with the same, from a checkpoint of another run; return its step.

    source: one checkpoint (…/step-00000100), a run's folder, or a folder of checkpoints; of several the newest valid.
    Nothing else of that run is used: no optimizer state, no average, no position in the data.  Every rank takes part.
    Raises: ValueError, before a tensor changes, if there is no valid checkpoint, or names, shapes or dtypes differ.
    """
    folder, step = _find(source)
    if step is None and (step := latest(folder)) is None:
        raise ValueError(f"no valid checkpoint in {source}: give a run's folder, its checkpoints or one of them")
    storage = open_storage(folder)
    if found := shared_problem(storage, step):
        raise ValueError(f"{storage.path(step_name(step))} is not a valid checkpoint: {found}")
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(_NO_WEIGHTS)}
    check_base(load_verified(storage, step, weights, partly=(), without=_NO_WEIGHTS), base, model)
    of_average = {name.removeprefix("ema."): tensor for name, tensor in tensors.items() if name.startswith("ema.")}
    with torch.no_grad():
        for name, tensor in weights.items():
            if (average := of_average.get(name.partition(".")[2])) is not None:
                average.copy_(tensor)
    if is_main():
        log.info("weights of step %d of %s", step, folder)
    return step


def _find(source: str) -> tuple[str, int | None]:
    """Return the folder of checkpoints that is meant, and the step if it is one of them."""
    parent, _, name = source.rstrip("/").rpartition("/")
    if name.startswith("step-") and name[5:].isdigit():
        return parent or ".", int(name[5:])
    inside = str(checkpoint_folder(source))
    return (inside, None) if on_main(lambda: bool(steps(open_storage(inside)))) else (source, None)
