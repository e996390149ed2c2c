"""Exponential moving average of the weights, in float32 shards beside the master weights."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class EMA:
    """The average of `named_parameters`; each rank averages its own shards, without communication."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], decay: float):
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"--ema_decay must be in [0, 1), got {decay}")
        self.decay = decay
        self.parameters = dict(named_parameters)
        self.averages = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the weights after optimizer step `step` (from 0).

        The decay rises as (1 + step) / (10 + step), so that early averages forget the initial weights.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [_local(parameter.detach()) for parameter in self.parameters.values()]
        torch._foreach_lerp_([_local(average) for average in self.averages.values()], weights, 1.0 - decay)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model hold the averages inside the block.  FSDP: reshard before it ends, or gathered ones stay."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            weight, average = _local(parameter.detach()), _local(self.averages[name])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
