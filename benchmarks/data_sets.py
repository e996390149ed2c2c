"""Shards for benchmarks/data.py: photo-like JPEGs with captions, and encoded samples of the released model's widths."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from webdataset import TarWriter

from data.encoded import EXTENSION, write_encoded

SIDE = 256  # pixels
_TEXT_WIDTH = 3584
_WORDS = "a photo of the old red house near some water with two people in warm evening light under trees".split()


@dataclass(frozen=True)
class DataSet:
    """Shards of one kind, raw or encoded."""

    kind: str
    shards: list[str]
    num_samples: int
    num_bytes: int  # of the members


def make_data_set(folder: Path, kind: str, num_samples: int, samples_per_shard: int) -> DataSet:
    """Write the shards of a kind, always the same."""
    folder.mkdir(parents=True)
    samples, num_bytes, shards = _raw(num_samples) if kind == "raw" else _encoded(num_samples), 0, []
    for first in range(0, num_samples, samples_per_shard):
        shards.append(str(folder / f"{first // samples_per_shard:05d}.tar"))
        with open(shards[-1], "wb") as file, TarWriter(file, mtime=0.0) as writer:
            for i in range(first, min(first + samples_per_shard, num_samples)):
                members = next(samples)
                num_bytes += sum(map(len, members.values()))
                writer.write({"__key__": f"{i:07d}", **members})
    return DataSet(kind, shards, num_samples, num_bytes)


def _captions(rng: np.random.Generator) -> list[str]:
    return [" ".join(rng.choice(_WORDS, rng.integers(8, 40))) for _ in range(2)]


def _raw(num_samples: int) -> Iterator[dict[str, bytes]]:
    """Yield samples whose pictures have large shapes, edges and fine grain, as photos do."""
    rng = np.random.default_rng(0)
    for _ in range(num_samples):
        picture = np.zeros((SIDE, SIDE, 3), np.float32)
        for cells, strength in ((4, 90), (16, 40), (64, 16)):
            coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            picture += (
                np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float32) / 128 - 1
            ) * strength
        picture += rng.normal(0, 4, picture.shape)
        buffer = io.BytesIO()
        Image.fromarray(np.clip(picture + 128, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=92)
        yield {"jpg": buffer.getvalue(), "json": json.dumps({"captions": {"en": _captions(rng)}}).encode()}


def _encoded(num_samples: int) -> Iterator[dict[str, bytes]]:
    rng = np.random.default_rng(1)
    random = torch.Generator().manual_seed(1)
    latent = (16, SIDE // 8, SIDE // 8)
    for _ in range(num_samples):
        captions = _captions(rng)
        states = [torch.randn(len(text.split()) + 5, _TEXT_WIDTH, generator=random) for text in captions]
        mean, std = torch.randn(2, *latent, generator=random)
        content = write_encoded({(SIDE, SIDE): (mean, std)}, {"en": states}, states[0][:5], "a benchmark")
        yield {EXTENSION: content, "json": json.dumps({"captions": {"en": captions}}).encode()}
