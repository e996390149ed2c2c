"""How what a checkpoint holds differs from what a run asks for: what is named as an error, and what may be.

All must be the same, with one exception.  A parameter that was frozen when the checkpoint was made has no optimizer
state there; trained now, it starts with the fresh state that the optimizer made for it.  One that is frozen now has
state there that nobody asks for.  Both are said in the log.  But a parameter's state is there as a whole or not at all:
some of it, or other state, is that of another optimizer.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping

from parallel.distributed import is_main

log = logging.getLogger("train")
Specs = Mapping[str, tuple]  # name → (shape, dtype)


def compare(where: str, stored: Specs, wanted: Specs, partly: Collection[str]) -> set[str]:
    """Return the names that are wanted, not stored, and may start fresh.

    where: the checkpoint, for messages.  partly: prefixes of the names of parameters' state.
    Raises: ValueError that names what differs.
    """
    missing, extra = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    fresh, unused = (_whole_parameters(names, stored, wanted, partly) for names in (missing, extra))
    missing, extra = sorted(missing - fresh.keys()), sorted(extra - unused.keys())
    other = sorted(name for name in wanted.keys() & stored.keys() if stored[name] != wanted[name])
    if different := [*missing, *extra, *other]:
        kinds = sorted({"optimizer" if name.startswith(tuple(partly)) else "model" for name in different})
        advice = "; resume with the settings it was made with, or give --init_from to a new run" if partly else ""
        shown = [f"{name} is {_text(stored[name])} there, {_text(wanted[name])} here" for name in other[:3]]
        kinds_of_difference = (
            f"{len(missing)} tensors not in it (first {missing[:3]})" if missing else "",
            f"{len(extra)} only in it (first {extra[:3]})" if extra else "",
            f"{len(other)} of another shape or dtype {shown}" if other else "",
        )
        raise ValueError(
            f"{where} belongs to another {' and '.join(kinds)}: {', '.join(filter(None, kinds_of_difference))}{advice}"
        )
    for names, text in (
        (fresh, "holds no optimizer state of %d parameters (first %s): they start with fresh state"),
        (unused, "holds optimizer state of %d parameters that are not trained now (first %s): it is not used"),
    ):
        if names and is_main():
            owners = sorted(set(names.values()))
            log.warning("%s " + text, where, len(owners), owners[:3])
    return set(fresh)


def _text(spec: tuple) -> str:
    shape, dtype = spec
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def _whole_parameters(names: set[str], stored: Specs, wanted: Specs, partly: Collection[str]) -> dict[str, str]:
    """Return name → parameter of those `names` that are all of the parameter's state on one of the sides, none on the
    other."""
    if not names:
        return {}
    parameters = {name for name in wanted if not name.startswith(tuple(partly))} & stored.keys()
    by_owner = defaultdict(set)
    for prefix in partly:
        for name in {*stored, *wanted}:
            if name.startswith(prefix) and (owner := _owner(name.removeprefix(prefix), parameters)):
                by_owner[owner].add(name)
    return {name: owner for owner, state in by_owner.items() if state <= names for name in state}


def _owner(name: str, parameters: Collection[str]) -> str | None:
    """Return the parameter that a state belongs to: "blocks.0.weight.exp_avg" to "model.blocks.0.weight"."""
    while "." in name:
        name = name.rpartition(".")[0]
        for candidate in (f"model.{name}", name):
            if candidate in parameters:
                return candidate
    return None
