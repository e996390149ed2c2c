"""Before the state of a run changes, whoever still reads it in the background is waited for.

State is what a checkpoint holds: parameters, their average, an optimizer's state.  Forward and backward only read it,
so it can be copied meanwhile (CheckFreq, FAST '21).  Every optimizer of torch's kind comes here by itself at each step,
`EMA` and loading as well; whatever else changes state calls `before_change` first.
"""

import weakref
from collections.abc import Callable

from torch.optim.optimizer import register_optimizer_step_pre_hook

_waits: list[weakref.WeakMethod] = []


def wait_before_changes(wait: Callable[[], None]) -> None:
    """Have a bound method called before every change of state, as long as its object lives."""
    _waits[:] = [reference for reference in _waits if reference() is not None]
    _waits.append(weakref.WeakMethod(wait))


def before_change(*_) -> None:
    """Wait until the state of this process may change.  Cheap when nobody reads it."""
    for reference in tuple(_waits):
        if (wait := reference()) is not None:
            wait()


register_optimizer_step_pre_hook(before_change)  # of all optimizers, those inside others too
