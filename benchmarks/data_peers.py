"""Other libraries' loaders over the same samples, each in its own format and as its documentation recommends.

Every loader is shuffled, has the same number of workers, and gives for a raw sample the picture as uint8 (3, H, W), for
an encoded one mean, std and the text states of one caption, both with the captions' text.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch.utils.data import DataLoader

from benchmarks.data_sets import DataSet

BATCH = 64
Loaded = tuple[object, str]


def decode(kind: str, content: bytes, meta: bytes | str) -> Loaded:
    """Turn a sample's bytes into tensors, with as little as it takes."""
    caption = json.loads(meta)["captions"]["en"][0]
    if kind == "raw":
        pixels = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), caption
    tensors = safetensors.torch.load(content)
    return (tensors["mean.256x256"], tensors["std.256x256"], tensors["text.en.0"]), caption


def members(data: DataSet) -> Iterator[dict[str, bytes]]:
    """Yield each sample's content and meta, for writing another format."""
    for shard in data.shards:
        with tarfile.open(shard) as archive:
            found = {m.name: archive.extractfile(m).read() for m in archive}
        for name in sorted(name for name in found if not name.endswith(".json")):
            yield {"content": found[name], "meta": found[name.partition(".")[0] + ".json"]}


def keep_list(samples: list) -> list:
    """Collate nothing: samples differ in size."""
    return samples


class WebDataset:
    """Sequential tars, shards shuffled, and samples within a buffer."""

    name = "webdataset"

    def prepare(self, data: DataSet, folder: Path) -> None:
        import webdataset

        self.version, self.data = webdataset.__version__, data
        self.extension = "jpg" if data.kind == "raw" else "safetensors"

    def _decode(self, sample: dict) -> Loaded:
        return decode(self.data.kind, sample[self.extension], sample["json"])

    def epoch(self, num_workers: int, seed: int) -> Iterator[int]:
        """Yield the number of samples of each batch of one epoch."""
        import webdataset

        shards = self.data.shards
        dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=seed, empty_check=False)
        dataset = dataset.shuffle(1000).map(self._decode).batched(BATCH, collation_fn=keep_list)
        for batch in webdataset.WebLoader(dataset, batch_size=None, num_workers=num_workers):
            yield len(batch)


class LitData:
    """Chunks of 64 MB, shuffled within and between."""

    name = "litdata"

    def prepare(self, data: DataSet, folder: Path) -> None:
        import litdata
        from litdata.streaming.cache import Cache

        self.version, self.data, self.folder = litdata.__version__, data, folder
        cache = Cache(str(folder), chunk_bytes="64MB")
        for i, sample in enumerate(members(data)):
            cache[i] = {"content": sample["content"], "meta": sample["meta"].decode()}
        cache.done()
        cache.merge()

    def epoch(self, num_workers: int, seed: int) -> Iterator[int]:
        """Yield the number of samples of each batch of one epoch."""
        import litdata

        kind = self.data.kind

        class Decoded(litdata.StreamingDataset):
            def __getitem__(self, i):
                sample = super().__getitem__(i)
                return decode(kind, sample["content"], sample["meta"])

        dataset = Decoded(str(self.folder), shuffle=True, seed=seed)
        for batch in litdata.StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=num_workers, collate_fn=keep_list
        ):
            yield len(batch)


class MosaicStreaming:
    """MDS shards of 64 MB, shuffled by its default algorithm."""

    name = "mosaicml-streaming"

    def prepare(self, data: DataSet, folder: Path) -> None:
        import streaming

        self.version, self.data, self.folder = streaming.__version__, data, folder
        columns = {"content": "bytes", "meta": "bytes"}
        with streaming.MDSWriter(out=str(folder), columns=columns, size_limit="64mb") as writer:
            for sample in members(data):
                writer.write(sample)

    def epoch(self, num_workers: int, seed: int) -> Iterator[int]:
        """Yield the number of samples of each batch of one epoch."""
        import streaming

        kind = self.data.kind

        class Decoded(streaming.StreamingDataset):
            def __getitem__(self, i):
                sample = super().__getitem__(i)
                return decode(kind, sample["content"], sample["meta"])

        streaming.base.util.clean_stale_shared_memory()  # of the epoch before: one process opens the folder again
        dataset = Decoded(local=str(self.folder), shuffle=True, shuffle_seed=seed, batch_size=BATCH)
        for batch in DataLoader(dataset, batch_size=BATCH, num_workers=num_workers, collate_fn=keep_list):
            yield len(batch)


PEERS = (WebDataset, LitData, MosaicStreaming)
