"""Patterns over module names, as the plans of a model use them."""

import re
from collections.abc import Iterator

from torch import nn


def matching_modules(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for each module whose dotted name matches; `*` stands for one component.

    Model order.  Yields nothing if the model has no such module.
    """
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    for name, module in model.named_modules():
        if expression.fullmatch(name):
            yield name, module
