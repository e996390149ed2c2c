"""Which module is at work at any moment of a step, forward and backward, without touching the autograd graph."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as module_hooks


class Position(NamedTuple):
    """A part of a step: within a micro-batch's pass, one FSDP unit, or what comes before or after all units."""

    micro_batch: int
    phase: str  # forward, backward, optimizer
    stage: str | int  # number of the unit, "before", "after"


OUTSIDE = Position(-1, "outside", "before")  # of all phases


class ModulePosition:
    """Follows modules by global hooks in the forward pass, and by their nodes' sequence numbers in the backward pass.

    Hooks on tensors would keep gradients alive; sequence numbers cost no memory.  A module that runs again inside the
    backward pass is being recomputed.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]):
        """units: names of the model's FSDP units, in the order of their forward."""
        self._labels: dict[nn.Module, tuple[str, int | None]] = {}
        number = {name: k for k, name in enumerate(units)}
        for name, module in model.named_modules():
            unit = next((u for u in units if name == u or name.startswith(u + ".")), None)
            alike = re.sub(r"\.\d+", ".*", unit or "") + name[len(unit or "") :]
            self._labels[module] = alike, number.get(unit)
        self._stack: list[tuple[str, int | None]] = [("", None)]
        # Sequence numbers at which the module at work changed, and to which.
        self._changes: list[int] = [0]
        self._changed_to: list[tuple[str, int | None]] = [("", None)]
        self.position, self.label = OUTSIDE, ""
        self._unit_seen = False

    def begin(self, micro_batch: int, phase: str) -> None:
        """Enter a phase of the step."""
        self._unit_seen = False
        self.position, self.label = Position(micro_batch, phase, "before"), ""

    def end(self) -> None:
        """Leave the phase."""
        self.position, self.label = OUTSIDE, ""

    def update(self) -> bool:
        """Find out where the step is, at an operator call.  Returns whether the position is another than before."""
        node = torch._C._current_autograd_node() if self.position.phase == "backward" else None
        if len(self._stack) > 1 or self.position.phase != "backward":
            label, unit = self._stack[-1]
        elif node is None or not 0 <= node._sequence_nr() < 2**62:  # the engine itself, or a leaf's accumulation
            return False
        else:
            label, unit = self._changed_to[bisect_right(self._changes, node._sequence_nr()) - 1]
        self.label = label
        if unit is not None:
            self._unit_seen = True
        stage = unit if unit is not None else "after" if self._unit_seen else "before"
        changed = stage != self.position.stage
        if changed:
            self.position = self.position._replace(stage=stage)
        return changed

    @property
    def recomputing(self) -> bool:
        """Whether a module runs forward inside the backward pass."""
        return self.position.phase == "backward" and len(self._stack) > 1

    def __enter__(self) -> "ModulePosition":
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: nn.Module, _args) -> None:
        if module in self._labels:
            self._stack.append(self._labels[module])
            self._note_change()

    def _leave_module(self, module: nn.Module, _args, _output) -> None:
        if module in self._labels:
            self._stack.pop()
            self._note_change()

    def _note_change(self) -> None:
        self._changes.append(torch._C._autograd._get_sequence_nr())
        self._changed_to.append(self._stack[-1])
