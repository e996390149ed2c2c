"""Modules by name pattern, the way a plan names them."""

import re

from torch import nn


def matching_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every submodule whose dotted name matches; `*` stands for one part of the name."""
    expression = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*")))
    return [(name, module) for name, module in model.named_modules() if expression.fullmatch(name)]
