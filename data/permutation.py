"""A permutation of any number of places, computed where it is asked for: no table, the same cost anywhere."""

import numpy as np

from utils.random_streams import stream_seed

_ROUNDS = 6
_MIN_HALF_BITS = 3  # a network on fewer bits does not reach every order of a handful of places equally often


def permutation_keys(seed: int, epoch: int, number: int, purpose: str) -> list[int]:
    """Return the key of each round: what tells one permutation from another."""
    return [stream_seed(seed, epoch, f"{number} {r}", purpose) for r in range(_ROUNDS)]


def permute(places: np.ndarray, sizes: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """Return what stands at each of `places` (n,) of a permutation of `sizes` (n,) places; all uint64.

    keys: (rounds, n) or (rounds, 1) uint64, of `permutation_keys`.
    A Feistel network over a power of four above the size, walked until it lands inside (cycle walking).
    """
    sizes = np.broadcast_to(np.asarray(sizes, np.uint64), places.shape)
    keys = np.broadcast_to(keys, (len(keys), len(places)))
    half_bits = np.uint64(_MIN_HALF_BITS) + np.zeros(places.shape, np.uint64)
    while (short := (np.uint64(1) << (half_bits + half_bits)) < sizes).any():
        half_bits += short
    result = _feistel(places, half_bits, keys)
    while len(outside := np.flatnonzero(result >= sizes)):
        result[outside] = _feistel(result[outside], half_bits[outside], keys[:, outside])
    return result


def _feistel(values: np.ndarray, half_bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half_bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words; overflow wraps.  Source: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
