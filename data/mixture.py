"""Mixtures: which sources a run reads, and in what shares it visits their groups of samples, for which tasks."""

import json
import logging
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from data.captions import LANGUAGES
from data.edit import CATEGORIES, parse_shares
from data.index_part import SampleRecord
from data.order import OF_ITS_CATEGORY
from data.shards import expand_shards
from data.tasks import DEFAULT_SHARES, EDIT, MIXED, RECONSTRUCTION, T2I, TASKS, own_task
from utils.console import ONCE

log = logging.getLogger("train")
MIXTURE_SUFFIXES = (".toml", ".json")
MAX_GROUPS = 64  # their counts are in every checkpoint's state
Points = tuple[tuple[int, float], ...]  # (step, share), steps rising


@dataclass(frozen=True)
class Source:
    """A data set by name: what --data takes, and its held-out part, or "" if it has none of its own."""

    data: str
    validation: str = ""


@dataclass(frozen=True)
class Group:
    """Samples with a caption in `language`, of a category and a source; None = any.  Its share by step.

    task: what they are visited for; None = what they are samples of, text-to-image or edits.
    """

    share: Points = ((0, 1.0),)
    source: str | None = None
    language: str | None = None
    category: str | None = None
    task: str | None = field(default=None, repr=False)  # runs from before there were tasks are resumed

    @property
    def name(self) -> str:
        """What metrics call it."""
        parts = (self.task, self.source, self.language, self.category)
        return "-".join(part or "none" for part in parts if part is not None)

    def takes(self, source: str | None, language: str, category: str, task: str) -> bool:
        """Return whether a visit is of this group; a source of None is unknown and fits all."""
        return (
            (self.source is None or source is None or self.source == source)
            and self.language in (None, language)
            and self.category in (None, category)
            and (self.task == task or self.task is None and task != RECONSTRUCTION)
        )


