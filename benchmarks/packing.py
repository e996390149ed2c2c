"""How well samples of realistic sizes are dealt to ranks: `./launch.sh -m benchmarks.packing`.

Pictures: areas and ratios of the usual tables, 1:1 most often, as 3:2, 4:3 and 16:9 are among photographs.  Captions:
log-normal, median 80 tokens, a third longer than 110, as of a captioning model, cut at 512.  Work: tokens, and FLOPs of
the released network with attention.  `packed`: tokens of samples / tokens the network runs over.  `waiting`: tokens /
tokens there were if every rank had as many as the fullest, turn by turn.  `filled`: the same with --compile, where each
micro-batch has one of up to six sizes, found on other batches.  Spread: (largest - smallest) / mean over ranks.
"""

import random
from dataclasses import dataclass

from data.fill_size import deal_filled, fill_sizes
from data.images import MULTIPLE, fitted_size
from data.pack import deal
from model.mmdit import MMDiTConfig
from utils.config import parse, run_main
from utils.flops import mmdit_forward_flops

RATIOS = {(1, 1): 30, (2, 3): 12, (3, 2): 16, (3, 4): 12, (4, 3): 14, (9, 16): 6, (16, 9): 8, (1, 3): 1, (3, 1): 1}
STAGES = {"256": {256: 1}, "640": {640: 1}, "1328": {1328: 1}, "mixed": {256: 3, 640: 3, 1328: 4}}


_NUM_LOOKED_AT = 16384  # samples, as `data.plan` does


@dataclass(frozen=True)
class Config:
    samples_per_rank: int = 32  # of a global batch
    max_tokens: int = 32768  # of a micro-batch
    num_batches: int = 5


def sample(rng: random.Random, areas: dict[int, int]) -> tuple[int, int]:
    """Return the image and text tokens of a sample."""
    side = rng.choices(list(areas), list(areas.values()))[0]
    high, wide = rng.choices(list(RATIOS), list(RATIOS.values()))[0]
    scale = side / (high * wide) ** 0.5
    height, width = fitted_size(round(high * scale), round(wide * scale), MULTIPLE, side * side)
    return height // MULTIPLE * (width // MULTIPLE), max(8, min(512, round(rng.lognormvariate(4.38, 0.6))))


def filled_tokens(micro: list[tuple[int, int]], filled_to: list[tuple[int, int, int]]) -> int:
    """Return the tokens of the first size that holds a micro-batch, as `model.layout.fill_batch` takes it."""
    images, texts = (sum(size[n] for size in micro) for n in range(2))
    return next(i + t for i, t, most in filled_to if images <= i and texts <= t and len(micro) <= most)


def spread(values: list[float]) -> float:
    """Return (largest - smallest) / mean."""
    return (max(values) - min(values)) * len(values) / sum(values)


def main(cfg: Config) -> None:
    network, columns = MMDiTConfig(), ("packed", "waiting", "filled", "spread tokens", "spread FLOPs")
    print(f"{'areas':8}{'ranks':>6}{'turns':>6}" + "".join(f"{name:>15}" for name in columns) + "   filled to")
    for stage, areas in STAGES.items():
        for num_ranks in (8, 32, 256):
            rng, rows, num_turns = random.Random(0), [], 0
            batches = [
                [(*sample(rng, areas), 1) for _ in range(cfg.samples_per_rank * num_ranks)]
                for _ in range(max(4, min(32, _NUM_LOOKED_AT // (cfg.samples_per_rank * num_ranks))))
            ]
            longest = max(text for batch in batches for _, text, _ in batch)
            largest = max(image for batch in batches for image, _, _ in batch)
            filled_to = fill_sizes(batches, num_ranks, cfg.max_tokens, (largest, longest, 1))
            for _ in range(cfg.num_batches):
                sizes = [sample(rng, areas) for _ in range(cfg.samples_per_rank * num_ranks)]
                tokens, flops = (
                    [sum(size) for size in sizes],
                    [mmdit_forward_flops(network, [i], [t]) for i, t in sizes],
                )
                dealt = deal(tokens, num_ranks, cfg.max_tokens)
                loads = [[sum(tokens[i] for i in micro) for micro in rank] for rank in dealt]
                work = [sum(flops[i] for micro in rank for i in micro) for rank in dealt]
                used, smallest = sum(tokens), min(tokens)
                counts = [(*size, 1) for size in sizes]
                micros = [m for rank in deal_filled(counts, num_ranks, cfg.max_tokens, filled_to) for m in rank]
                filled = sum(filled_tokens([sizes[i] for i in micro], filled_to) for micro in micros)
                empty = sum(not micro for rank in dealt for micro in rank)
                fullest = num_ranks * sum(max(turn) for turn in zip(*loads, strict=True))
                num_turns = len(dealt[0])
                rows.append((
                    used / (used + empty * smallest), used / fullest, used / filled,
                    spread([sum(rank) for rank in loads]), spread(work),
                ))  # fmt: skip
            means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            print(
                f"{stage:8}{num_ranks:6}{num_turns:6}" + "".join(f"{mean:15.2%}" for mean in means) + f"   {filled_to}"
            )


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
