"""What tells two versions of a shard apart: its size, and its ETag or time of modification."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from utils.byte_source import Patience, folder_versions, is_remote, open_source

Version = tuple[int, str]  # size in bytes; ETag of a remote shard, time of modification in ns of a local one
_NUM_REQUESTS = 32  # at once
_MIN_LISTED = 8  # shards of one s3 folder from which on listing the folder costs less than asking for each


def shard_versions(shards: Sequence[str], patience: Patience | None = None) -> list[Version]:
    """Return the present version of each shard.

    Raises: ValueError for one that is missing or cannot be read.
    """
    folders: dict[str, list[str]] = {}
    for shard in shards:
        if shard.startswith("s3://"):
            folders.setdefault(shard.rpartition("/")[0], []).append(shard)
    known: dict[str, Version] = {}
    for folder, members in folders.items():
        if len(members) >= _MIN_LISTED:
            known |= {f"{folder}/{name}": version for name, version in _listed(folder, patience).items()}
    if not any(map(is_remote, shards)):
        return [_version(shard, patience) for shard in shards]
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        return list(pool.map(lambda shard: known.get(shard) or _version(shard, patience), shards))


def _listed(folder: str, patience: Patience | None) -> dict[str, Version]:
    try:
        return folder_versions(folder, patience)
    except OSError:  # some keys may read but not list
        return {}


def _version(shard: str, patience: Patience | None) -> Version:
    try:
        if is_remote(shard):
            source = open_source(shard, patience)
            return source.size, source.version
        status = os.stat(shard)
    except OSError as error:
        raise ValueError(f"shard {shard} cannot be read: {error.strerror or error}") from error
    return status.st_size, str(status.st_mtime_ns)


def identity(shard: str) -> str:
    """Return the name that no other shard has: the URL, or the resolved path."""
    if is_remote(shard):
        return shard
    folder, name = os.path.split(shard)
    return os.path.join(_resolved(folder or "."), name)


_resolved = lru_cache(None)(os.path.realpath)  # ten thousand shards lie in few folders
