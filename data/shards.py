"""From what a user names to a list of shard files: on a disk, on a web server, in an S3 store.

No name ever reaches a shell.  webdataset's `pipe:` has no reader here and no flag allows it: a list of shards is data,
often somebody else's, and a flag that is set for one list runs the commands in the next.
"""

import glob
import itertools
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from data.emoji import build_emoji
from data.emoji_edits import build_edits
from utils.byte_source import is_remote, list_below, open_source

BUILT_IN = ("emoji-small", "emoji", "emoji-edits")
_LIST_EXTENSIONS = (".txt", ".list")
_MAX_SHARDS = 100_000  # a pair of braces can mean more names than fit into memory
_WILDCARD = re.compile(r"[*?[]")
_COMMAND = re.compile(r"\s*(pipe:|\|)", re.IGNORECASE)
_KINDS = f"{', '.join(BUILT_IN)}, a folder of .tar files, a pattern in quotes, or a .txt with one shard a line"


def expand_shards(source: str, split: str, cache_folder: Path) -> list[str]:
    """Return the shard files of `source` in a fixed order.

    source: one of BUILT_IN (built if need be); or, as a local path or an s3:// URL, a folder of .tar files, a
    pattern with `*`, `?` and `[…]` (none matches "/"), names in braces (`{000..127}`, `{a,b}`), or a list file; or, as
    an https:// URL, all of these but folders and patterns, for a web server does not say what it has.
    split: "train" or "validation", for the built-in sets.
    Raises: ValueError if nothing matches, for one of several names too, and for a command in place of a name.
    """
    if source in BUILT_IN:
        built = build_edits(cache_folder) if source == "emoji-edits" else build_emoji(source, cache_folder)
        return built.train_shards if split == "train" else built.validation_shards
    _refuse_commands(source)
    if not is_remote(source) and os.path.exists(source):  # as it stands, whatever characters it has
        names = [source]
    else:
        names = _in_braces(source)
    return [shard for name in names for shard in _expand(name)]


def _expand(name: str) -> list[str]:
    if name.endswith(_LIST_EXTENSIONS):
        return _listed(name)
    shards = matching_remote(name) if is_remote(name) else _matching_local(name)
    if not shards:
        raise ValueError(f"no shards match {name!r}; give {_KINDS}")
    return shards


def _matching_local(name: str) -> list[str]:
    if os.path.isfile(name):
        return [name]
    folder = Path(name)
    return sorted(glob.glob(os.path.join(glob.escape(name), "*.tar") if folder.is_dir() else name))


def matching_remote(url: str) -> list[str]:
    """Return the files that a URL names: itself, those that match its wildcards, or an s3:// folder's .tar files.

    Raises: ValueError if that takes a list which is not to be had.
    """
    is_pattern = bool(_WILDCARD.search(url))
    if not is_pattern and url.endswith(".tar"):
        return [url]
    if not url.startswith("s3://"):
        if not is_pattern and not url.endswith("/"):
            return [url]
        raise ValueError(f"{url}: a web server does not list its files; name them, in braces or in a .txt file")
    pattern = url if is_pattern else f"{url.rstrip('/')}/*.tar"
    folder = pattern[: _WILDCARD.search(pattern).start()].rpartition("/")[0]
    if folder.count("/") < 2:
        raise ValueError(f"{url}: the bucket must be named, without a pattern")
    try:
        found = [f"{folder}/{path}" for path in list_below(folder)]
    except OSError as error:
        raise ValueError(f"{url} cannot be listed: {error}") from error
    return sorted(name for name in found if _matches(name, pattern))


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _in_braces(source: str) -> list[str]:
    names = list(itertools.islice(_expand_braces(source), _MAX_SHARDS + 1))
    if len(names) > _MAX_SHARDS:
        raise ValueError(f"{source!r} names more than {_MAX_SHARDS} shards")
    return names


def _expand_braces(text: str) -> Iterator[str]:
    """Yield what `{000..127}` and `{a,b}` stand for, the last pair turning fastest, one inside another too."""
    before, opened, rest = text.partition("{")
    if not opened:
        if "}" in text:
            raise ValueError(f"{text!r} has a brace without its partner")
        yield text
        return
    depth, choices, start = 1, [], 0
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0 or (depth == 1 and character == ","):
            choices.append(rest[start:i])
            start = i + 1
        if depth == 0:
            break
    else:
        raise ValueError(f"{text!r} has a brace without its partner")
    for middle in _choices(choices):
        for after in _expand_braces(rest[start:]):
            yield before + middle + after


def _choices(choices: list[str]) -> Iterator[str]:
    if len(choices) == 1 and (numbers := re.fullmatch(r"(\d+)\.\.(\d+)", choices[0])):
        first, last = map(int, numbers.groups())
        digits = max(map(len, numbers.groups())) if any(re.match("0.", n) for n in numbers.groups()) else 0
        step = 1 if first <= last else -1
        for number in range(first, last + step, step):
            yield f"{number:0{digits}d}"
        return
    for choice in choices:
        yield from _expand_braces(choice)


def _listed(path: str) -> list[str]:
    """Return the shards of a list file: one a line, names without a folder lie beside it; # starts a comment line."""
    try:
        source = open_source(path)
        content = bytearray(source.size)
        source.read_into(0, memoryview(content))
        source.close()
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the list of shards {path} cannot be read: {error}") from error
    names = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not names:
        raise ValueError(f"the list {path} names no shard")
    for name in names:
        _refuse_commands(name)
    folder = path.rpartition("/")[0]
    return [name if is_remote(name) or os.path.isabs(name) or not folder else f"{folder}/{name}" for name in names]


def _refuse_commands(name: str) -> None:
    if _COMMAND.match(name):
        raise ValueError(
            f"{name!r} is a shell command; shards are read without a shell. Give s3://, https:// or a local path"
        )
