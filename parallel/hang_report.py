"""Who is where when a run hangs, and for whom the others wait."""

from collections.abc import Mapping, Sequence


def explain(statuses: Mapping[int, Mapping], silent: Sequence[int]) -> str:
    """Return the culprit, where it can be told, in the first line, and a line for each rank.

    statuses: of each rank what its watchdog last reported: step, number (of the phase in the step), phase, waited_s,
    enqueued ({process group: collectives begun}).  silent: ranks whose watchdog does not report any more.
    """
    culprits, why = _culprits(statuses, silent)
    first = f"culprit: rank {', '.join(map(str, culprits))}, {why}" if culprits else f"no culprit can be told: {why}"
    lines = [
        f"rank {rank}: step {s['step']}, {s['phase']} for {s['waited_s']:.1f} s, {_begun(s)} collectives begun"
        + (", does not answer" if rank in silent else "")
        for rank, s in sorted(statuses.items())
    ]
    return "\n".join([first, *lines])


def _culprits(statuses: Mapping[int, Mapping], silent: Sequence[int]) -> tuple[list[int], str]:
    if not statuses:
        return [], "the process group's store does not answer"
    if silent:
        return sorted(silent), "stopped or dead"
    if behind := _behind({rank: (s["step"], s["number"]) for rank, s in statuses.items()}):
        return behind, f"behind the others, in {statuses[behind[0]]['phase']!r}"
    if behind := _behind({rank: _begun(s) for rank, s in statuses.items()}):
        return behind, "has begun fewer collectives than the others"
    return [], "all ranks are at the same place"


def _begun(status: Mapping) -> int:
    return sum(status["enqueued"].values())


def _behind(places: Mapping[int, object]) -> list[int]:
    """Return the ranks that are not as far as others; none if all are alike."""
    first = min(places.values())
    behind = sorted(rank for rank, place in places.items() if place == first)
    return behind if len(behind) < len(places) else []
