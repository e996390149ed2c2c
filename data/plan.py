"""What each optimizer step trains on: samples, wordings and dropped captions, dealt to ranks and micro-batches.

A pure function of the step: ranks and reader threads change who computes a sample, never which samples a step has.
"""

from dataclasses import dataclass, replace

from data.images import MULTIPLE, fitted_size
from data.index import Index, SampleRecord
from data.order import GlobalOrder
from data.pack import deal
from utils.random_streams import uniform

DEFAULT_MAX_PIXELS = 1328 * 1328


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
    num_image_tokens: int
    num_text_tokens: int  # of the caption, or of the empty prompt if it is dropped
    weight: float = 1.0  # 0 for a filler

    @property
    def num_tokens(self) -> int:
        """Image and text tokens together."""
        return self.num_image_tokens + self.num_text_tokens


def every_language(index: Index, i: int, max_pixels: int = DEFAULT_MAX_PIXELS) -> list[PlannedSample]:
    """Return sample `i` once for each language it has, with its first wording: for validation."""
    record = index[i]
    return [_planned(0, i, record, language, 0, max_pixels) for language in record.caption_tokens]


def _planned(epoch: int, i: int, record: SampleRecord, language: str, wording: int, max_pixels: int) -> PlannedSample:
    height, width = fitted_size(record.height, record.width, MULTIPLE, max_pixels)
    image_tokens = (height // MULTIPLE) * (width // MULTIPLE)
    text_tokens = record.caption_tokens[language][wording]
    return PlannedSample(epoch, i, language, wording, False, height, width, image_tokens, text_tokens)


class BatchPlan:
    """The plan of one data rank (`rank` of `num_ranks`); `micro_batches(step)` has the same length on every rank."""

    def __init__(
        self,
        index: Index,
        order: GlobalOrder,
        *,
        num_ranks: int,
        rank: int,
        max_tokens: int,
        seed: int,
        num_empty_tokens: int,
        caption_dropout: float = 0.1,
        zh_share: float = 0.5,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ):
        for name, value in (("caption_dropout", caption_dropout), ("zh_share", zh_share)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"--{name} is a probability, got {value}")
        self.index, self.order = index, order
        self.num_ranks, self.rank, self.max_tokens, self.seed = num_ranks, rank, max_tokens, seed
        self.num_empty_tokens, self.caption_dropout, self.zh_share = num_empty_tokens, caption_dropout, zh_share
        self.max_pixels = max_pixels

    def global_batch(self, step: int) -> list[PlannedSample]:
        """Return every sample of a step, over all ranks, in global order."""
        return [self._plan(ref.epoch, ref.index) for ref in self.order.batch(step)]

    def micro_batches(self, step: int) -> list[list[PlannedSample]]:
        """Return this rank's samples of a step, by micro-batch.

        A micro-batch that would be empty holds the step's smallest sample at weight 0, so that every rank runs the
        network equally often.
        """
        batch = self.global_batch(step)
        dealt = deal([planned.num_tokens for planned in batch], self.num_ranks, self.max_tokens)[self.rank]
        filler = replace(min(batch, key=lambda planned: planned.num_tokens), weight=0.0)
        return [[batch[i] for i in micro] or [filler] for micro in dealt]

    def state(self) -> dict:
        """Return what must be the same for a resumed run to see the samples that the undisturbed run would see."""
        return {"index": self.index.fingerprint, "num_samples": len(self.index)}

    def _plan(self, epoch: int, i: int) -> PlannedSample:
        record = self.index[i]

        def draw(purpose: str) -> float:
            return uniform(self.seed, epoch, record.key, purpose)

        languages = list(record.caption_tokens)
        if "zh" in languages and len(languages) > 1:
            others = [language for language in languages if language != "zh"]
            languages = ["zh"] if draw("zh") < self.zh_share else others
        language = languages[int(draw("language") * len(languages))]
        wording = int(draw("wording") * len(record.caption_tokens[language]))
        planned = _planned(epoch, i, record, language, wording, self.max_pixels)
        if draw("drop_caption") < self.caption_dropout:
            return replace(planned, drop_caption=True, num_text_tokens=self.num_empty_tokens)
        return planned
