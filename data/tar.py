"""The samples of a webdataset shard: a walk over the members of a tar that finds every cut and every damaged header."""

import os
import tarfile
from collections.abc import Iterator


def tar_samples(shard: str) -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """Yield (stem, {extension: (offset, content)}): by webdataset's rule, neighbours with one stem are one sample."""
    current, members = None, {}
    for stem, extension, offset, content in _tar_members(shard):
        if stem != current and members:
            yield current, members
            members = {}
        current = stem
        members[extension] = (offset, content)
    if members:
        yield current, members


def _tar_members(shard: str) -> Iterator[tuple[str, str, int, bytes]]:
    """Yield (stem, extension, offset, content) of each file in a tar, in order.

    Raises: ValueError if the tar is damaged or cut, also where the cut falls between two members: a whole tar ends in
    two blocks of zeros, and nothing but zeros follows them.
    """
    try:
        with open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            end = 0
            for member in archive:
                end = member.offset_data + (-(-member.size // 512) * 512 if member.isfile() else 0)
                if not member.isfile():
                    continue
                content = os.pread(file.fileno(), member.size, member.offset_data)
                if len(content) != member.size:
                    raise ValueError(f"shard {shard} is cut short inside {member.name}; copy it again")
                # A name that is not UTF-8 becomes one that is, and stays different from every other.
                name = member.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                folder, slash, base = name.rpartition("/")
                stem, _, extension = base.partition(".")
                yield folder + slash + stem, extension.lower(), member.offset_data, content
            file.seek(end)
            mark, after = file.read(1024), 0
            while not after and (block := file.read(1 << 20)):
                after = len(block) - block.count(0)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"shard {shard} cannot be read as a tar file: {error}") from error
    if mark != bytes(1024):
        raise ValueError(
            f"shard {shard} has no end mark (two blocks of zeros) at byte {end}: it is cut short between two members, "
            "or damaged there; copy it again"
        )
    if after:
        raise ValueError(f"shard {shard} goes on after its end mark at byte {end}: give joined tar files one by one")
