"""A step of a deep model from the steps of two shallow ones: its middle blocks are alike."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel.memory_trace import Breakdown
from parallel.module_position import Position
from parallel.step_trace import Work
from tools.plan_step import StepSettings, TracedStep, trace_step

# Blocks at either end that differ from the middle ones: the first feeds on the embedders, the last computes no text
# output, and FSDP frees what belongs to a block while it works on its neighbours.
NUM_FRONT, NUM_BACK = 2, 2
SHALLOW = NUM_FRONT + NUM_BACK


@dataclass(frozen=True)
class PlannedStep:
    """One rank's whole step.

    Positions stand for several like them: `sequence` tells which, in order.
    """

    settings: StepSettings
    num_bytes: dict[str, int]  # parameters, gradients, optimizer, EMA
    peaks: dict[Position, Breakdown]
    work: dict[Position, Counter]
    collectives: dict[Position, Counter]

    def sequence(self) -> Iterator[Position]:
        """Yield, for every part of the step in order, the position that describes it."""
        num_blocks, last = self.settings.model.num_layers, self.settings.accumulate - 1
        traced = max(position.micro_batch for position in self.peaks)
        for micro in range(last + 1):
            described = micro if micro == 0 else traced if micro == last else min(1, traced)
            for phase, blocks in (("forward", range(num_blocks)), ("backward", reversed(range(num_blocks)))):
                for stage in ("before", *blocks, "after"):
                    yield self._described(Position(described, phase, stage))
        yield Position(traced, "optimizer", "before")

    def _described(self, position: Position) -> Position:
        """Return the position itself if it was traced, or the middle block's that stands for it."""
        if position in self.peaks:
            return position
        return position._replace(stage=NUM_FRONT)

    def totals(self, field: str) -> Counter:
        """Return the sum of `work` or `collectives` over the whole step."""
        total: Counter = Counter()
        counters = getattr(self, field)
        for position, times in Counter(self.sequence()).items():
            for item, count in counters.get(position, {}).items():
                total[item] += times * count
        return total

    def peak(self) -> tuple[Position, Breakdown]:
        """Return where the most bytes are alive, and what they are."""
        return max(self.peaks.items(), key=lambda item: item[1].total())


def plan_step(settings: StepSettings) -> PlannedStep:
    """Return rank 0's step; a deep model costs no more than a shallow one.

    Raises: ValueError for a mesh, checkpointing mode or model that the training script refuses too.
    """
    # The first micro-batch finds no gradients, and the last of HSDP sums them over the copies; the others are alike.
    different = 3 if settings.dp_replicate > 1 else 2
    traced = replace(settings, accumulate=min(settings.accumulate, different))
    depth = settings.model.num_layers
    if settings.activation_checkpointing.startswith("every_"):
        raise ValueError("a plan needs blocks that are alike: --activation_checkpointing none, selective or full")
    if depth <= SHALLOW + 1:
        step = _whole(trace_step(traced))
    else:
        steps = (_at_depth(traced, num_layers) for num_layers in (SHALLOW, SHALLOW + 1))
        step = _extrapolate(*map(_whole, map(trace_step, steps)), depth)
    return replace(step, settings=settings)


def _at_depth(settings: StepSettings, num_layers: int) -> StepSettings:
    return replace(settings, model=replace(settings.model, num_layers=num_layers))


def _whole(step: TracedStep) -> PlannedStep:
    trace = step.trace
    return PlannedStep(step.settings, step.num_bytes, trace.memory.peaks(), trace.work, trace.collectives)


def _extrapolate(shallow: PlannedStep, deep: PlannedStep, depth: int) -> PlannedStep:
    """Continue from two depths, one block apart, to `depth` blocks.

    Bytes alive at a block counted from either end grow by the same amount with each block more, and so do those of the
    middle blocks from one to the next; so the highest middle block is the first or the last of them.
    """
    more = depth - SHALLOW
    peaks, work, collectives = {}, {}, {}
    for position in shallow.peaks:
        stage = position.stage
        from_back = isinstance(stage, int) and stage >= NUM_FRONT
        in_deep = position._replace(stage=stage + 1) if from_back else position
        here = position._replace(stage=stage + more) if from_back else position
        peaks[here] = shallow.peaks[position] + (deep.peaks[in_deep] - shallow.peaks[position]) * more
        if position.phase == "optimizer":  # a few operators over all parameters
            work[here] = _grown(shallow.work[position], deep.work[position], more)
        else:
            _copy(shallow.work, work, position, here)
        _copy(shallow.collectives, collectives, position, here)
    for position in deep.peaks:
        if position.stage == NUM_FRONT:  # the one middle block: a block more before it, or behind it
            before = deep.peaks[position._replace(stage=SHALLOW)] - shallow.peaks[position._replace(stage=SHALLOW - 1)]
            behind = deep.peaks[position._replace(stage=0)] - shallow.peaks[position._replace(stage=0)]
            peaks[position] = deep.peaks[position] + behind * (more - 1)
            peaks[position._replace(stage=depth - NUM_BACK - 1)] = deep.peaks[position] + before * (more - 1)
            for stage in {NUM_FRONT, depth - NUM_BACK - 1}:
                _copy(deep.work, work, position, position._replace(stage=stage))
                _copy(deep.collectives, collectives, position, position._replace(stage=stage))
    num_bytes = {
        kind: shallow.num_bytes[kind] + (deep.num_bytes[kind] - shallow.num_bytes[kind]) * more
        for kind in shallow.num_bytes
    }
    settings = _at_depth(shallow.settings, depth)
    return PlannedStep(settings, num_bytes, peaks, work, collectives)


def _grown(shallow: Counter, deep: Counter, more: int) -> Counter:
    """Continue operators whose traffic grows with the depth, each call by its own."""

    def calls(work: Counter) -> list[Work]:
        return sorted(work.elements(), key=lambda w: (w.operator, w.traffic))

    pairs = zip(calls(shallow), calls(deep), strict=True)
    return Counter(a._replace(traffic=a.traffic + (b.traffic - a.traffic) * more) for a, b in pairs)


def _copy(source: dict, target: dict, source_position: Position, target_position: Position) -> None:
    if source_position in source:
        target[target_position] = source[source_position]
