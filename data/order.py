"""The one global order of samples: a pure function of (seed, position), on any number of ranks and workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data.permutation import permutation_keys, permute

DEFAULT_SHUFFLE_SHARDS = 16


OF_ITS_CATEGORY = -2  # a group: that of the sample's category


@dataclass(frozen=True)
class SampleRef:
    """One visit of one sample."""

    epoch: int
    index: int
    group: int = 0  # of the mixture; OF_ITS_CATEGORY where categories take the groups' place
    languages: tuple[str, ...] | None = None  # of which its caption is taken; None = any
    reconstructs: bool = False  # shows the picture, to be drawn again as it is


@dataclass(frozen=True, eq=False)
class _Epoch:
    """The shards of an epoch in order, cut into windows: S shards with samples, W windows."""

    shards: np.ndarray  # (S,) int64
    ends: np.ndarray  # (S,) int64, samples up to the end of each shard
    window_ends: np.ndarray  # (W,) int64, samples up to the end of each window


class GlobalOrder:
    """An endless sequence of epochs, each a different permutation of all samples, cut into global batches.

    An epoch is a permutation of the shards, cut into windows of about `shuffle_shards` of them, and in each window a
    permutation of its samples: so what is read at a time lies in few shards, and each is read once an epoch.  Not more
    shards than that are one window, which is a permutation of all samples.  Both permutations are computed, not stored:
    any position of any epoch costs the same, and nothing grows with the number of samples.

    sizes: how many samples each shard has, or their number if they all lie in one.  A sample's index counts through the
    shards as given.  purpose: orders with different ones are independent.
    """

    reconstructs = False  # whether a visit can be a reconstruction

    def __init__(
        self,
        sizes: int | Sequence[int],
        global_batch_size: int,
        seed: int,
        shuffle_shards: int = DEFAULT_SHUFFLE_SHARDS,
        purpose: str = "order",
    ):
        self._sizes = np.atleast_1d(np.asarray(sizes, np.int64))
        self.num_samples = int(self._sizes.sum())
        if self.num_samples < 1:
            raise ValueError("the data set holds no usable sample; see the rejects in the log")
        for name, value in (("global_batch_size", global_batch_size), ("shuffle_shards", shuffle_shards)):
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        self.global_batch_size, self.seed, self.purpose = global_batch_size, seed, purpose
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._shards = np.flatnonzero(self._sizes)
        self.num_windows = -(-len(self._shards) // shuffle_shards)
        self._epoch = lru_cache(4)(self._make_epoch)

    def batch(self, step: int) -> list[SampleRef]:
        """Return the samples of optimizer step `step`, in order; a batch may span epochs."""
        return self.visits(np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size))

    def state(self, step: int) -> dict:
        """Return what continues the order at a step: nothing, it depends on the step alone."""
        return {}

    def load_state(self, state: dict) -> None:
        """Continue where `state` was taken."""

    def visits(self, positions: np.ndarray) -> list[SampleRef]:
        """Return the samples at positions (n,) of the endless sequence."""
        epochs, places = np.divmod(positions.astype(np.uint64), np.uint64(self.num_samples))
        indices = self.permute(epochs, places)
        return [SampleRef(e, i) for e, i in zip(epochs.tolist(), indices.tolist(), strict=True)]

    def permute(self, epochs: np.ndarray | int, places: np.ndarray) -> np.ndarray:
        """Return which sample stands at each of places (n,) uint64, in [0, num_samples), of epochs (n,) or of one."""
        distinct, which = np.unique(np.broadcast_to(epochs, places.shape), return_inverse=True)
        if self.num_windows == 1:
            keys = [permutation_keys(self.seed, epoch, 0, self.purpose) for epoch in distinct.tolist()]
            return permute(places, self.num_samples, np.array(keys, np.uint64)[which].T)
        result = np.empty(places.shape, np.uint64)
        for n, epoch in enumerate(distinct.tolist()):
            there = np.flatnonzero(which == n)
            result[there] = self._permute_windows(epoch, places[there].astype(np.int64))
        return result

    def _permute_windows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        layout = self._epoch(epoch)
        windows = layout.window_ends.searchsorted(places, side="right")
        starts = np.concatenate(([0], layout.window_ends))
        distinct, which = np.unique(windows, return_inverse=True)
        keys = [permutation_keys(self.seed, epoch, window, self.purpose) for window in distinct.tolist()]
        inside, sizes = places - starts[windows], np.diff(starts)[windows]
        inside = permute(inside.astype(np.uint64), sizes.astype(np.uint64), np.array(keys, np.uint64)[which].T)
        places = starts[windows] + inside.astype(np.int64)
        turns = layout.ends.searchsorted(places, side="right")
        shards = layout.shards[turns]
        return self._starts[shards] + places - (layout.ends[turns] - self._sizes[shards])

    def _make_epoch(self, epoch: int) -> _Epoch:
        count = len(self._shards)
        keys = np.array(permutation_keys(self.seed, epoch, 0, f"{self.purpose} of shards"), np.uint64)
        shards = self._shards[permute(np.arange(count, dtype=np.uint64), count, keys[:, None])]
        ends = np.cumsum(self._sizes[shards])
        last = (np.arange(1, self.num_windows + 1) * count) // self.num_windows - 1  # windows as even as can be
        return _Epoch(shards, ends, ends[last])
