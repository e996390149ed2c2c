"""The global order of a mixture: its groups interleaved by their shares, each running through its own samples."""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from data.index import Index
from data.index_part import Kind
from data.interleave import Interleaver
from data.mixture import Mixture
from data.order import DEFAULT_SHUFFLE_SHARDS, GlobalOrder, SampleRef
from data.tasks import EDIT, RECONSTRUCTION, own_task
from utils.console import ONCE

log = logging.getLogger("train")
_FACTOR_STEPS = 64  # factors are multiples of one part of so many: rounding errors of a loss do not change them
_MAX_FACTOR = 2.0


class MixtureOrder:
    """An endless sequence of global batches in which every group has its share, exact at every sample.

    Each group runs through its own windowed order, at its own pace: all its samples once, then all again.  A sample
    with captions in two languages can be in two groups, and is then visited by each.
    sources: the name of each shard's source.
    Raises: ValueError if a group has no sample.
    """

    def __init__(
        self,
        index: Index,
        mixture: Mixture,
        sources: Sequence[str],
        global_batch_size: int,
        seed: int,
        shuffle_shards: int = DEFAULT_SHUFFLE_SHARDS,
    ):
        self.index, self.mixture, self.global_batch_size = index, mixture, global_batch_size
        self._interleaver = Interleaver([group.share for group in mixture.groups], global_batch_size)
        self._owned = {source: _owned_kinds(index, mixture, source) for source in dict.fromkeys(sources)}
        self._streams = [_Stream(index, [self._owned[s][n] for s in sources]) for n in range(len(mixture.groups))]
        for group, stream in zip(mixture.groups, self._streams, strict=True):
            if (len(mixture.groups) > 1 or group.task) and not stream.sizes.sum():
                raise ValueError(
                    f"the mixture's group {group.name!r} has no sample; there are (category, languages, is an edit) "
                    f"{[tuple(kind) for kind in index.summary.kinds[:20]]}"
                    + ("; --data emoji-edits has edits, tools.prepare makes own ones" if group.task == EDIT else "")
                )
            if group.task == RECONSTRUCTION and index.summary.encoded_by:
                raise ValueError("reconstruction needs pictures, and the shards hold encoded ones; give the raw shards")
        self._orders = [
            GlobalOrder(stream.sizes, global_batch_size, seed, shuffle_shards, f"order {n}" if n else "order")
            for n, stream in enumerate(self._streams)
        ]
        self._sources = list(sources)
        self._warn_of_unused()

    @property
    def reconstructs(self) -> bool:
        """Whether a visit can be a reconstruction."""
        return any(group.task == RECONSTRUCTION for group in self.mixture.groups)

    def batch(self, step: int) -> list[SampleRef]:
        """Return the samples of optimizer step `step`, in order."""
        groups = self._interleaver.step(step)
        before = self._interleaver.counts(step)
        visits = {group: iter(self._visits(group, before[group], count)) for group, count in Counter(groups).items()}
        return [next(visits[group]) for group in groups]

    def counts(self, step: int) -> dict[str, int]:
        """Return how many samples of each group were visited before a step; nothing if there is but one group."""
        return dict(zip(self.mixture.group_names, self._interleaver.counts(step), strict=False))

    def reweight(self, step: int, metrics: dict[str, float], strength: float) -> None:
        """From a step on, multiply each group's share by (loss / mean loss) ** strength, at most 2 and at least 1/2.

        metrics: val_loss_<group>; a group without one keeps its share and is named in the log.
        """
        names = self.mixture.group_names
        losses = {name: metrics[f"val_loss_{name}"] for name in names if f"val_loss_{name}" in metrics}
        known = list(losses.values())
        factors = []
        for name in names:
            factor = (losses[name] * len(known) / sum(known)) ** strength if name in losses else 1.0
            factors.append(round(min(_MAX_FACTOR, max(1 / _MAX_FACTOR, factor)) * _FACTOR_STEPS) / _FACTOR_STEPS)
        self._interleaver.reweight(step, factors)
        shares = zip(names, self._interleaver.shares(step), strict=True)
        log.info("step %d  shares %s", step, ", ".join(f"{name} {share:.3f}" for name, share in shares))
        if unknown := [name for name in names if name not in losses]:
            log.warning("no validation sample of %s: --reweight leaves their shares", ", ".join(unknown), extra=ONCE)

    def state(self, step: int) -> dict:
        """Return what continues the order at a step, under 4 KiB; nothing if it depends on the step alone."""
        if len(self.mixture.groups) == 1:
            return {}
        return {"mixture": self._digest()} | self._interleaver.state(step)

    def load_state(self, state: dict) -> None:
        """Continue where `state` was taken.  Raises: ValueError if that was another mixture."""
        if state.get("mixture") != self.state(0).get("mixture"):
            raise ValueError("the mixture's groups or shares are not those the run was started with")
        if state:
            self._interleaver.load_state(state)

    def _digest(self) -> str:
        tasks = [group.task for group in self.mixture.groups]
        told_apart = repr((self.mixture.groups, self._sources)) + (repr(tasks) if any(tasks) else "")
        return hashlib.sha256(told_apart.encode()).hexdigest()[:16]

    def _visits(self, group: int, first: int, count: int) -> list[SampleRef]:
        refs, reconstructs = [], self.mixture.groups[group].task == RECONSTRUCTION
        for ref in self._orders[group].visits(np.arange(first, first + count)):
            shard, i = self._streams[group].find(ref.index)
            if len(self._streams) == 1:
                refs.append(SampleRef(ref.epoch, i, reconstructs=reconstructs))
                continue
            record = self.index[i]
            languages = self._owned[self._sources[shard]][group][record.kind]
            # A pass of each group has a number of its own, since the same sample may be in several groups.
            refs.append(SampleRef(ref.epoch * len(self._streams) + group, i, group, languages, reconstructs))
        return refs

    def _warn_of_unused(self) -> None:
        taken = np.zeros(len(self.index.shards), np.int64)
        for source, owned in self._owned.items():
            kinds = frozenset(kind for group in owned for kind in group)
            taken += np.where(np.array(self._sources) == source, self.index.summary.count(kinds), 0)
        if unused := len(self.index) - int(taken.sum()):
            log.warning("%d of %d samples belong to no group of the mixture: never visited",
                        unused, len(self.index), extra=ONCE)  # fmt: skip


