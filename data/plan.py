"""What each optimizer step trains on: samples, wordings and dropped captions, dealt to ranks and micro-batches.

A pure function of the step: ranks and reader threads change who computes a sample, never which samples a step has.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from statistics import mean

from data.edit import num_reference_tokens
from data.fill_size import deal_filled, fill_sizes
from data.index import Index, SampleRecord
from data.mixture_order import MixtureOrder
from data.order import GlobalOrder, SampleRef
from data.pack import deal
from data.reference_size import Size, area_size, clipped_area_size
from data.tasks import RECONSTRUCTION, keeping_instruction
from utils.random_streams import uniform

DEFAULT_MAX_PIXELS = 1328 * 1328
# As the released edit models see references.
DEFAULT_REFERENCE_PIXELS, DEFAULT_CONDITION_PIXELS = 1024 * 1024, 384 * 384
_NUM_CHECKED = 2048  # samples whose size is looked at before the run starts
_NUM_LOOKED_AT = 16384  # samples from which the room for text in a filled micro-batch is found
_TEXT_MULTIPLE = 16  # tokens: what matrix products on GPUs like


@dataclass(frozen=True)
class PlannedSample:
    """One visit of one sample, decided before anything of it is read."""

    epoch: int
    index: int
    language: str
    wording: int
    drop_caption: bool
    height: int  # pixels as trained
    width: int
    num_image_tokens: int  # with those of an edit's references
    num_text_tokens: int  # of the caption, or of the empty prompt if it is dropped; of an edit always as if it were not
    weight: float = 1.0  # 0 for a filler
    group: int = 0  # of the mixture; -1 = of none; `data.order.OF_ITS_CATEGORY`
    reference_sizes: tuple[Size, ...] | None = None  # of an edit, in pixels as the VAE sees them; None = text-to-image
    reconstructs: bool = False  # the one reference is the picture itself, the instruction to keep it

    @property
    def num_tokens(self) -> int:
        """Image and text tokens together."""
        return self.num_image_tokens + self.num_text_tokens


def every_language(
    index: Index, i: int, max_pixels: int = DEFAULT_MAX_PIXELS, reference_pixels: int = DEFAULT_REFERENCE_PIXELS
) -> list[PlannedSample]:
    """Return sample `i` once for each language it has, with its first wording: for validation."""
    record = index[i]
    return [_planned(0, i, record, language, 0, max_pixels, reference_pixels) for language in record.caption_tokens]


def spread_micro_batches(
    index: Index,
    num_samples: int,
    num_ranks: int,
    rank: int,
    max_tokens: int,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    reference_pixels: int = DEFAULT_REFERENCE_PIXELS,
    group_of: Callable[[SampleRecord, str, str | None], int | None] = lambda record, language, task: None,
    reconstructing: Callable[[PlannedSample], PlannedSample] | None = None,
    edits_only: bool = False,
) -> list[list[PlannedSample]]:
    """Return a rank's part of `num_samples` samples spread over the index, each in every language it has.

    group_of: the group of a sample in a language, or None, visited for what it is, or for the named task.
    reconstructing: of a run that reconstructs pictures: makes a visit such a one; each picture is then seen both ways.
    edits_only: of a run that trains edits alone.  Raises: ValueError if there is no edit then.
    """
    tasks, chosen = [], index.spread(num_samples, edits_only=edits_only)
    if edits_only and not chosen:
        raise ValueError(
            f"none of the {len(index)} samples for validation is an edit; give --validation_data with edits, or none: "
            "then validation looks at the training samples"
        )
    for i in chosen:
        for planned in every_language(index, i, max_pixels, reference_pixels):
            visits = [(planned, None)]
            if reconstructing is not None and not index[i].encoded_sizes:
                visits.append((reconstructing(planned), RECONSTRUCTION))
            for visit, task in visits:
                group = group_of(index[i], planned.language, task)
                tasks.append(replace(visit, group=-1 if group is None else group))
    dealt = deal([task.num_tokens for task in tasks], num_ranks, max_tokens)[rank]
    # A rank without work still takes part in every gather, at weight 0.
    return [[tasks[i] for i in micro] or [replace(tasks[0], weight=0.0)] for micro in dealt]


def trained_pictures(
    record: SampleRecord, max_pixels: int, reference_pixels: int
) -> tuple[Size, tuple[Size, ...] | None, int]:
    """Return the sizes in pixels of a sample's target and references as trained, and their image tokens together."""
    height, width = record.trained_size(max_pixels)
    references = None
    if record.references is not None:
        references = tuple(area_size(r.height, r.width, reference_pixels) for r in record.references)
    return (height, width), references, num_reference_tokens([(height, width), *(references or ())])


def _planned(
    epoch: int, i: int, record: SampleRecord, language: str, wording: int, max_pixels: int, reference_pixels: int
) -> PlannedSample:
    size, references, image_tokens = trained_pictures(record, max_pixels, reference_pixels)
    text_tokens = record.caption_tokens[language][wording]
    planned = PlannedSample(epoch, i, language, wording, False, *size, image_tokens, text_tokens)
    return planned if references is None else replace(planned, reference_sizes=references)


