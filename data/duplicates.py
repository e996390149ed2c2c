"""Which pictures of a collection repeat an earlier one: an exact answer, whoever computes it.

In the order of the collection, a picture is kept unless an earlier kept one is within the distance.  So of a chain of
pictures, each like the one before, those go that are like one that stays.
"""

from itertools import combinations

import numpy as np

from data.picture_hash import NUM_BITS, hash_distance


def find_duplicates(hashes: np.ndarray, max_distance: int) -> np.ndarray:
    """Return for each picture the number of the first kept one that it repeats, or -1 if it is kept.

    hashes: (N, 3) uint64.  Returns (N,) int64.  Two hashes within d bits agree in at least two of d + 2 blocks of bits,
    so only those are compared that share two blocks.  About (d + 2)²/2 sorts; pairs to compare by chance grow with N²
    over 2^(384 / (d + 2)): few up to 10^9 pictures for d = 6.  Pictures that are nearly plain share many blocks.
    """
    if not len(hashes):
        return np.zeros(0, np.int64)
    # Whatever holds for a hash holds for all pictures that have it: only the first of each is compared.
    _, first, of_hash = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    order, firsts = np.sort(first), first[of_hash.reshape(-1)]
    earlier, later = (order[side] for side in _pairs_within(hashes[order], max_distance))
    repeated = np.full(len(hashes), -1)
    by_later = np.lexsort((earlier, later))
    for a, b in zip(earlier[by_later].tolist(), later[by_later].tolist(), strict=True):
        if repeated[b] < 0 and repeated[a] < 0:
            repeated[b] = a
    repeated = repeated[firsts]
    return np.where(repeated >= 0, repeated, np.where(firsts < np.arange(len(hashes)), firsts, -1))


def find_copies(digests: np.ndarray) -> np.ndarray:
    """Return for each file the number of the first with the same digest, or -1 for that one: (N, K) uint64 → (N,)."""
    if not len(digests):
        return np.zeros(0, np.int64)
    _, first, of_digest = np.unique(digests, axis=0, return_index=True, return_inverse=True)
    firsts = first[of_digest.reshape(-1)]
    return np.where(firsts < np.arange(len(digests)), firsts, -1)


def _pairs_within(hashes: np.ndarray, max_distance: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs i < j of hashes at most `max_distance` apart as two arrays; a pair may come several times."""
    found: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    if max_distance > 0:  # the hashes all differ
        blocks = _blocks(hashes, max_distance + 2)
        for a, b in combinations(blocks, 2):
            found += _pairs_sharing(hashes, a, b, max_distance)
    earlier, later = (np.concatenate(side) for side in zip(*found, strict=True))
    return np.minimum(earlier, later), np.maximum(earlier, later)


def _blocks(hashes: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the hashes' bits in `count` blocks of at most 64 bits, each (N,) uint64."""
    bits = np.unpackbits(hashes.view(np.uint8).reshape(len(hashes), -1), axis=1)  # (N, 192)
    blocks = []
    for columns in np.array_split(np.arange(NUM_BITS), count):
        wide = np.zeros((len(hashes), 64), np.uint8)
        wide[:, : len(columns)] = bits[:, columns]
        blocks.append(np.packbits(wide, axis=1).view(np.uint64)[:, 0])
    return blocks


def _pairs_sharing(hashes: np.ndarray, a: np.ndarray, b: np.ndarray, max_distance: int):
    """Yield arrays of pairs within the distance among the hashes that agree in the blocks `a` and `b`."""
    order = np.lexsort((b, a))
    a, b = a[order], b[order]
    starts = np.concatenate([[True], (a[1:] != a[:-1]) | (b[1:] != b[:-1])])
    group = np.cumsum(starts)
    at, step = np.arange(len(order)), 0
    while True:  # neighbours in a group, then those two apart, and so on
        step += 1
        at = at[at + step < len(order)]
        at = at[group[at] == group[at + step]]
        if not len(at):
            return
        left, right = order[at], order[at + step]
        near = hash_distance(hashes[left], hashes[right]) <= max_distance
        yield left[near], right[near]
