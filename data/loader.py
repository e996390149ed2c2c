"""The micro-batches of one data rank, step after step, read ahead by threads."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from data.plan import BatchPlan, PlannedSample
from data.reader import Reader, Sample

_NUM_REQUESTS = 32  # at once, for remote shards: 50 ms each and 100 KB a sample make 64 MB/s
_NUM_ASKED = 8 * _NUM_REQUESTS  # samples asked for before their turn: one that is tried again holds up none but itself
_MAX_ASKED_BYTES = 64 << 20  # of them in memory
_MAX_TASK_SAMPLES = 16  # read by one task of a thread: handing over each sample alone costs more than reading it


class Loader:
    """The micro-batches of one data rank, step after step, read ahead by threads.

    num_workers: threads that decode; 0 reads when asked.  prefetch_steps: how many steps may lie in memory ahead.
    Neither changes what comes out.  Bytes of remote shards are fetched by threads of their own, _NUM_REQUESTS at once,
    and further ahead, for a step waits for its slowest request.
    needs_pixels(key): whether a picture must be read, or its latents are already known.
    gather: given a list, returns those of all ranks that work on the same samples (a collective); without it there is
    one such rank.
    """

    def __init__(
        self,
        reader: Reader,
        plan: BatchPlan,
        start_step: int = 0,
        num_workers: int = 2,
        prefetch_steps: int = 2,
        needs_pixels: Callable[[str], bool] = lambda key: True,
        gather: Callable[[list], list[list]] | None = None,
    ):
        if num_workers < 0 or prefetch_steps < 1:
            raise ValueError(
                f"--num_workers must be at least 0, got {num_workers}, and --prefetch_steps at least 1, "
                f"got {prefetch_steps}"
            )
        self.reader, self.plan = reader, plan
        self._needs_pixels, self._gather = needs_pixels, gather
        self._num_workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers, "reader") if num_workers else None
        fetches = num_workers and reader.shards.any_remote
        self._requests = ThreadPoolExecutor(_NUM_REQUESTS, "fetch") if fetches else None
        self._asked: deque[_AskedStep] = deque()  # the steps before `_to_plan` that no thread decodes yet
        self._ahead: deque[list[list[Future]]] = deque()  # the steps that are being decoded
        self._prefetch_steps = prefetch_steps
        self._to_plan = start_step

    def next_step(self) -> list[list[Sample]]:
        """Return the next step's samples by micro-batch."""
        if self._pool is None:
            planned = self.plan.micro_batches(self._to_plan)
            self._to_plan += 1
            return [self._alike([(p, self.reader.read(p, self._needs_pixels)) for p in micro]) for micro in planned]
        while len(self._ahead) <= self._prefetch_steps:
            if not self._asked:
                self._ask()
            self._ahead.append(self._submit(self._asked.popleft()))
        while self._requests is not None and self._has_room():
            self._ask()
        return [self._alike([pair for task in micro for pair in task.result()]) for micro in self._ahead.popleft()]

    @property
    def num_steps_ahead(self) -> int:
        """How many steps have been asked for ahead of the one under way."""
        return len(self._ahead)

    def seek(self, step: int) -> None:
        """Go on with `step`; what was read ahead is dropped, for a plan that changes from there on."""
        decoding = (task for micro_batches in self._ahead for micro in micro_batches for task in micro)
        for future in (*decoding, *(future for asked in self._asked for future in asked.fetched.values())):
            future.cancel()
        self._ahead.clear()
        self._asked.clear()
        self._to_plan = step

    def _has_room(self) -> bool:
        num_samples = sum(len(asked.fetched) for asked in self._asked)
        return num_samples < _NUM_ASKED and sum(asked.num_bytes for asked in self._asked) < _MAX_ASKED_BYTES

    def _ask(self) -> None:
        """Plan the next step, and ask for the bytes of remote samples."""
        micro_batches, fetched, num_bytes = self.plan.micro_batches(self._to_plan), {}, 0
        self._to_plan += 1
        if self._requests is not None:
            for m, i, planned in ((m, i, p) for m, micro in enumerate(micro_batches) for i, p in enumerate(micro)):
                fetched[m, i] = self._requests.submit(self.reader.fetch, planned, self._needs_pixels)
                num_bytes += self.reader.index[planned.index].num_bytes
        self._asked.append(_AskedStep(micro_batches, fetched, num_bytes))

    def _submit(self, asked: "_AskedStep") -> list[list[Future]]:
        """Have the threads decode a step."""
        num_samples = sum(map(len, asked.micro_batches))
        size = max(1, min(_MAX_TASK_SAMPLES, num_samples // self._num_workers))
        tasks = []
        for m, micro in enumerate(asked.micro_batches):
            fetched = [asked.fetched.get((m, i)) for i in range(len(micro))]
            parts = (slice(i, i + size) for i in range(0, len(micro), size))
            tasks.append([self._pool.submit(self._read_all, micro[part], fetched[part]) for part in parts])
        return tasks

    def _read_all(self, planned: list[PlannedSample], fetched: list) -> list[tuple[PlannedSample, Sample]]:
        return [(p, self.reader.read(p, self._needs_pixels, ahead)) for p, ahead in zip(planned, fetched, strict=True)]

    def _alike(self, pairs: Sequence[tuple[PlannedSample, Sample]]) -> list[Sample]:
        """Return a micro-batch's samples, the same ones on all ranks that work on it.

        All look for replacements in one order: of two different picks, the rank with the later one has passed over the
        earlier one, which is then bad for all.
        """
        planned, samples = [p for p, _ in pairs], [sample for _, sample in pairs]
        while self._gather is not None:
            places = [self._place(p, sample) for p, sample in zip(planned, samples, strict=True)]
            picks = [sorted(set(of_all)) for of_all in zip(*self._gather(places), strict=True)]
            if not (unlike := [i for i, distinct in enumerate(picks) if len(distinct) > 1]):
                break
            for i in unlike:
                self.reader.note_bad(picks[i][0][-1], "a rank that works on the same samples cannot read it")
            for i in unlike:
                samples[i] = self.reader.read(planned[i], self._needs_pixels)
        return samples

    def _place(self, planned: PlannedSample, sample: Sample) -> tuple[bool, int, str]:
        """Return what puts the candidates for a sample in the order in which they are tried, and the sample's key."""
        has_other_size = (sample.plan.height, sample.plan.width) != (planned.height, planned.width)
        return has_other_size, (sample.plan.index - planned.index) % len(self.reader.index), sample.key

    def close(self) -> None:
        """Stop the threads and close the shards."""
        for pool in (self._requests, self._pool):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        self.reader.close()


@dataclass(frozen=True)
class _AskedStep:
    """A planned step whose bytes are under way, if they are remote."""

    micro_batches: list[list[PlannedSample]]
    fetched: dict[tuple[int, int], Future]  # (micro-batch, place in it) → the sample's members
    num_bytes: int