def _owned_kinds(index: Index, mixture: Mixture, source: str) -> list[dict[Kind, tuple[str, ...]]]:
    """Return for each group the kinds of sample it takes from a source, with the languages in which it visits them."""
    owned = [defaultdict(tuple) for _ in mixture.groups]
    for kind in index.summary.kinds:
        for task in (own_task(kind.is_edit), RECONSTRUCTION):
            for language in kind.languages:
                if (group := mixture.group_of(source, language, kind.category, task)) is not None:
                    owned[group][kind] += (language,)
    return [dict(kinds) for kinds in owned]


class _Stream:
    """The samples of one group, numbered through the shards.

    owned: of each shard, the kinds of sample that belong to the group.
    """

    def __init__(self, index: Index, owned: Sequence[dict[Kind, tuple[str, ...]]]):
        self._index = index
        distinct = {id(kinds): kinds for kinds in owned}
        counts = {key: index.summary.count(kinds) for key, kinds in distinct.items()}
        frozen = {key: frozenset(kinds) for key, kinds in distinct.items()}
        self.sizes = np.array([counts[id(kinds)][shard] for shard, kinds in enumerate(owned)], np.int64)
        self._kinds = [frozen[id(kinds)] for kinds in owned]
        self._starts = np.cumsum(self.sizes) - self.sizes
        self._whole = self.sizes == index.shard_sizes

    def find(self, number: int) -> tuple[int, int]:
        """Return the shard and the index of the group's sample `number`."""
        shard = int(self._starts.searchsorted(number, side="right")) - 1
        place = number - int(self._starts[shard])
        if self._whole[shard]:
            return shard, self._index.first(shard) + place
        return shard, self._index.of_kinds(shard, self._kinds[shard], place)
