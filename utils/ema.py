"""Exponential moving average of the weights, sharded as the weights are."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from utils.state_changes import before_change


class EMA:
    """A copy of the float32 (or float64) master weights that follows them slowly.

    Every rank averages its own shards: no communication, any sharding.
    """

    @torch.no_grad()
    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], decay: float):
        """decay: in [0, 1), the share of the average that an update keeps.

        Raises: ValueError for another decay.
        """
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"--ema_decay must be in [0, 1), got {decay}")
        self.decay = decay
        self._parameters = dict(named_parameters)
        assert all(p.dtype in (torch.float32, torch.float64) for p in self._parameters.values())
        self._averages = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the parameters; step: optimizer steps done before this one.

        The decay starts low and rises to its value, so that the first weights are soon forgotten.
        """
        before_change()
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(_local(self._averages.values()), _local(self._parameters.values()), 1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        """Return the average under the parameters' names; filling these tensors restores it."""
        return self._averages

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Let `model` run on the average; afterwards its parameters are what they were, bit for bit.

        Inside, `tensors()` holds the parameters: do not save there.
        """
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        before_change()
        for parameter, average in zip(_local(self._parameters.values()), _local(self._averages.values()), strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
        for module in model.modules():  # weights that are still gathered would hide the exchange
            if isinstance(module, FSDPModule):
                module.reshard()


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts of the tensors that lie on this rank."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