@dataclass(frozen=True)
class Mixture:
    """Sources, and groups with shares.

    A sample's caption belongs to the first group that takes it; its picture, to be reconstructed, likewise to the first
    group of that task.
    """

    sources: dict[str, Source]
    groups: tuple[Group, ...]
    by_category: bool = False  # edits of one group, which are told apart and balanced by category instead

    def shards(self, split: str, cache_folder: Path) -> dict[str, str]:
        """Return {shard file: name of its source} in a fixed order, for "train" or "validation".

        Raises: ValueError if a source has no shards, or shares one with another.
        """
        found: dict[str, str] = {}
        for name, source in self.sources.items():
            which = source.validation if split == "validation" and source.validation else source.data
            for shard in expand_shards(which, split, cache_folder):
                if shard in found:
                    raise ValueError(f"shard {shard} is in two sources, {found[shard]!r} and {name!r}")
                found[shard] = name
        return found

    def held_out(self, validation_data: str, train: Collection[str], cache_folder: Path) -> dict[str, str]:
        """Return the validation shards as `shards` does: of `validation_data`, or if that is "" the sources' own.

        train: the training shards; it is logged if validation has to look at them.
        """
        mixture = load_mixture(validation_data) if validation_data else self
        found = mixture.shards("validation", cache_folder)
        if not found.keys().isdisjoint(train):
            log.warning("no --validation_data: validation looks at the training samples", extra=ONCE)
        return found

    def for_task(self, task: str, shares: Mapping[str, float] | None = None) -> "Mixture":
        """Return the mixture as a run of --task visits it.

        task: t2i or edit: of all groups.  mixed: of each group what it says; of data that is no mixture file a group
        for each task that has a share.
        shares: of tasks, for that; None = DEFAULT_SHARES.
        Raises: ValueError if a group or `shares` does not go with the task.
        """
        if task not in (T2I, EDIT, MIXED):
            raise ValueError(f"--task must be {T2I}, {EDIT} or {MIXED}, got {task!r}")
        is_plain = self.groups == (Group(),)
        if shares and (task != MIXED or not is_plain):
            raise ValueError(
                "--task_shares is for --task mixed with --data that is no mixture file; in such a file each group says "
                'its share and task, as in share = 0.1, task = "reconstruction"'
            )
        if task != MIXED:
            if wrong := [group.name for group in self.groups if group.task not in (None, task)]:
                raise ValueError(f"--task {task}, but the mixture's group {wrong[0]!r} is of another; use --task mixed")
            if task == T2I:
                return self
            of_edits = tuple(replace(group, task=task) for group in self.groups)
            return replace(self, groups=of_edits, by_category=of_edits == (Group(of_edits[0].share, task=task),))
        if not is_plain:
            return self
        shares = shares or DEFAULT_SHARES
        if unknown := shares.keys() - set(TASKS):
            raise ValueError(f"--task_shares takes {', '.join(TASKS)}, got {sorted(unknown)[0]!r}")
        named = [Group(((0, shares[task]),), task=task) for task in TASKS if shares.get(task)]
        if not named:
            raise ValueError("--task_shares: all shares are zero; give one task more")
        return replace(self, groups=tuple(named))

    def balanced(self) -> "Mixture":
        """Return the mixture if its edits are balanced by category.  Raises: ValueError if it has groups instead."""
        if not self.by_category:
            raise ValueError(
                "train_edit_ddp.py balances edits by category (--shares), not by a mixture's groups; give it one group "
                "without source, language and category, or use train_mmdit.py --task edit"
            )
        return self

    def check_reweight(self, strength: float, eval_every: int) -> None:
        """Raise ValueError if --reweight has nothing to work with."""
        if not 0 <= strength < math.inf:
            raise ValueError(f"--reweight must be a number from 0 on, got {strength}")
        if strength and not (self.group_names and eval_every):
            raise ValueError("--reweight needs a mixture of several groups as --data, and --eval_every above 0")

    def group_of(self, source: str | None, language: str, category: str, task: str) -> int | None:
        """Return the number of the group that takes a visit, or None."""
        taking = (n for n, group in enumerate(self.groups) if group.takes(source, language, category, task))
        return next(taking, None)

    def group_of_record(
        self, record: SampleRecord, language: str, task: str | None, sources: Sequence[str]
    ) -> int | None:
        """Return the number of the group that a record of an index belongs to in a language, or None.

        task: what it is visited for; None = what it is a sample of.
        sources: of each shard the name of its source; one that is not this mixture's fits all groups.
        """
        if self.by_category:
            return OF_ITS_CATEGORY
        source, task = sources[record.shard], task or own_task(record.references is not None)
        return self.group_of(source if source in self.sources else None, language, record.group, task)

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        """Return the groups' names, or nothing if there is but one."""
        return tuple(group.name for group in self.groups) if len(self.groups) > 1 else ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return by what losses are told apart: the groups, or the categories."""
        return CATEGORIES if self.by_category else self.group_names


def load_mixture(data: str, task: str | None = None, task_shares: Sequence[str] = ()) -> Mixture:
    """Return the mixture that a .toml or .json file describes; of any other data, all samples in one group.

    task, task_shares: as --task and --task_shares say, see `Mixture.for_task`; None = as the file says.
    Raises: ValueError that names the file, the field, what it holds and what it should hold.
    """
    shares = parse_shares(task_shares, "--task_shares", "edit=4")
    if Path(data).suffix not in MIXTURE_SUFFIXES:
        plain = Mixture({"": Source(data)}, (Group(),))
        return plain.for_task(task, shares) if task else plain
    try:
        text = Path(data).read_text(encoding="utf-8-sig")
        content = json.loads(text) if data.endswith(".json") else tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"the mixture {data} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the mixture {data} is no {Path(data).suffix[1:].upper()}: {error}") from error
    try:
        mixture = _mixture(content)
        return mixture.for_task(task, shares) if task else mixture
    except ValueError as error:
        raise ValueError(f"mixture {data}: {error}") from error


def _mixture(content: object) -> Mixture:
    _check_fields("it", content, {"sources", "groups"}, {"sources", "groups"})
    sources, groups = content["sources"], content["groups"]
    if not isinstance(sources, dict) or not sources or "" in sources:
        raise ValueError(f"sources must be a table of named sources, got {_brief(sources)}")
    if not isinstance(groups, list) or not 1 <= len(groups) <= MAX_GROUPS:
        raise ValueError(f"groups must be a list of 1 to {MAX_GROUPS} tables, got {_brief(groups)}")
    named = {name: _source(f"sources.{name}", source) for name, source in sources.items()}
    mixture = Mixture(named, tuple(_group(f"groups[{n}]", group, named) for n, group in enumerate(groups)))
    names = [group.name for group in mixture.groups]
    for n, name in enumerate(names):
        if name in names[:n]:
            raise ValueError(f"groups[{n}] and groups[{names.index(name)}] are both {name or 'all samples'!r}")
    return mixture


def _source(where: str, value: object) -> Source:
    if isinstance(value, str):
        value = {"data": value}
    _check_fields(where, value, {f.name for f in fields(Source)}, {"data"})
    for name, text in value.items():
        if not isinstance(text, str) or not text or Path(text).suffix in MIXTURE_SUFFIXES:
            raise ValueError(f"{where}.{name} must be a built-in set, a folder or a glob of .tar files, got {text!r}")
    return Source(**value)


def _group(where: str, value: object, sources: dict[str, Source]) -> Group:
    _check_fields(where, value, {f.name for f in fields(Group)}, {"share"})
    for name, known in (("source", tuple(sources)), ("language", LANGUAGES), ("task", TASKS)):
        if name in value and value[name] not in known:
            raise ValueError(f"{where}.{name} must be one of {', '.join(known)}, got {value[name]!r}")
    if not isinstance(value.get("category", ""), str):
        raise ValueError(f"{where}.category must be a text, got {value['category']!r}")
    return Group(**value | {"share": _points(f"{where}.share", value["share"])})


def _points(where: str, value: object) -> Points:
    points = value if isinstance(value, list) else [[0, value]]
    for point in points:
        if not (isinstance(point, list) and len(point) == 2 and _is_step(point[0]) and _is_share(point[1])):
            raise ValueError(f"{where} must be a number from 0 on, or a list of [step, number], got {_brief(value)}")
    steps = [step for step, _ in points]
    if not steps or sorted(set(steps)) != steps:
        raise ValueError(f"{where}: its steps must rise, got {_brief(steps)}")
    return tuple((step, float(share)) for step, share in points)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _check_fields(where: str, value: object, known: set[str], needed: set[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table with {', '.join(sorted(known))}, got {_brief(value)}")
    if unknown := value.keys() - known:
        raise ValueError(f"{where} has no field {sorted(unknown)[0]!r}; there are {', '.join(sorted(known))}")
    if missing := needed - value.keys():
        raise ValueError(f"{where} needs {sorted(missing)[0]!r}")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
