"""Encode shards once, not in every epoch: `python -m tools.prepare_encode --model MODEL --data raw --output encoded`.

Writes, for each raw shard, one of the same name whose samples hold VAE latents and text states instead of pictures
(data/encoded.py).  They train as the raw ones do: same keys, same order, same noise.  Under torchrun each process does
its share; the same command again resumes.  `tools.prepare --encode MODEL` does the same while it makes the shards.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from webdataset import TarWriter

from data.encoded import EXTENSION, write_encoded
from data.index import Index, build_index
from data.plan import DEFAULT_MAX_PIXELS
from data.reader import Reader
from data.shards import expand_shards
from model.encoders import Encoders
from parallel.distributed import is_main, num_ranks, rank
from utils.config import parse, run_main

log = logging.getLogger("train")
_SETTINGS = "encoded.json"


@dataclass(frozen=True)
class Config:
    model: str  # folder in the released layout, with vae/, text_encoder/ and tokenizer/
    data: str  # raw shards: a folder or a glob of .tar files, emoji-small or emoji
    output: str  # folder for the encoded shards
    split: str = "train"  # of the built-in sets: train or validation
    max_pixels: tuple[int, ...] = (DEFAULT_MAX_PIXELS,)  # encode each picture at every one of these areas
    store: str = "bfloat16"  # bfloat16 or float32: the dtype of what is written
    dtype: str = "auto"  # compute in float32 or bfloat16 (auto: on GPUs)
    cache_folder: str = ".cache"  # for the index


class MemberEncoder:
    """Makes the .safetensors member of a sample.  Safe to call from several threads, one of which computes."""

    def __init__(self, encoders: Encoders, dtype: torch.dtype = torch.bfloat16):
        self.encoders, self.dtype = encoders, dtype
        self._lock = threading.Lock()
        self._empty = encoders.text.encode("")

    def encode(self, pictures: Sequence[Tensor], captions: Mapping[str, Sequence[str]]) -> bytes:
        """Return the member.  pictures: one picture at each of its sizes, uint8 (3, H, W); captions by language."""
        with self._lock:
            # Through the same function as in training, but nothing is kept: each picture comes once.
            latents = {tuple(p.shape[1:]): self.encoders.encode_picture(p) for p in pictures}
            states = {language: [*map(self.encoders.text.encode, texts)] for language, texts in captions.items()}
        return write_encoded(latents, states, self._empty, self.encoders.identity, self.dtype)

    def encode_members(self, sample, recipe) -> list[tuple[str, dict[str, bytes]]]:
        """Write each size of a sample of tools.prepare as .safetensors and .json: a `MemberWriter` of it."""
        assert sample.edit is None  # rejected before
        members = []
        for picture in sample.pictures:
            pixels = torch.from_numpy(np.array(picture.image)).permute(2, 0, 1)
            content = {EXTENSION: self.encode([pixels], sample.captions), "json": sample.meta_of(picture)}
            members.append((sample.key(picture), content))
        return members


def encode_members(
    model: str | Path, device: torch.device, dtype: torch.dtype, store: torch.dtype = torch.bfloat16
) -> Callable:
    """Return a function (sample, recipe) → members for tools.prepare.

    model: folder in the released layout; dtype: to compute in; store: bfloat16 or float32, to write.
    """
    return MemberEncoder(Encoders(model, device, dtype), store).encode_members


def encode_shards(
    index: Index, encoder: MemberEncoder, output: Path, max_pixels: Sequence[int], first: int = 0, stride: int = 1
) -> tuple[int, int]:
    """Write the encoded shards number first, first + stride, … of an index; those that are there already are kept.

    Returns how many samples were written and how many left out: of those the log names each with its reason.
    Raises: ValueError if `output` was begun with other settings.
    """
    output.mkdir(parents=True, exist_ok=True)
    _check_settings(output / _SETTINGS, index, encoder, max_pixels)
    readers = [Reader(index, pixels) for pixels in sorted(max_pixels)]
    rows_of: dict[int, list[int]] = {number: [] for number in range(first, len(index.shards), stride)}
    for i in range(len(index)):
        if (number := index[i].shard) in rows_of:
            rows_of[number].append(i)
    num_written = num_left_out = 0
    for number, rows in tqdm(rows_of.items(), unit="shard", disable=None if first == 0 else True):
        path = output / Path(index.shards[number]).name
        if path.exists():
            continue
        written = _encode_shard(path, readers, rows, encoder)
        num_written, num_left_out = num_written + written, num_left_out + len(rows) - written
    for reader in readers:
        reader.close()
    return num_written, num_left_out


def _encode_shard(path: Path, readers: Sequence[Reader], rows: Sequence[int], encoder: MemberEncoder) -> int:
    index, written = readers[0].index, 0
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            with TarWriter(file, user="", group="", mtime=0.0) as writer:
                for i in rows:
                    stem = index.key(i).removeprefix(f"{Path(index.shards[index[i].shard]).name}/")
                    try:
                        pictures = [reader.read_pixels(i) for reader in readers]
                        content = encoder.encode(pictures, readers[0].read_captions(i))
                        meta = readers[0].read_meta(i)
                    except ValueError as error:
                        log.warning("left out %s: %s", index.key(i), error)
                        continue
                    writer.write({"__key__": stem, EXTENSION: content, index[i].meta_extension: meta})
                    written += 1
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}; make room and run it again") from error
    finally:
        aside.unlink(missing_ok=True)
    return written


def _check_settings(path: Path, index: Index, encoder: MemberEncoder, max_pixels: Sequence[int]) -> None:
    settings = {
        "encoded_by": encoder.encoders.identity, "max_pixels": sorted(max_pixels), "store": str(encoder.dtype),
        "data": index.fingerprint,
    }  # fmt: skip
    if path.exists():
        if (before := json.loads(path.read_text())) != settings:
            changed = sorted(key for key in settings if before.get(key) != settings[key])
            raise ValueError(f"{path.parent} was begun with another {' and '.join(changed)}; give another --output")
        return
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(settings, indent=2) + "\n")
    os.replace(aside, path)


def main(cfg: Config) -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_main() else logging.WARNING)
    if cfg.store not in ("bfloat16", "float32"):
        raise ValueError(f"--store must be bfloat16 or float32, got {cfg.store!r}")
    device = torch.device("cuda", rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    auto = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    dtype = auto if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    encoders, cache = Encoders(cfg.model, torch.device(device), dtype), Path(cfg.cache_folder)
    shards = expand_shards(cfg.data, cfg.split, cache)
    index = build_index(shards, encoders.text.count_tokens, encoders.text.tokenizer_id, cache)
    encoder = MemberEncoder(encoders, getattr(torch, cfg.store))
    written, left_out = encode_shards(index, encoder, Path(cfg.output), cfg.max_pixels, rank(), num_ranks())
    print(
        f"rank {rank()}: {written} samples encoded, {left_out} left out, {encoders.text.num_truncated} captions cut, "
        f"{len(index.rejects)} samples not in the index"
    )


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