def _counts(batch: Sequence[PlannedSample]) -> list[tuple[int, int, int]]:
    """Return (image tokens, text tokens, 1) of each sample."""
    return [(planned.num_image_tokens, planned.num_text_tokens, 1) for planned in batch]


def _choose(share: float, weights: Sequence[float]) -> int:
    """Return the place whose stretch of `weights`, laid end to end, begins at or before `share` of their sum."""
    ends = list(accumulate(weights))
    return min(bisect_right(ends, share * ends[-1]), len(weights) - 1)


class BatchPlan:
    """The plan of one data rank (`rank` of `num_ranks`); `micro_batches(step)` has the same length on every rank."""

    def __init__(
        self,
        index: Index,
        order: GlobalOrder | MixtureOrder,
        *,
        num_ranks: int,
        rank: int,
        max_tokens: int,
        seed: int,
        num_empty_tokens: int,
        caption_dropout: float = 0.1,
        zh_share: float = 0.5,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        reference_pixels: int = DEFAULT_REFERENCE_PIXELS,
        fill: bool = False,
        max_text_tokens: int = 0,
        condition_pixels: int = DEFAULT_CONDITION_PIXELS,
        count_tokens: Callable[[str, Sequence[Size]], int] | None = None,
    ):
        """Plan for a data rank.

        max_tokens: image and text tokens of a micro-batch; those of one sample must fit.
        reference_pixels: the area at which the VAE sees the references of edits.
        fill: micro-batches are to be filled to one of `fill_to`, so each part of it is a limit of its own.
        max_text_tokens: then how many of `max_tokens` are for text; 0 = what suits the data, of images as well.
        condition_pixels, count_tokens: for an order that reconstructs pictures: the area at which the text encoder sees
        them, and how many text tokens an instruction and pictures of given sizes become.
        Raises: ValueError for shares that are no probability, or no room for text or images.
        """
        for name, value in (("caption_dropout", caption_dropout), ("zh_share", zh_share)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"--{name} is a probability, got {value}")
        self.index, self.order = index, order
        self.num_ranks, self.rank, self.max_tokens, self.seed = num_ranks, rank, max_tokens, seed
        self.num_empty_tokens, self.caption_dropout, self.zh_share = num_empty_tokens, caption_dropout, zh_share
        self.max_pixels, self.reference_pixels = max_pixels, reference_pixels
        self.condition_pixels, self._count_tokens = condition_pixels, count_tokens and lru_cache(1024)(count_tokens)
        self.skipped: list[tuple[int, int]] = []  # (first, count) of the order's global batches that are left out
        # (image tokens, text tokens, samples) of filled micro-batches; the last is for larger samples than any seen
        self.fill_to = self._fill_to(max_text_tokens) if fill else None
        self._check_size()

    def _check_size(self) -> None:
        """Look for a sample that no micro-batch holds among many of the index, before its turn comes hours later."""
        for i in self.index.spread(_NUM_CHECKED):
            for planned in every_language(self.index, i, self.max_pixels, self.reference_pixels):
                if planned.num_tokens > self.max_tokens:
                    raise ValueError(
                        f"sample {self.index.key(i)} has {planned.num_tokens} tokens, and a micro-batch holds "
                        f"{self.max_tokens}; raise --max_tokens_per_micro_batch, or lower --max_pixels (of edits with "
                        "references: --reference_pixels)"
                    )

    def skip(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Leave out global batches of the order as well: (first, count), counted as the order counts them."""
        merged: list[tuple[int, int]] = []
        for first, count in sorted((first, count) for first, count in (*self.skipped, *stretches)):
            if merged and first <= sum(merged[-1]):
                start, length = merged.pop()
                first, count = start, max(first + count - start, length)
            merged.append((first, count))
        self.skipped = merged

    def position(self, step: int) -> int:
        """Return which global batch of the order a step has."""
        for first, count in self.skipped:
            if first <= step:
                step += count
        return step

    def global_batch(self, step: int) -> list[PlannedSample]:
        """Return every sample of a step, over all ranks, in global order."""
        return [self._plan(ref) for ref in self.order.batch(self.position(step))]

    def keys(self, step: int) -> list[str]:
        """Return the keys of a step's samples, over all ranks, in global order."""
        return [self.index[planned.index].key for planned in self.global_batch(step)]

    def micro_batches(self, step: int) -> list[list[PlannedSample]]:
        """Return this rank's samples of a step, by micro-batch.

        A micro-batch that would be empty holds the step's smallest sample at weight 0, so that every rank runs the
        network equally often.
        """
        batch = self.global_batch(step)
        if self.fill_to is not None:
            sizes = [(images, texts, num_samples - 1) for images, texts, num_samples in self.fill_to]
            dealt = deal_filled(_counts(batch), self.num_ranks, self.max_tokens, sizes)[self.rank]
        else:
            dealt = deal([planned.num_tokens for planned in batch], self.num_ranks, self.max_tokens)[self.rank]
        filler = replace(min(batch, key=lambda planned: planned.num_tokens), weight=0.0)
        return [[batch[i] for i in micro] or [filler] for micro in dealt]

    def state(self, step: int) -> dict:
        """Return what a resumed run needs to see from `step` on what the undisturbed run would see; under 4 KiB."""
        state = {"index": self.index.fingerprint, "num_samples": len(self.index)} | self.order.state(
            self.position(step)
        )
        return state | ({"skipped": [list(stretch) for stretch in self.skipped]} if self.skipped else {})

    def load_state(self, state: dict) -> None:
        """Continue where `state` was taken, on any number of ranks.  Raises: ValueError if that was other data."""
        now = {"index": self.index.fingerprint, "num_samples": len(self.index)}
        if (there := {name: state.get(name) for name in now}) != now:
            raise ValueError(f"the run was started on other data ({there}, now {now}); give a new --run_folder")
        self.skip(state.get("skipped", ()))
        self.order.load_state({name: value for name, value in state.items() if name not in (*now, "skipped")})

    def _fill_to(self, num_txt: int) -> tuple[tuple[int, int, int], ...]:
        """Return the sizes to fill to: the same on every rank, and over the whole run."""
        looked_at = self.index.spread(_NUM_LOOKED_AT)
        pictures = [every_language(self.index, i, self.max_pixels, self.reference_pixels)[0] for i in looked_at]
        images = [planned.num_image_tokens for planned in pictures]
        texts = [n for i in looked_at for wordings in self.index[i].caption_tokens.values() for n in wordings]
        if self.order.reconstructs:
            itself = [self._reconstructing(planned) for planned in pictures]
            images += [planned.num_image_tokens for planned in itself]
            texts += [planned.num_text_tokens for planned in itself]
        longest, suited = max(self.num_empty_tokens, *texts), []
        if not num_txt:
            num_batches = max(4, min(32, _NUM_LOOKED_AT // self.order.global_batch_size))
            batches = [_counts(self.global_batch(step)) for step in range(num_batches)]
            suited = fill_sizes(batches, self.num_ranks, self.max_tokens, (max(images), longest, 1))
            share = mean(texts) / (mean(texts) + mean(images))
            num_txt = max(round(share * self.max_tokens), longest)
            num_txt += -num_txt % _TEXT_MULTIPLE
        if not 0 < num_txt < self.max_tokens:
            raise ValueError(
                f"a filled micro-batch of {self.max_tokens} tokens cannot have {num_txt} of them for text; raise "
                "--max_tokens_per_micro_batch or change --max_text_tokens_per_micro_batch"
            )
        smallest = min(images) + min(self.num_empty_tokens, *texts)
        num_samples = max(1, min(self.order.global_batch_size, self.max_tokens // smallest))
        # The filler is a sample too.
        sizes = ((images, texts, min(most, num_samples) + 1) for images, texts, most in suited)
        return *sizes, (self.max_tokens - num_txt, num_txt, num_samples + 1)

    @property
    def reconstructing(self) -> Callable[[PlannedSample], PlannedSample] | None:
        """What makes a visit a reconstruction, where the order has such visits, else None."""
        return self._reconstructing if self.order.reconstructs else None

    def _reconstructing(self, planned: PlannedSample) -> PlannedSample:
        """Return a visit whose reference is the picture as it is trained."""
        size = planned.height, planned.width
        areas = self.reference_pixels, self.condition_pixels
        reference, condition = (clipped_area_size(*size, area) for area in areas)
        return replace(
            planned, reconstructs=True, reference_sizes=(reference,),
            num_image_tokens=num_reference_tokens((size, reference)),
            num_text_tokens=self._count_tokens(keeping_instruction(planned.language), (condition,)),
        )  # fmt: skip

    def _plan(self, ref: SampleRef) -> PlannedSample:
        record = self.index[ref.index]

        def draw(purpose: str) -> float:
            return uniform(self.seed, ref.epoch, record.key, purpose)

        languages = [name for name in record.caption_tokens if ref.languages is None or name in ref.languages]
        if "zh" in languages and len(languages) > 1:
            others = [language for language in languages if language != "zh"]
            languages = ["zh"] if draw("zh") < self.zh_share else others
        language = languages[int(draw("language") * len(languages))]
        wording = _choose(draw("wording"), record.caption_weights[language])
        planned = _planned(
            ref.epoch, ref.index, record, language, wording, self.max_pixels, self.reference_pixels
        )  # fmt: skip
        planned = replace(planned, group=ref.group)
        if ref.reconstructs:
            planned = self._reconstructing(planned)
        if draw("drop_caption") < self.caption_dropout:
            is_edit = planned.reference_sizes is not None  # its references' tokens stay
            num_text_tokens = planned.num_text_tokens if is_edit else self.num_empty_tokens
            return replace(planned, drop_caption=True, num_text_tokens=num_text_tokens)
        return planned
