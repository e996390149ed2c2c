"""Checkpoints of a run, saved in the background: copied to host memory during the next forward and backward, and
written from there."""

import copy
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from parallel import checkpoint_retention as retention_rules
from parallel.checked_writer import write_and_verify
from parallel.checkpoint_layout import Layout, signature
from parallel.checkpoint_owner import Owner, claim, stop_if_superseded
from parallel.checkpoint_publish import describe, publish, write_tensors
from parallel.checkpoint_retention import Retention, make_room, problem, step_name, steps, stored_losses
from parallel.checkpoint_storage import open_storage
from parallel.distributed import gather_results, is_main, num_ranks, on_main, rank
from parallel.staged_copy import StagedCopy
from parallel.writer_process import WriterDied, WriterProcess
from utils.config import BACKGROUND_SAVE
from utils.state_changes import wait_before_changes

MODES = ("none", "thread", "process")
_TRIES = 3  # of a writer process, for one save
log = logging.getLogger("train")


class CheckpointSaver:
    """Saves the run's checkpoints one after the other and deletes those that are no longer needed.

    mode: "none" writes while training waits; "thread" and "process" copy to host memory, which must hold this rank's
    part once more, and write from there.  A process leaves the training's interpreter alone.  The copy is made while
    forward and backward go on; the next optimizer step, and all else that `utils.state_changes` knows to change state,
    waits for what is not copied yet.
    A save that fails is a warning with a count; after `max_failures` in a row, or if it is the last, it is an error.

    saved_step: the newest step that this saver knows to be published, None at first.  num_failures: failed saves so
    far.  last_save_s: how long the save of saved_step took until it was published, 0 at first and if it was there
    before.  last_copy_wait_s: how long training waited for its copy, after the call of `save`.  saving_since:
    time.monotonic() of a save that goes on, or None.  on_failure: is called with the step of each save that fails, when
    it does, in the background from the save's own thread; None at first.
    """

    def __init__(
        self,
        folder: Path | str,
        mode: str = "none",
        keep_last: int = 2,
        keep_every: int = 0,
        keep_best: int = 0,
        about: dict | None = None,
        max_failures: int = 3,
        timeout_s: float = 1800.0,
    ):
        """Every rank takes part.

        folder: a local path, or an s3:// URL as a str.  keep_*: see `Retention`.  about: JSON-able, kept in every
        record: the configuration.  timeout_s: a background save that takes longer has failed.
        Raises: ValueError for another mode, a number that makes no sense, or a folder that cannot be read.
        """
        if mode not in MODES:
            raise ValueError(f"--checkpoint_async must be one of {', '.join(MODES)}, got {mode!r}")
        if keep_last < 1 or keep_every < 0 or keep_best < 0 or max_failures < 1:
            raise ValueError(
                f"--keep_checkpoints must be at least 1 and no number negative: got {keep_last}, --keep_every "
                f"{keep_every}, --keep_best {keep_best}, max_failures {max_failures}"
            )
        self.storage, self.mode = open_storage(folder), mode
        self.retention = Retention(keep_last, keep_every, keep_best)
        self.saved_step: int | None = None
        self.num_failures, self.last_save_s, self.last_copy_wait_s = 0, 0.0, 0.0
        self.saving_since: float | None = None
        self.on_failure: Callable[[int], None] | None = None
        self._about, self._max_failures, self._timeout_s = about or {}, max_failures, timeout_s
        self._failures_in_row, self._last_failure = 0, ""
        self._owner: Owner | None = None
        self._layout: Layout | None = None
        self._copy: StagedCopy | None = None
        self._writer: WriterProcess | None = None
        self._thread: threading.Thread | None = None
        try:
            self._losses = on_main(lambda: stored_losses(self.storage))  # step → validation loss, of earlier starts
        except OSError as error:
            raise ValueError(f"{self.storage.folder} cannot be looked through for checkpoints: {error}") from error
        # Two threads must not use one group: their collectives would meet the wrong ones.
        self._group = None
        if mode != "none" and num_ranks() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        wait_before_changes(self.wait_for_copy)

    @property
    def is_saving(self) -> bool:
        """Whether a save goes on in the background on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_bytes(self) -> int:
        """Size of a checkpoint, over all ranks; 0 before the first save."""
        return 0 if self._layout is None else self._layout.total_bytes

    @property
    def free_bytes(self) -> int | None:
        """Room left where the checkpoints lie, None where no limit is known."""
        return self.storage.room()[0] if self.storage.is_local else None

    def path(self, step: int) -> Path | str:
        """Return where the checkpoint of a step lies, or would."""
        return self.storage.path(step_name(step))

    def claim(self, run_folder: Path | str) -> None:
        """Make this saver the only one of its folder, and of its run; every rank takes part.

        Raises: ValueError, on every rank, if the folder holds another run's checkpoints.
        """
        self._owner = claim(self.storage, run_folder)

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Plan the saves and allocate their memory before the first, which then takes no longer than the others.

        Every rank takes part.  tensors: as for `save`.
        """
        self._plan(tensors)

    def note_loss(self, step: int, loss: float | None) -> None:
        """Tell the validation loss of a step, None if it has none; `keep_best` chooses by it.

        Before or after the step's save.
        """
        if loss is not None:
            self._losses[step] = loss

    def save(self, step: int, tensors: dict[str, Tensor], state: dict, rank_state: dict | None = None) -> None:
        """Save; every rank takes part.  It waits for the save before, and in the background modes for nothing else.

        tensors: as for `checkpoint.save`; they must not change before `wait_for_copy` has returned, which optimizers,
        `EMA` and loading see to.  state: JSON-able, the same on every rank; it is taken at the call.
        rank_state: JSON-able, of this rank alone; it is found under state["ranks"][str(rank)].
        A valid checkpoint of this step that is already there is kept as it is.
        Raises: ValueError, on every rank, if the states differ, or if too many saves in a row have failed; Stopped if
        a later start of the run has claimed the folder.
        """
        self.wait()
        if self._owner is not None:
            stop_if_superseded(self.storage, self._owner)
        started = time.perf_counter()
        mine = (
            state,
            rank_state,
            self._layout is None or self._layout.signature != signature(tensors),
            is_main() and problem(self.storage, step) is None,
        )
        of_ranks = gather_results(lambda: mine)
        if any(other[0] != state for other in of_ranks):
            raise ValueError(
                f"checkpoint of step {step}: the state differs between ranks; what belongs to one goes to rank_state"
            )
        if of_ranks[0][3]:
            self.saved_step, self.last_save_s = step, 0.0
            return
        if any(other[2] for other in of_ranks):
            self._plan(tensors)
        if any(other[1] is not None for other in of_ranks):
            state = state | {"ranks": {str(i): other[1] for i, other in enumerate(of_ranks)}}
        state = copy.deepcopy(state)  # it is rendered in the background, when training may have changed its lists
        record = describe(step, state, tensors) | {"about": self._about, "losses": {}}
        record |= {"run": self._owner.run} if self._owner is not None else {}
        self.saving_since = time.monotonic()
        if self.mode == "none":
            self._save(step, write_tensors(self.storage, self._layout, tensors), record, started)
        else:
            self._copy.begin(tensors)
            self._thread = threading.Thread(
                target=self._save, args=(step, self._write, record, started), daemon=True,
                name=f"{BACKGROUND_SAVE} {step}",
            )  # fmt: skip
            self._thread.start()
        if self.mode == "none":
            self._raise_if_too_many()

    def wait_for_copy(self) -> None:
        """Return when the tensors of the last save may change."""
        if self._copy is not None:
            self._copy.wait()

    def wait(self) -> None:
        """Wait until the save in the background is published or has failed.

        Raises: ValueError, on every rank, if too many in a row have failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._raise_if_too_many()

    def close(self) -> None:
        """Wait for the last save and give back its memory.

        Raises: ValueError if it failed: no later one makes good for it.
        """
        try:
            self._max_failures = 1
            self.wait()
            self._raise_if_too_many()
            if is_main():
                self._prune()
        finally:
            self._free()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
                self._group = None

    def _raise_if_too_many(self) -> None:
        if self._failures_in_row >= self._max_failures:
            raise ValueError(
                f"{self._failures_in_row} saves in a row have failed; the newest checkpoint is that of step "
                f"{self.saved_step}.  The last, {self._last_failure}"
            )

    def _plan(self, tensors: dict[str, Tensor]) -> None:
        self.wait()
        self._free()
        self._layout = Layout(tensors, self.storage.file_bytes)
        if self.mode == "none":
            return
        try:
            gather_results(lambda: self._allocate(tensors))  # one rank's host may have no room
        except OSError as error:
            raise ValueError(str(error)) from error
        if self.mode == "process":
            self._writer = WriterProcess(self._copy.memory.fd, self._layout.num_bytes, self._timeout_s)

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        self._copy = StagedCopy(self._layout, tensors)

    def _write(self, beside: str) -> dict[str, dict]:
        """Write this rank's files from the copy; a writer process that dies is started again and begins anew."""
        self._copy.check()
        ranges = {file: [(piece.start, piece.stop) for piece in pieces] for file, pieces in self._layout.files.items()}
        if self._writer is None:
            view = self._copy.memory.view
            return write_and_verify(
                self.storage, beside, {file: [view[a:b] for a, b in pieces] for file, pieces in ranges.items()}
            )
        for attempt in range(_TRIES):
            try:
                return self._writer.write(self.storage, beside, ranges)
            except WriterDied as error:
                log.warning("rank %d: %s%s", rank(), error, "; it is started again" if attempt < _TRIES - 1 else "")
                if attempt == _TRIES - 1:
                    raise
        raise AssertionError("not reached")

    def _save(self, step: int, write, record: dict, started: float) -> None:
        """Publish and clean up, in this thread or in one of its own; what goes wrong is counted, alike on all ranks."""
        if self.mode != "none":
            self._copy.run()
        try:
            record["losses"] = on_main(lambda: self._make_ready(step), self._group)
            publish(self.storage, step, self._layout, write, record, self._group)
        except Exception as error:
            self.num_failures, self._failures_in_row = self.num_failures + 1, self._failures_in_row + 1
            self.saving_since, self._last_failure = None, f"of step {step}: {error}"
            if is_main():
                log.warning(
                    "step %d: save %d in a row failed, %d in all; training goes on: %s",
                    step, self._failures_in_row, self.num_failures, error,
                )  # fmt: skip
            if self.on_failure is not None:
                self.on_failure(step)
            return
        self.last_save_s, self.saving_since = time.perf_counter() - started, None
        self.last_copy_wait_s = self._copy.waited_s if self._copy is not None else 0.0
        self.saved_step, self._failures_in_row, self._last_failure = step, 0, ""
        if is_main():
            self._prune()

    def _make_ready(self, coming: int) -> dict[str, float]:
        """Make room for a checkpoint and return the losses that its record holds: its own and those of the others."""
        losses = self._losses.copy()  # another thread may note one meanwhile
        make_room(self.storage, self.retention, losses, self._layout.total_bytes, self._layout.total_files)
        there = {coming, *steps(self.storage)}
        return {str(step): loss for step, loss in losses.items() if step in there and math.isfinite(loss)}

    def _prune(self) -> None:
        try:
            retention_rules.prune(self.storage, self.retention, self._losses.copy())
        except Exception as error:  # the checkpoint is published: what cannot be cleaned up is no failed save
            log.warning("old checkpoints in %s could not be looked through: %s", self.storage.folder, error)

    def _free(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._copy is not None:
            self._copy.close()
        self._writer = self._copy = None
