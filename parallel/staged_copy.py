"""A copy of a run's state in host memory, made while forward and backward go on, which change no state.

Source: CheckFreq, FAST '21, section 4.1: the snapshot overlaps with computation up to the next update of the weights.
"""

import threading
import time

import torch
from torch import Tensor

from parallel.checkpoint_layout import Layout
from parallel.host_memory import HostMemory


class StagedCopy:
    """Host memory for what a rank writes, filled by a background thread; `wait` is for whoever changes the state.

    memory: what the copy is in, laid out as the layout says.  waited_s: how long `wait` took since the last `begin`.
    """

    def __init__(self, layout: Layout, tensors: dict[str, Tensor]):
        """Allocate.

        Raises: ValueError if this host has no room for it.
        """
        self._layout = layout
        self._on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
        self.memory = HostMemory(layout.num_bytes, pin=self._on_gpu)
        self.waited_s = 0.0
        self._targets = [
            self.memory.tensor(piece.start, part)
            for file, parts in layout.local_tensors(tensors).items()
            for piece, part in zip(layout.files[file], parts, strict=True)
        ]
        self._sources: list[Tensor] = []
        self._stream = torch.cuda.Stream() if self._on_gpu else None
        self._copied = torch.cuda.Event() if self._on_gpu else None
        self._is_there = threading.Event()  # all is copied; of a GPU: queued
        self._is_there.set()
        self._failure: BaseException | None = None

    def begin(self, tensors: dict[str, Tensor]) -> None:
        """Say what is to be copied, as it is now; `tensors` must not change until `wait` has returned."""
        self._sources = [part for parts in self._layout.local_tensors(tensors).values() for part in parts]
        self._failure, self.waited_s = None, 0.0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # for what is still being computed of them
        self._is_there.clear()

    @torch.no_grad()
    def run(self) -> None:
        """Copy, and return when all is there or it failed, which `check` tells; in another thread than `wait`."""
        try:
            try:
                with torch.cuda.stream(self._stream):  # None: no stream
                    if self._sources:
                        _fill(self._targets, self._sources)
                    if self._copied is not None:
                        self._copied.record(self._stream)
            finally:
                self._is_there.set()
            if self._copied is not None:
                self._copied.synchronize()
        except Exception as error:
            self._failure = error
        self._sources = []  # not before: what is freed may be given to others

    def check(self) -> None:
        """Raise what kept `run` from copying, if anything did."""
        if self._failure is not None:
            raise OSError(f"the state could not be copied to host memory: {self._failure!r}") from self._failure

    def wait(self) -> None:
        """Return when the state may change.  A GPU's stream waits, not the host, once the copy is queued there."""
        if not self._is_there.is_set():
            started = time.perf_counter()
            self._is_there.wait()
            self.waited_s += time.perf_counter() - started
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def close(self) -> None:
        """Give the memory back."""
        self._targets, self._sources = [], []
        self.memory.close()


def _fill(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources, non_blocking=True)
