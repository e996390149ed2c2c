"""From what a user names, a data set, a folder or a glob, to a list of shard files."""

import glob
from pathlib import Path

from data.emoji import build_emoji

BUILT_IN = ("emoji-small", "emoji")


def expand_shards(source: str, split: str, cache_folder: Path) -> list[str]:
    """Return the shard files of `source` in a fixed order.

    source: "emoji-small" or "emoji" (built if need be), a folder of .tar files, or a glob.
    split: "train" or "validation", for the built-in sets.
    Raises: ValueError if nothing matches.
    """
    if source in BUILT_IN:
        built = build_emoji(source, cache_folder)
        return built.train_shards if split == "train" else built.validation_shards
    pattern = str(Path(source) / "*.tar") if Path(source).is_dir() else source
    shards = sorted(glob.glob(pattern))
    if not shards:
        raise ValueError(
            f"no shards match {pattern!r}; give {', '.join(BUILT_IN)}, a folder of .tar files or a glob in quotes"
        )
    return shards
