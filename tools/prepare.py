"""Make shards for training from captioned pictures: `python -m tools.prepare --input pictures --output shards`.

Takes folders (the caption of a.jpg in a.txt or a.json), CSV, TSV and JSONL files with paths or URLs, parquet files with
embedded pictures, and webdataset tars.  Each picture is scaled, never squashed, to the nearest size of a table of areas
and aspect ratios; what cannot be used is listed with its reason in rejects.jsonl; report.html shows what is there.

A table with the columns "references" (a list of paths or URLs, [] for none) and "target" holds edits, with
"instruction" or "instructions" and, where known, "mask", "actions" and "category".

Under torchrun each process does its share; the output does not depend on their number.  The same command again resumes.
"""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import torch.distributed as dist
import tyro

from data.aspect import AREAS, table
from data.index import build_index
from data.plan import DEFAULT_CONDITION_PIXELS
from data.row import Columns
from data.sources import fingerprint, open_sources, pieces
from parallel.distributed import is_main, num_ranks, rank
from tools.prepare_picture import FORMATS
from tools.prepare_progress import Progress
from tools.prepare_report import write_report
from tools.prepare_sample import MemberWriter, Recipe, raw_members
from tools.prepare_shards import (
    DUPLICATES,
    Output,
    find_repeated,
    load_repeated,
    make_shard,
    publish_shard,
    read_records,
)
from tools.prepare_state import begin, complete
from utils.config import parse, run_main

if TYPE_CHECKING:
    from model.text_encoder import TextEncoder  # slow to import, and not always needed

log = logging.getLogger("prepare")
_PATIENCE = timedelta(days=7)  # how long a rank that has done its share waits for the others


@dataclass(frozen=True)
class Config:
    # What to read.
    input: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH|GLOB|URL …")]  # folders, tables, parquet, tars
    output: str  # folder for the shards and the report
    name: str = "train"  # shards are called NAME-000000.tar …
    picture_column: str = ""  # of a table; empty = image, file_name, path, url …, the first that is there
    caption_columns: tuple[str, ...] = ()  # COLUMN or LANGUAGE:COLUMN; empty = caption, text, caption_zh … as they are
    category_column: str = "category"  # of a table or of .json captions
    source_column: str = "source"
    license_column: str = "license"
    keep_columns: tuple[str, ...] = ()  # copied into each sample's .json
    quotes: bool = True  # a cell of a CSV or TSV file may stand in double quotes
    category: str = ""  # of rows that name none
    source: str = ""
    license: str = ""
    # What to write.
    samples_per_shard: int = 1000  # rows of the input a shard
    areas: tuple[int, ...] = AREAS  # sides of squares in pixels; a picture goes to the largest that it fills
    every_area: bool = False  # to each that it fills instead, as samples of their own
    max_crop: float = 0.05  # the largest share of a picture that may be cut off
    max_enlargement: float = 1.0  # 1 = never enlarge; what is too small is left out
    format: str = "jpg"  # jpg, png or webp, for pictures that have to change
    quality: int = 95  # of jpg and webp
    encode: str = ""  # folder in the released layout: write VAE latents and text states, not pictures (data/encoded.py)
    duplicates: str = "perceptual"  # perceptual, exact (same file) or keep
    hash_distance: int = 4  # of 192 bits, up to which two pictures are the same
    # How to run.
    model: str = ""  # folder with tokenizer/: captions are counted in tokens, and the index is built
    cache_folder: str = ".cache"  # for the index
    condition_pixels: int = DEFAULT_CONDITION_PIXELS  # area at which the text encoder sees references: for the index
    num_workers: int = 2  # threads a process; more for URLs


# These do not decide what comes out.
_MAY_CHANGE = frozenset({"output", "cache_folder", "condition_pixels", "num_workers"})


