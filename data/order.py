"""The one global order of samples: a pure function of (seed, position), on any number of ranks and workers."""

from dataclasses import dataclass

import numpy as np

from utils.random_streams import stream_seed

_ROUNDS = 6
_MIN_HALF_BITS = 3  # a network on fewer bits does not reach every order of a handful of samples equally often


@dataclass(frozen=True)
class SampleRef:
    """One visit of one sample."""

    epoch: int
    index: int


class GlobalOrder:
    """An endless sequence of epochs, each a different permutation of all samples, cut into global batches.

    The permutation is computed, not stored: a Feistel network over the next power of four, walked until it lands
    inside (cycle walking), so any position of any epoch costs the same and nothing grows with the data set.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int):
        if num_samples < 1:
            raise ValueError("the data set holds no usable sample; see the rejects in the log")
        if global_batch_size < 1:
            raise ValueError(f"--global_batch_size must be at least 1, got {global_batch_size}")
        self.num_samples, self.global_batch_size, self.seed = num_samples, global_batch_size, seed
        self._half_bits = max(_MIN_HALF_BITS, ((num_samples - 1).bit_length() + 1) // 2)

    def batch(self, step: int) -> list[SampleRef]:
        """Return the samples of optimizer step `step`, in order; a batch may span epochs."""
        first = step * self.global_batch_size
        positions = np.arange(first, first + self.global_batch_size, dtype=np.uint64)
        epochs, places = np.divmod(positions, np.uint64(self.num_samples))
        indices = self.permute(epochs, places)
        return [SampleRef(e, i) for e, i in zip(epochs.tolist(), indices.tolist(), strict=True)]

    def permute(self, epochs: np.ndarray | int, places: np.ndarray) -> np.ndarray:
        """Return which sample stands at each of places (n,) uint64, in [0, num_samples), of epochs (n,) or of one."""
        distinct, which = np.unique(np.broadcast_to(epochs, places.shape), return_inverse=True)
        keys = [[stream_seed(self.seed, epoch, r, "order") for epoch in distinct.tolist()] for r in range(_ROUNDS)]
        keys = np.array(keys, np.uint64)[:, which]  # (rounds, n)
        result = self._feistel(places, keys)
        while len(outside := np.flatnonzero(result >= self.num_samples)):
            result[outside] = self._feistel(result[outside], keys[:, outside])
        return result

    def _feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return (left << bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words; overflow wraps.  Source: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
