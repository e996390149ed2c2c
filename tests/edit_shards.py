"""Small shards of edits for tests: scenes of every kind, with none to three references."""

import random
from pathlib import Path

from webdataset import TarWriter

from data.edit_scenes import KINDS, composed_edit, scene_edit
from data.emoji_edits import pair_members


def write_edit_shard(path: Path, count: int, seed: int = 0, only: str = "") -> Path:
    """Write `count` edits, the kinds in turn; only: of one category, where that is not ""."""
    rng = random.Random(seed)
    kinds = [(scene_edit, kind) for kind in KINDS] + [(composed_edit, k) for k in ("combine", "combine_both", "draw")]
    with path.open("wb") as file, TarWriter(file, user="", group="", mtime=0.0) as writer:
        number = 0
        while number < count:
            for draw, kind in kinds:
                pair = draw(rng, kind)
                if number < count and only in ("", pair.category):
                    writer.write({"__key__": f"e{number:03d}", **pair_members(pair)})
                    number += 1
    return path