def check(cfg: Config) -> None:
    """Raise ValueError for a value that cannot be."""
    for flag, value, allowed in (("format", cfg.format, FORMATS), ("duplicates", cfg.duplicates, DUPLICATES)):
        if value not in allowed:
            raise ValueError(f"--{flag} is one of {', '.join(allowed)}; got {value!r}")
    for flag, value, low, high in (
        ("max_crop", cfg.max_crop, 0, 0.5), ("max_enlargement", cfg.max_enlargement, 0.1, 100),
        ("quality", cfg.quality, 1, 100), ("hash_distance", cfg.hash_distance, 0, 24),
        ("num_workers", cfg.num_workers, 0, 1024),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ValueError(f"--{flag} must be from {low} to {high}, got {value}")
    if not cfg.name or any(character in cfg.name for character in "/.\0"):
        raise ValueError(f"--name begins the shards' file names: no dot and no slash, got {cfg.name!r}")
    if kept := {"references", "actions"} & {*cfg.keep_columns}:
        raise ValueError(f"--keep_columns {min(kept)}: that is what the .json of an edit has; rename the column")
    for area in cfg.areas:
        table(area)
    if not cfg.areas:
        raise ValueError(f"--areas names no area; the usual ones are {AREAS}")


def load_model(cfg: Config) -> tuple["TextEncoder | None", MemberWriter]:
    """Return what counts tokens, if a model is named, and what writes samples."""
    text, write = None, raw_members
    if cfg.model or cfg.encode:
        from model.text_encoder import TextEncoder

        text = TextEncoder.tokenizer_only(cfg.model or cfg.encode)
    if cfg.encode:
        from tools.prepare_encode import encode_members

        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", rank() % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
        write = encode_members(cfg.encode, device, torch.bfloat16 if on_gpu else torch.float32)
    return text, write


def main(cfg: Config) -> None:
    check(cfg)
    is_ours = not dist.is_initialized()
    if is_ours:
        alone = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo", timeout=_PATIENCE, **alone)
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_main() else logging.WARNING)
    prepare(cfg)
    if is_ours:
        dist.destroy_process_group()


def prepare(cfg: Config) -> None:
    """Do this rank's share; all ranks call it."""
    # ---- What there is, and who does what ----------------------------------------------------------------------------
    columns = Columns(
        cfg.picture_column, cfg.caption_columns, cfg.category_column, cfg.source_column, cfg.license_column,
        cfg.keep_columns,
    )  # fmt: skip
    sources = open_sources(cfg.input, columns, cfg.quotes)
    shards = pieces(sources, cfg.samples_per_shard)
    num_rows = sum(source.num_rows for source in sources)
    if not num_rows:
        raise ValueError(f"--input {' '.join(cfg.input)} has no rows")
    if cfg.encode and (tables := [source.location for source in sources if getattr(source, "has_edits", False)]):
        raise ValueError(f"{tables[0]} holds edits, which are read as pictures: prepare them without --encode")
    text, write = load_model(cfg)
    count_tokens = text.count_tokens if text else None
    output = Output(Path(cfg.output), cfg.name)
    state = begin(output, cfg, _MAY_CHANGE, fingerprint(sources), num_rows, len(shards))
    log.info("%d rows → %d shards in %s", num_rows, len(shards), output.folder)
    if state.is_complete:
        log.info("they are complete already; nothing to do")
        return

    # ---- Every shard for itself --------------------------------------------------------------------------------------
    recipe = Recipe(
        cfg.areas, cfg.every_area, cfg.max_crop, cfg.max_enlargement, cfg.format, cfg.quality,
        {"category": cfg.category, "source": cfg.source, "license": cfg.license}, bool(cfg.encode),
    )  # fmt: skip
    mine = range(rank(), len(shards), num_ranks())
    with Progress(sum(shards[n].stop - shards[n].start for n in mine), is_main(), num_ranks()) as progress:
        for number in mine:
            piece = shards[number]
            if output.records(number).exists():
                progress.skip(piece.stop - piece.start)
            else:
                make_shard(output, number, piece, recipe, write, count_tokens, cfg.num_workers, progress.advance)
    dist.barrier()

    # ---- What repeats, over all shards -------------------------------------------------------------------------------
    if is_main() and not output.repeated.exists():
        find_repeated(output, len(shards), cfg.duplicates, cfg.hash_distance)
    dist.barrier()
    for number in mine:
        publish_shard(output, number, load_repeated(output, shards[number]))
        if text:
            has_edits = any("references" in record for record in read_records(output, number))
            build_index(
                [str(output.shard(number))], text.count_tokens, text.counts_id(has_edits), Path(cfg.cache_folder),
                condition_pixels=cfg.condition_pixels if has_edits else None,
            )  # fmt: skip
    dist.barrier()

    # ---- What came of it ---------------------------------------------------------------------------------------------
    if is_main():
        report = write_report(output, cfg.name, sources, shards, recipe, counts_tokens=text is not None)
        complete(output, state, len(shards))
        print(report.summary())
    dist.barrier()


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
