"""Which group each sample of a run belongs to: target shares met to less than one sample, at every sample."""

import heapq
from collections.abc import Sequence

from data.shares import Points, Shares

_KEPT_STEPS = 1024  # behind the last one, whose counts are remembered
_SLACK = 2.0**-20  # samples: keeps equal deadlines from depending on rounding


class Interleaver:
    """Deals the samples of a run to k groups, in an order that depends on nothing but the shares.

    After any number of samples each group's count differs from what its shares add up to by at most 1 - 1/(2k - 2)
    (two groups: 1/2), so over any run of samples by less than twice that.  No rule can promise less than the former for
    all shares.  Proof and source: R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): if
    sample m of a group may come no sooner than where its total reaches m - 1 + 1/(2k - 2), and no later than where it
    passes m - 1/(2k - 2), then all can be on time; and what can be on time is, if the earliest deadline goes first.

    `reweight` multiplies the shares by factors from a step on.  What a group is ahead or behind then, it stays to be
    given back.
    """

    def __init__(self, groups: Sequence[Points], batch: int):
        self._groups, self._batch = groups, batch
        self._margin = 1 / max(2, 2 * len(groups) - 2)
        self._shares = Shares(groups, batch)
        self._first_step = 0  # earlier steps are forgotten
        self._counts = {0: [0] * len(groups)}  # step → samples of each group before it
        self._factors, self._offsets = [1.0] * len(groups), [0.0] * len(groups)

    def counts(self, step: int) -> list[int]:
        """Return how many samples each group has before a step, (k,)."""
        if step not in self._counts:
            self._deal(step - 1)
        return list(self._counts[step])

    def step(self, step: int) -> list[int]:
        """Return the group of each sample of a step."""
        return self._deal(step)

    def shares(self, step: int) -> list[float]:
        """Return the shares at a step, (k,)."""
        return self._shares.at(step)

    def reweight(self, step: int, factors: Sequence[float]) -> None:
        """Multiply the shares by `factors` (k,) from a step on, instead of by those before."""
        counts, totals = self.counts(step), self._shares.totals(step * self._batch)
        self._set(step, counts, factors, [0.0] * len(factors))
        now = self._shares.totals(step * self._batch)
        self._set(step, counts, factors, [before - after for before, after in zip(totals, now, strict=True)])

    def state(self, step: int) -> dict:
        """Return what continues the sequence at a step."""
        return {"step": step, "counts": self.counts(step), "factors": self._factors, "offsets": self._offsets}

    def load_state(self, state: dict) -> None:
        """Continue where `state` was taken."""
        self._set(state["step"], state["counts"], state["factors"], state["offsets"])

    def _set(self, step: int, counts: Sequence[int], factors: Sequence[float], offsets: Sequence[float]) -> None:
        self._factors, self._offsets = list(factors), list(offsets)
        scaled = [
            [(at, share * factor) for at, share in points] for points, factor in zip(self._groups, factors, strict=True)
        ]
        self._shares = Shares(scaled, self._batch, offsets)
        self._first_step, self._counts = step, {step: list(counts)}

    def _deal(self, step: int) -> list[int]:
        """Deal all steps from the last one that is known up to `step`; return the groups of its samples."""
        if step < self._first_step:
            raise IndexError(f"step {step} lies before {self._first_step}, where the sequence was continued")
        dealt: list[int] = []
        for now in range(max(known for known in self._counts if known <= step), step + 1):
            dealt = self._deal_step(now, counts := list(self._counts[now]))
            self._counts[now + 1] = counts
            if now - _KEPT_STEPS > self._first_step:
                self._counts.pop(now - _KEPT_STEPS, None)
        return dealt

    def _deal_step(self, step: int, counts: list[int]) -> list[int]:
        """Return the groups of a step's samples and count them in `counts`, earliest deadline first."""
        if len(counts) == 1:
            counts[0] += self._batch
            return [0] * self._batch

        def window(group: int) -> tuple[float, float]:
            done = counts[group]
            release = self._shares.reach(group, done + self._margin)
            return release, self._shares.reach(group, done + 1 - self._margin + _SLACK)

        waiting = [(release, due, group) for group in range(len(counts)) for release, due in [window(group)]]
        heapq.heapify(waiting)
        ready: list[tuple[float, int]] = []
        dealt = []
        for position in range(step * self._batch + 1, (step + 1) * self._batch + 1):
            while waiting and waiting[0][0] <= position:
                _, due, group = heapq.heappop(waiting)
                heapq.heappush(ready, (due, group))
            group = heapq.heappop(ready)[1] if ready else heapq.heappop(waiting)[2]
            dealt.append(group)
            counts[group] += 1
            heapq.heappush(waiting, (*window(group), group))
        return dealt
