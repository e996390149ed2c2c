"""Target shares of groups over the steps of a run, and what they add up to, in closed form."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

Points = Sequence[tuple[int, float]]  # (step, share), steps rising


class Shares:
    """Shares of k groups, straight lines between points; before the first and after the last point they stay.

    groups: each group's points, on any scale: at every step where a group has a point, the shares are divided by their
    sum, and between these steps the results are straight lines.  A step has `batch` samples, all with its shares.
    offsets: (k,) added to the totals.
    Raises: ValueError if at such a step all shares are zero.
    """

    def __init__(self, groups: Sequence[Points], batch: int, offsets: Sequence[float] = ()):
        steps = sorted({0, *(step for points in groups for step, _ in points)})
        at_steps = [[_between(points, step) for points in groups] for step in steps]
        for step, shares in zip(steps, at_steps, strict=True):
            if not sum(shares) > 0:
                raise ValueError(f"all groups have a share of zero at step {step}")
        normal = [[share / sum(shares) for share in shares] for shares in at_steps]
        offsets = offsets or [0.0] * len(groups)
        self._ramps = [
            _Ramp(steps, [shares[group] for shares in normal], batch, offsets[group]) for group in range(len(groups))
        ]

    def at(self, step: int) -> list[float]:
        """Return the shares at a step, (k,), of sum 1."""
        return [ramp.share(step) for ramp in self._ramps]

    def totals(self, num_samples: int) -> list[float]:
        """Return how many of the run's first `num_samples` samples belong to each group, (k,)."""
        return [ramp.total(num_samples) for ramp in self._ramps]

    def reach(self, group: int, total: float) -> float:
        """Return the smallest number of samples at which a group's total is `total` or more; infinity if never."""
        return self._ramps[group].reach(total)


class _Ramp:
    """One group's share: pieces from `_steps[j]` on, of value `_values[j]` there and `_slopes[j]` a step."""

    def __init__(self, steps: list[int], values: list[float], batch: int, offset: float):
        self._steps, self._values, self._batch = steps, values, batch
        pairs = zip(zip(steps, values, strict=True), zip(steps[1:], values[1:], strict=True), strict=False)
        self._slopes = [(value - before) / (step - last) for (last, before), (step, value) in pairs] + [0.0]
        self._totals = [offset]  # at the start of each piece
        for j in range(len(steps) - 1):
            self._totals.append(self._totals[j] + batch * self._sum(j, steps[j + 1] - steps[j]))

    def _sum(self, piece: int, num_steps: int) -> float:
        return num_steps * self._values[piece] + self._slopes[piece] * num_steps * (num_steps - 1) / 2

    def share(self, step: int) -> float:
        j = bisect_right(self._steps, step) - 1
        return self._values[j] + self._slopes[j] * (step - self._steps[j])

    def total(self, num_samples: int) -> float:
        step, rest = divmod(num_samples, self._batch)
        j = bisect_right(self._steps, step) - 1
        num_steps = step - self._steps[j]
        share = self._values[j] + self._slopes[j] * num_steps
        return self._totals[j] + self._batch * self._sum(j, num_steps) + rest * share

    def reach(self, total: float) -> float:
        j = max(0, bisect_left(self._totals, total) - 1)
        if j == len(self._steps) - 1 and not self._values[j]:
            return math.inf if total > self._totals[j] else 0
        # An estimate from the continuous curve, c = b m + slope m² / 2 with m in steps, then the exact place.
        c, slope = (total - self._totals[j]) / self._batch, self._slopes[j]
        b = self._values[j] - slope / 2
        root = math.sqrt(max(0.0, b * b + 2 * slope * c))
        num_steps = 2 * c / (b + root) if b + root > 0 else 0.0
        if j < len(self._steps) - 1:
            num_steps = min(num_steps, self._steps[j + 1] - self._steps[j])
        n = max(0, round((self._steps[j] + num_steps) * self._batch))
        return _first(lambda i: self.total(i) >= total, n)


def _first(reached, guess: int) -> int:
    """Return the smallest n >= 0 from which on `reached` holds, looking near the guess first."""
    width = 1
    if reached(guess):
        low, high = guess - 1, guess
        while low >= 0 and reached(low):
            low, high, width = low - 2 * width, low, 2 * width
    else:
        low, high = guess, guess + 1
        while not reached(high):
            low, high, width = high, high + 2 * width, 2 * width
    low = max(low, -1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _between(points: Points, step: int) -> float:
    """Return the straight line through the points at a step."""
    j = bisect_right(points, step, key=lambda point: point[0])
    if j == 0 or j == len(points):
        return points[min(j, len(points) - 1)][1] if j == 0 else points[-1][1]
    (first, before), (second, after) = points[j - 1], points[j]
    return before + (after - before) * (step - first) / (second - first)
