"""Categories in given shares: a sampler for torch's DataLoader, and a global order for `data.plan.BatchPlan`."""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from data.epoch_quotas import EpochQuotas, whole_weights
from data.index import Index
from data.index_part import Kind
from data.interleave import Interleaver
from data.order import OF_ITS_CATEGORY, SampleRef
from data.permutation import permutation_keys, permute
from utils.console import ONCE

log = logging.getLogger("train")


class CategoryBalancedSampler(DistributedSampler):
    """An endless sequence of epochs in which every category has its share, whatever its number of samples.

    An epoch is as many global batches as the samples of all categories with a share fill, at least one.  With E samples
    in it, k categories with a share, and s the share of one of them:

    - it has s·E samples in every epoch, rounded down or up (`data.epoch_quotas`);
    - in the first m samples of an epoch it has m/E of those, to less than one (`data.interleave`); so in any m samples
      in a row s·m, to less than three within one epoch, and to less than six across two;
    - its samples stand in a circle, shuffled once, and each epoch goes on where the last one ended.  So in no epoch,
      and in no number of epochs from the first on, is one of them visited more often than another but once: small
      categories repeat evenly, large ones lose nothing for ever.  The part of the circle that an epoch visits is
      shuffled anew every time; it lies all over the category's shards.

    The order is a pure function of (categories, shares, seed, global_batch_size).  On W ranks, rank r has places r,
    r + W, … of each global batch.  Nothing is padded or repeated to come out even.

    As a sampler: `iter` gives this rank's samples of the epoch set by `set_epoch`, and `state_dict` resumes anywhere in
    it on any number of ranks.  As the order of a BatchPlan, which deals batches itself: `batch`, `state`, `load_state`.
    """

    reconstructs = False  # as an order: whether a visit can be a reconstruction

    def __init__(
        self,
        categories: Sequence[str] | Index,
        shares: Mapping[str, float] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        global_batch_size: int | None = None,
        edits_only: bool = False,
    ):
        """Balance categories.

        categories: of each sample, or an index, where it is the record's group.
        shares: of each category, on any scale; one that is not named has none.  None = all alike.
        num_replicas, rank: None = those of torch.distributed, or one alone where it is not used.
        global_batch_size: samples a step over all ranks; None = one a rank.
        edits_only: of an index; what is no edit is then left out, and its number logged.
        Raises: ValueError for a share of no known category, one that is no number from 0 on, none above 0, no sample,
        no edit, or a global_batch_size below 1.
        """
        distributed = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if distributed else 1
        if rank is None:
            rank = dist.get_rank() if distributed else 0
        super().__init__(categories, num_replicas, rank, seed=seed)
        self.global_batch_size = num_replicas if global_batch_size is None else global_batch_size
        if self.global_batch_size < 1:
            raise ValueError(f"--global_batch_size must be at least 1, got {self.global_batch_size}")
        members = _by_category(categories, edits_only)
        if edits_only and len(categories):
            _check_edits(len(categories), sum(map(len, members.values())))
        self.shares = _checked(shares, members)
        self._members = [members[name] for name in self.shares]
        weights = whole_weights(self.shares)
        taken = sum(len(some) for some in self._members)
        if unused := sum(map(len, members.values())) - taken:
            without = ", ".join(repr(name) for name in members if name not in self.shares)
            log.warning("%d of %d samples are of categories without a share (%s): never visited",
                        unused, sum(map(len, members.values())), without, extra=ONCE)  # fmt: skip
        self.steps_per_epoch = max(1, taken // self.global_batch_size)
        self.total_size = self.steps_per_epoch * self.global_batch_size  # samples an epoch, over all ranks
        self.num_samples = self.total_size // num_replicas
        self._quotas = EpochQuotas(weights, self.total_size)
        self._circles = [permutation_keys(seed, 0, 0, f"circle of {name}") for name in self.shares]
        self._dealer = lru_cache(4)(self._new_dealer)
        self._resumed: tuple[int, int, list[int]] | None = None  # an epoch, a step in it, samples dealt in it before
        self._position = self._start = 0  # samples of the epoch, over all ranks

    # ---- The order of a BatchPlan -----------------------------------------------------------------------------------
    def batch(self, step: int) -> list[SampleRef]:
        """Return the samples of global batch `step`, counted through all epochs, in order."""
        epoch, here, dealer = self._at(step)
        categories, dealt = np.array(dealer.step(here)), dealer.counts(here)
        quotas, before = self._quotas.quotas(epoch), self._quotas.before(epoch)
        refs: list[SampleRef | None] = [None] * len(categories)
        for c in np.unique(categories).tolist():
            places = np.flatnonzero(categories == c)
            visits = dealt[c] + np.arange(len(places))
            for place, ref in zip(places.tolist(), self._visit(epoch, c, visits, before[c], quotas[c]), strict=True):
                refs[place] = ref
        return refs

    def counts(self, step: int) -> dict[str, int]:
        """Return how many samples of each category were visited before a step."""
        epoch, here, dealer = self._at(step)
        pairs = zip(self._quotas.before(epoch), dealer.counts(here), strict=True)
        return dict(zip(self.shares, map(sum, pairs), strict=True))

    def state(self, step: int) -> dict:
        """Return what continues the order at a step: of each category two whole numbers."""
        epoch, here, dealer = self._at(step)
        owed, dealt = self._quotas.owed(epoch), dealer.counts(here)
        return {"balance": self._digest(), "step": step, "owed": owed, "dealt": dealt}

    def load_state(self, state: dict) -> None:
        """Continue where `state` was taken, on any number of ranks.  Raises: ValueError if that was another balance."""
        if state.get("balance") != self._digest():
            raise ValueError(
                "the run was started with other shares, categories, seed or global_batch_size than "
                f"{self.shares}, {self.seed} and {self.global_batch_size}; give those again or start a new run"
            )
        epoch, here = divmod(state["step"], self.steps_per_epoch)
        self._quotas.load(epoch, state["owed"])
        self._resumed = (epoch, here, list(state["dealt"]))
        self._dealer.cache_clear()

    # ---- A sampler --------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Return how many samples an epoch has on each rank."""
        self._check_ranks()
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of the epoch; once from where a state was loaded, then from the first."""
        self._check_ranks()
        self._position, self._start = self._start, 0
        return self._places(self.epoch, self._position)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the one in which a state was loaded goes on there."""
        if epoch != self.epoch:
            self._position = self._start = 0
        self.epoch = epoch

    def state_dict(self, position: int | None = None) -> dict:
        """Return what resumes this epoch.

        position: how many samples of the epoch have been used, over all ranks.  None = as many as this sampler has
        given out, each rank alike.  A DataLoader with workers draws ahead of what it hands over: give it the number.
        """
        position = self._position if position is None else position
        if not 0 <= position <= self.total_size:
            raise ValueError(f"an epoch has {self.total_size} samples; position {position} is not in it")
        step = self.epoch * self.steps_per_epoch + position // self.global_batch_size
        return self.state(step) | {"epoch": self.epoch, "position": position}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state_dict` was taken, on any number of ranks.

        Raises: ValueError if that was another balance, or amid a round in which each of these ranks has one sample.
        """
        if state["position"] % self.num_replicas:
            raise ValueError(
                f"after {state['position']} samples of the epoch, {self.num_replicas} ranks have not had equally many; "
                "save between global batches to resume on another number of ranks"
            )
        self.load_state(state)
        self.epoch, self._position, self._start = state["epoch"], state["position"], state["position"]

    def _places(self, epoch: int, position: int) -> Iterator[int]:
        while position < self.total_size:
            step, first = divmod(position, self.global_batch_size)
            refs = self.batch(epoch * self.steps_per_epoch + step)
            for ref in refs[first + self.rank :: self.num_replicas]:
                position += self.num_replicas
                self._position = position
                yield ref.index

    def _check_ranks(self) -> None:
        if self.global_batch_size % self.num_replicas:
            raise ValueError(
                f"a global_batch_size of {self.global_batch_size} does not divide evenly among {self.num_replicas} "
                "ranks; as a sampler, which gives every rank equally many, it must be a multiple of them"
            )

    # ---- Both -------------------------------------------------------------------------------------------------------
    def _at(self, step: int) -> tuple[int, int, Interleaver]:
        """Return a step's epoch, its place there, and what deals that epoch."""
        epoch, here = divmod(step, self.steps_per_epoch)
        return epoch, here, self._dealer(epoch, self._resumed is not None and self._resumed[:2] <= (epoch, here))

    def _new_dealer(self, epoch: int, resumed: bool) -> Interleaver:
        """Return what deals an epoch's places to categories; `resumed`: it may begin where a state was loaded."""
        quotas = self._quotas.quotas(epoch)
        dealer = Interleaver([[(0, float(quota))] for quota in quotas], self.global_batch_size)
        if resumed and self._resumed[0] == epoch:
            _, here, dealt = self._resumed
            same = {"factors": [1.0] * len(quotas), "offsets": [0.0] * len(quotas)}
            dealer.load_state({"step": here, "counts": dealt} | same)
        return dealer

    def _visit(self, epoch: int, c: int, visits: np.ndarray, before: int, quota: int) -> Iterator[SampleRef]:
        """Yield the samples of a category's visits, numbered (n,) through an epoch in which it has `quota`.

        The part of the circle that an epoch goes through is cut into whole rounds and a rest, each shuffled in itself.
        """
        size, name = len(self._members[c]), list(self.shares)[c]
        rounds = visits // size
        for number in np.unique(rounds).tolist():
            inside = (visits[rounds == number] - number * size).astype(np.uint64)
            keys = np.array(permutation_keys(self.seed, epoch, number, f"order of {name}"), np.uint64)
            shuffled = permute(inside, min(size, quota - number * size), keys[:, None]).astype(np.int64)
            passes, places = np.divmod(before + number * size + shuffled, size)
            members = permute(places.astype(np.uint64), size, np.array(self._circles[c], np.uint64)[:, None])
            for which, member in zip(passes.tolist(), members.tolist(), strict=True):
                yield SampleRef(which, self._members[c].find(member), OF_ITS_CATEGORY)

    def _digest(self) -> str:
        sizes = [len(some) for some in self._members]
        told_apart = (whole_weights(self.shares), list(self.shares), sizes, self.seed, self.global_batch_size)
        return hashlib.sha256(repr(told_apart).encode()).hexdigest()[:16]


class _Members:
    """The samples of one category, from a list of them."""

    def __init__(self, indices: np.ndarray):
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def find(self, number: int) -> int:
        """Return the index of the category's sample `number`."""
        return int(self._indices[number])


class _IndexMembers:
    """The samples of one category of an index, counted through its shards; no list of them is made."""

    def __init__(self, index: Index, kinds: frozenset[Kind]):
        self._index, self._kinds = index, kinds
        self._ends = np.cumsum(index.summary.count(self._kinds))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def find(self, number: int) -> int:
        """Return the index of the category's sample `number`."""
        shard = int(self._ends.searchsorted(number, side="right"))
        place = number - int(self._ends[shard - 1] if shard else 0)
        return self._index.of_kinds(shard, self._kinds, place)


def _by_category(categories: Sequence[str] | Index, edits_only: bool) -> dict[str, _Members | _IndexMembers]:
    """Return the samples of each category, names sorted."""
    if isinstance(categories, Index):
        kinds = [kind for kind in categories.summary.kinds if kind.is_edit or not edits_only]
        names = sorted({kind.category for kind in kinds})
        return {
            name: _IndexMembers(categories, frozenset(kind for kind in kinds if kind.category == name))
            for name in names
        }
    numbers: dict[str, list[int]] = {}
    for i, name in enumerate(categories):
        numbers.setdefault(name, []).append(i)
    return {name: _Members(np.array(numbers[name], np.int64)) for name in sorted(numbers)}


def _check_edits(num_samples: int, num_edits: int) -> None:
    """Say how many samples are no edits.  Raises: ValueError if none is."""
    others = f'{num_samples - num_edits} of {num_samples} samples are no edits: their .json has no "references"'
    if not num_edits:
        raise ValueError(
            f"{others}; give --data emoji-edits, or shards of edits (tools.prepare makes them), [] where there is no "
            "reference"
        )
    if num_edits < num_samples:
        log.warning("%s; never visited", others)


def _checked(shares: Mapping[str, float] | None, known: Mapping[str, object]) -> dict[str, float]:
    """Return the shares above 0, in the order of the known categories."""
    if not known:
        raise ValueError("the data set holds no usable sample; see the rejects in the log")
    if shares is None:
        return dict.fromkeys(known, 1.0)
    if unknown := [name for name in shares if name not in known]:
        raise ValueError(f"shares name {unknown}, of which there is no sample; the categories are {list(known)}")
    for name, share in shares.items():
        if not 0 <= share < math.inf:
            raise ValueError(f"the share of {name!r} must be a number from 0 on, got {share!r}")
    if not any(shares.values()):
        raise ValueError(f"all shares are zero; give one of {list(known)} more")
    return {name: float(shares[name]) for name in known if shares.get(name)}
