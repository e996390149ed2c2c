"""How many samples of each category an epoch has: whole numbers that keep to shares, epoch by epoch and for ever."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

_KEPT_EPOCHS = 64  # of which is remembered what was owed


def whole_weights(shares: Mapping[str, float]) -> list[int]:
    """Return whole numbers in the ratio of the shares, taken as the decimal numbers they are written as."""
    exact = [Fraction(str(float(share))) for share in shares.values()]
    scale = math.lcm(*(share.denominator for share in exact))
    weights = [int(share * scale) for share in exact]
    return [weight // math.gcd(*weights) for weight in weights]


class EpochQuotas:
    """Quotas of k categories in epochs of `length` samples.

    A quota is its share of an epoch, rounded down or up.  Who is rounded up is who is owed most so far, so what
    rounding takes from a category in one epoch it gets back in another: none starves, however small its share.  All in
    whole numbers: what is owed is counted in parts of a sample, as many to a sample as the weights' sum.
    """

    def __init__(self, weights: Sequence[int], length: int):
        self._weights, self._length, self._sum = list(weights), length, sum(weights)
        self._owed = {0: [0] * len(weights)}  # at the start of each epoch

    def owed(self, epoch: int) -> list[int]:
        """Return what each category is owed from before an epoch, (k,), in parts; below 0 if it had more than due."""
        known = max((e for e in self._owed if e <= epoch), default=None)
        if known is None:  # before the one that was loaded
            known, self._owed[0] = 0, [0] * len(self._weights)
        for now in range(known, epoch):
            owed = self._owed[now]
            due = [before + weight * self._length for before, weight in zip(owed, self._weights, strict=True)]
            self._owed[now + 1] = [d - n * self._sum for d, n in zip(due, self._round(owed), strict=True)]
            if now - _KEPT_EPOCHS > 0:
                self._owed.pop(now - _KEPT_EPOCHS, None)
        return list(self._owed[epoch])

    def quotas(self, epoch: int) -> list[int]:
        """Return how many samples each category has in an epoch, (k,)."""
        return self._round(self.owed(epoch))

    def before(self, epoch: int) -> list[int]:
        """Return how many samples each category has in all epochs before, (k,)."""
        owed = self.owed(epoch)
        return [(w * epoch * self._length - o) // self._sum for w, o in zip(self._weights, owed, strict=True)]

    def load(self, epoch: int, owed: Sequence[int]) -> None:
        """Continue at an epoch with what was owed then."""
        self._owed = {epoch: list(owed)}

    def _round(self, owed: Sequence[int]) -> list[int]:
        down, rest = zip(*(divmod(weight * self._length, self._sum) for weight in self._weights), strict=True)
        seats = self._length - sum(down)
        waiting = sorted((-owed[c] - rest[c], c) for c in range(len(rest)) if rest[c])
        up = {c for _, c in waiting[:seats]}
        return [n + (c in up) for c, n in enumerate(down)]
