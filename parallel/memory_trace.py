"""Bytes alive at every moment of a step, by kind and module, for real and for fake tensors alike."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.module_position import OUTSIDE, Position


class Breakdown(dict):
    """Bytes by (kind, module), with the arithmetic that extrapolation needs."""

    def __add__(self, other: "Breakdown") -> "Breakdown":
        return Breakdown({key: self.get(key, 0) + other.get(key, 0) for key in self.keys() | other.keys()})

    def __sub__(self, other: "Breakdown") -> "Breakdown":
        return self + other * -1

    def __mul__(self, factor: int) -> "Breakdown":
        return Breakdown({key: num_bytes * factor for key, num_bytes in self.items()})

    def total(self) -> int:
        return sum(self.values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind."""
        result: Counter = Counter()
        for (kind, _), num_bytes in self.items():
            result[kind] += num_bytes
        return {kind: num_bytes for kind, num_bytes in result.items() if num_bytes}


@dataclass
class _Storage:
    kind: str  # the final one; a later `adopt` may still change it
    label: str  # the module that was at work when it was allocated
    num_bytes: int
    reference: weakref.ref


class MemoryTrace:
    """Follows storages from their first sight to their end.

    Kinds: what `adopt` says; else "unsharded" for FSDP's gathered parameters, whole gradients and buffers,
    "activations" for what a forward (or recomputed) module makes, "backward" for what the backward pass makes, "other".
    """

    def __init__(self, granularity: int = 1):
        """granularity: bytes that every allocation is rounded up to; 512 on CUDA."""
        self.granularity = granularity
        self._storages: dict[int, _Storage] = {}  # by running number
        self._numbers: dict[int, int] = {}  # address of a living storage → running number
        self._timeline: list[tuple[Position, int, int]] = []  # where, running number, change in bytes
        self._here = OUTSIDE

    def adopt(self, kind: str, tensors: Iterable[Tensor]) -> int:
        """Say what tensors are, whether seen before or not.  Returns the bytes of their storages, each counted once."""
        total = {}
        for tensor in tensors:
            number = self._number(tensor.untyped_storage(), OUTSIDE, "", kind)
            self._storages[number].kind = kind
            total[number] = tensor.untyped_storage().nbytes()
        return sum(total.values())

    def kind(self, tensor: Tensor) -> str:
        """Return what a tensor's storage is taken for so far."""
        return self._storages[self._numbers[tensor.untyped_storage()._cdata]].kind

    def see(self, tensors: Iterable[Tensor], position: Position, label: str, kind: str) -> None:
        """Note tensors that an operator returned; those on known storages are views and change nothing."""
        for tensor in tensors:
            self._number(tensor.untyped_storage(), position, label, kind)

    def mark(self, position: Position) -> None:
        """Note that the step has come to another position."""
        self._here = position
        self._timeline.append((position, -1, 0))

    def peaks(self) -> dict[Position, Breakdown]:
        """Return for each position the bytes alive at its (first) peak, by (kind, module)."""
        alive, total = Counter(), 0
        highest: dict[Position, int] = {}
        result: dict[Position, Breakdown] = {}
        for position, number, change in self._timeline:
            if number >= 0:
                storage = self._storages[number]
                alive[storage.kind, storage.label] += change
                total += change
            if position != OUTSIDE and total > highest.get(position, -1):
                highest[position] = total
                result[position] = Breakdown({key: n for key, n in alive.items() if n})
        return result

    def __enter__(self) -> "MemoryTrace":
        # FSDP frees and allocates gathered parameters by resizing their storages, which no dispatch mode sees.
        resize, trace = torch.UntypedStorage.resize_, self

        def traced_resize(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            trace._resized(storage)

        self._resize, torch.UntypedStorage.resize_ = resize, traced_resize
        return self

    def __exit__(self, *_) -> None:
        torch.UntypedStorage.resize_ = self._resize

    def _number(self, storage: torch.UntypedStorage, position: Position, label: str, kind: str) -> int:
        address = storage._cdata
        if (number := self._numbers.get(address)) is None:
            number = self._numbers[address] = len(self._storages)
            reference = weakref.ref(storage, lambda _: self._freed(number, address))
            self._storages[number] = _Storage(kind, label, 0, reference)
            self._change(number, position, storage.nbytes())
        return number

    def _change(self, number: int, position: Position, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // self.granularity) * self.granularity
        storage = self._storages[number]
        if num_bytes != storage.num_bytes:
            self._timeline.append((position, number, num_bytes - storage.num_bytes))
            storage.num_bytes = num_bytes

    def _freed(self, number: int, address: int) -> None:
        self._numbers.pop(address, None)
        self._change(number, self._here, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        number = self._number(storage, self._here, "", "unsharded")
        self._storages[number].kind = "unsharded"
        self._change(number, self._here, storage.nbytes())
