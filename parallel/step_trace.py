"""Everything a training step does, seen from the dispatcher: memory, collectives, arithmetic and memory traffic."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.collective_trace import read_collective
from parallel.memory_trace import MemoryTrace
from parallel.module_position import ModulePosition, Position
from parallel.operator_cost import operator_flops, operator_traffic


class Work(NamedTuple):
    """What one operator does on this rank."""

    module: str
    operator: str
    recomputed: bool
    dtype: torch.dtype
    flops: int
    traffic: int  # bytes read from and written to the device's memory


class StepTrace(TorchDispatchMode):
    """Records what happens between `phase` blocks; used around real steps and fake ones alike."""

    def __init__(self, model: nn.Module, units: Sequence[str], attention_lens: Sequence[int], granularity: int = 1):
        """units: names of the FSDP units in order; attention_lens: tokens of each sample of the micro-batch.

        granularity: see MemoryTrace.
        """
        super().__init__()
        self.memory = MemoryTrace(granularity)
        self.where = ModulePosition(model, units)
        self.collectives: dict[Position, Counter] = {}  # Counter of Collective
        self.work: dict[Position, Counter] = {}  # Counter of Work
        self._attention_lens = attention_lens

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow modules and storages; around all phases."""
        with self.where, self.memory:
            self.memory.mark(self.where.position)
            yield

    @contextmanager
    def phase(self, micro_batch: int, name: str) -> Iterator[None]:
        """Record the operators inside, as part of a phase: forward, backward or optimizer."""
        self.where.begin(micro_batch, name)
        self.memory.mark(self.where.position)
        with self:
            yield
        self.where.end()
        self.memory.mark(self.where.position)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if DTensor in types:  # its own dispatch runs first, and its local operators come here
            return NotImplemented
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if self.where.update():
            self.memory.mark(self.where.position)
        where = self.where
        if (collective := read_collective(func, args, kwargs)) is not None:
            self.collectives.setdefault(where.position, Counter())[collective] += 1
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if where.position.phase == "forward" or where.recomputing:
            kind = "activations"
        else:
            kind = "backward" if where.position.phase == "backward" else "other"
        self.memory.see(outputs, where.position, where.label, kind)
        if func.namespace == "fsdp":
            # Buffers of its collectives, whole parameters and whole gradients.
            self.memory.adopt("unsharded", _tensors((args, kwargs)))
        elif collective is not None and collective.kind == "reduce_scatter":
            output, buffer = sorted(_tensors(args), key=Tensor.numel)
            if self.memory.kind(buffer) == "unsharded":
                self.memory.adopt("gradients", [output])
        if traffic := operator_traffic(func, args, kwargs, outputs):
            flops = operator_flops(func, args, kwargs, result, self._attention_lens)
            dtype = outputs[0].dtype if outputs else torch.float32
            work = Work(where.label, func.name(), where.recomputing, dtype, flops, traffic)
            self.work.setdefault(where.position, Counter())[work] += 1
        return result


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts of (possibly distributed) tensors that this rank holds."""
    # The attribute, not `to_local`, which goes through autograd and is slow on fake tensors.
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def _tensors(values) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]
