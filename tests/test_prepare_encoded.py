"""tools.prepare --encode against the encoders called on what the same start without it writes."""

import io
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from PIL import Image

from data.captions import parse_captions
from data.index import build_index
from model.encoders import Encoders
from tests.collections_of_pictures import read_shards, records, write_collection
from tools import prepare

TINY = str(Path(__file__).resolve().parent.parent / "assets/tiny")


@pytest.fixture(autouse=True)
def no_group_stays():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_encoded_samples_are_the_raw_ones_encoded(tmp_path):
    source = write_collection(tmp_path / "in", "csv", records(4))
    usual = {"areas": (64,), "format": "png", "max_crop": 0.2, "cache_folder": str(tmp_path / "cache")}
    prepare.main(prepare.Config((str(source),), str(tmp_path / "raw"), **usual))
    prepare.main(prepare.Config((str(source),), str(tmp_path / "encoded"), encode=TINY, **usual))
    raw, encoded = read_shards(tmp_path / "raw"), read_shards(tmp_path / "encoded")
    assert list(raw) == list(encoded) and len(raw) == 4
    encoders = Encoders(TINY, torch.device("cpu"))
    for key, members in raw.items():
        assert encoded[key]["json"] == members["json"] and set(encoded[key]) == {"json", "safetensors"}
        tensors = safetensors.torch.load(encoded[key]["safetensors"])
        image = next(content for extension, content in members.items() if extension != "json")
        pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(image)).convert("RGB"))).permute(2, 0, 1)
        mean, std = encoders.moments(key, lambda pixels=pixels: pixels)
        size = "{}x{}".format(*pixels.shape[1:])
        assert torch.equal(tensors[f"mean.{size}"], mean.bfloat16())
        assert torch.equal(tensors[f"std.{size}"], std.bfloat16())
        for language, texts in parse_captions("json", members["json"])[0].items():
            for n, text in enumerate(texts):
                assert torch.equal(tensors[f"text.{language}.{n}"], encoders.prompt(text).bfloat16())
    shards = sorted(map(str, (tmp_path / "encoded").glob("*.tar")))
    index = build_index(shards, encoders.text.count_tokens, encoders.text.tokenizer_id, tmp_path / "cache")
    assert len(index) == 4 and not index.rejects
