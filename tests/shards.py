"""Small webdataset shards for tests, written with webdataset's own writer."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset import TarWriter


def picture_bytes(height: int, width: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return an encoded random RGB picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_shard(path: Path, samples: list[dict]) -> Path:
    """Write samples given as {"key", "height", "width", "captions", "category"}, or as raw members."""
    with path.open("wb") as file, TarWriter(file) as writer:
        for i, sample in enumerate(samples):
            if "members" in sample:
                writer.write({"__key__": sample["key"], **sample["members"]})
                continue
            meta = {"captions": sample["captions"], "category": sample.get("category", "things")}
            png = picture_bytes(sample.get("height", 32), sample.get("width", 32), seed=i)
            writer.write({"__key__": sample["key"], "png": png, "json": json.dumps(meta, ensure_ascii=False).encode()})
    return path


def simple_samples(count: int, prefix: str = "s") -> list[dict]:
    """Return samples of a few sizes with captions in both languages."""
    sizes = [(32, 32), (32, 64), (64, 32), (48, 48)]
    return [
        {
            "key": f"{prefix}{i:03d}",
            "height": sizes[i % 4][0],
            "width": sizes[i % 4][1],
            "captions": {"en": [f"thing {i}", f"a picture of thing {i}"], "zh": [f"东西{i}"]},
            "category": ["a", "b"][i % 2],
        }
        for i in range(count)
    ]
