"""Exact bytes of the members of shards, wherever the shards lie: checked, and healed by reading again."""

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from data.shard_cache import ShardCache
from data.versions import Version
from utils.byte_source import ByteSource, Patience, SourceChangedError, is_remote, open_source
from utils.checksum import crc32
from utils.counts import count

log = logging.getLogger("train")
Member = tuple[int, int, int]  # offset and size in bytes, crc32
_MAX_OPEN_SHARDS = 64
_NUM_ATTEMPTS = 4  # to get the right bytes; faults of the network are tried again below this
_MIN_GAP = 65536  # bytes between two members of a sample (padding, a header) that are cheaper read than skipped
_FIRST_WAIT_S = 0.2
_LOST_S = 60.0  # so long nobody asks for a shard that could not be reached


class LostShardError(OSError):
    """A shard that cannot be reached: it is gone, access is refused, or its server does not answer."""


class _OpenShard:
    """A file open for reading, closed when the last thread has let go of it."""

    source: ByteSource | None = None

    def __init__(self, location: str, patience: Patience | None, version: Version | None):
        self.source = open_source(location, patience, version)

    def __del__(self):
        if self.source is not None:
            self.source.close()


class ShardBytes:
    """Reads members of `shards` by their number.  Safe to use from several threads.

    versions: what the remote ones were when they were indexed; without them, what they are when they are opened.
    cache: keeps what was read of remote ones.
    """

    def __init__(
        self,
        shards: Sequence[str],
        versions: Sequence[Version] | None = None,
        cache: ShardCache | None = None,
        patience: Patience | None = None,
    ):
        self._shards, self._cache, self._patience = shards, cache, patience
        self._is_remote = [is_remote(shard) for shard in shards]
        self._versions = {i: versions[i] for i, remote in enumerate(self._is_remote) if remote and versions}
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._lost: dict[int, tuple[str, float]] = {}  # shard → reason, time from which one reader may try again
        self._lock = threading.Lock()
        self.any_remote = any(self._is_remote)

    def read(self, shard: int, members: Sequence[Member]) -> list[memoryview]:
        """Return the members' contents.  Members that lie near each other arrive with one read, and share its memory.

        Wrong bytes are read again, not from the cache; so is a shard that was replaced, for its bytes may be the same.
        Raises: LostShardError; ValueError if the bytes are not what they were when they were indexed.
        """
        self._admit(shard)
        try:
            contents = self._read_until_right(shard, members)
        except (FileNotFoundError, PermissionError) as error:
            raise self._note_lost(shard, error) from error
        except OSError as error:
            if self._is_remote[shard]:
                raise self._note_lost(shard, error) from error
            raise ValueError(str(error)) from error  # a local file that was cut, or a bad place of the disk
        if self._lost:
            with self._lock:
                self._lost.pop(shard, None)
        return contents

    def _read_until_right(self, shard: int, members: Sequence[Member]) -> list[memoryview]:
        for attempt in range(_NUM_ATTEMPTS):
            if attempt > 1 and self._is_remote[shard]:  # the first time at once: a flipped bit is no sign of load
                time.sleep(_FIRST_WAIT_S * 2**attempt * random.random())
            if attempt:
                count("data_retries")
            try:
                contents = self._read_once(shard, members, fresh=attempt > 0)
            except (FileNotFoundError, PermissionError):
                if attempt + 1 == _NUM_ATTEMPTS:
                    raise
                continue
            except SourceChangedError as error:
                reason = str(error)
                count("data_errors", "changed")
                self._look_anew(shard, reason)
                continue
            if all(crc32(content) == right for content, (_, _, right) in zip(contents, members, strict=True)):
                return contents
            count("data_errors", "checksum")
            reason = f"its bytes in {self._shards[shard]} changed since they were indexed"
        raise ValueError(reason)

    def _read_once(self, shard: int, members: Sequence[Member], fresh: bool) -> list[memoryview]:
        """Read the members; fresh: neither from our cache nor from the kernel's, which may hold the wrong bytes."""
        held = self._opened(shard)  # a local file stays open as long as this does
        source, contents = held.source, [memoryview(b"")] * len(members)
        for group in _groups(members, max(_MIN_GAP, source.cheap_gap)):
            start = members[group[0]][0]
            size = max(members[i][0] + members[i][1] for i in group) - start
            if start + size > source.size:
                raise ValueError(f"{self._shards[shard]} is shorter than when it was indexed")
            if self._cache is not None and self._is_remote[shard]:
                if fresh:
                    self._cache.drop(source, start, size)
                data = memoryview(self._cache.read(source, start, size))
            else:
                if fresh:
                    source.forget(start, size)
                data = memoryview(np.empty(size, np.uint8))  # a bytearray would be filled with zeros first
                source.read_into(start, data)
            for i in group:
                offset, length, _ = members[i]
                contents[i] = data[offset - start : offset - start + length]
        return contents

    def _opened(self, shard: int) -> _OpenShard:
        with self._lock:
            if (held := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return held
        held = _OpenShard(self._shards[shard], self._patience, self._versions.get(shard))  # may ask a server
        with self._lock:
            held = self._open.setdefault(shard, held)
            if len(self._open) > _MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
        return held

    def _look_anew(self, shard: int, reason: str) -> None:
        """Take a shard for what it is now: whether its bytes are still right is for their checksums to say."""
        with self._lock:
            is_news = self._versions.pop(shard, None) is not None
            self._open.pop(shard, None)
        if is_news:
            log.warning("%s; reading on where the samples' checksums hold", reason)

    def _admit(self, shard: int) -> None:
        """Let a reader through to a shard; to one that could not be reached, one reader at a time, and not too often.

        Raises: LostShardError.
        """
        if not self._lost:
            return
        with self._lock:
            reason, again = self._lost.get(shard, ("", 0.0))
            if not reason:
                return
            if time.monotonic() < again:
                raise LostShardError(reason)
            self._lost[shard] = reason, time.monotonic() + _LOST_S

    def _note_lost(self, shard: int, error: OSError) -> LostShardError:
        reason = f"its shard is lost: {error}"
        count("data_errors", "unreachable")
        with self._lock:
            self._lost[shard] = reason, time.monotonic() + _LOST_S
        return LostShardError(reason)

    def is_lost(self, shard: int) -> bool:
        """Return whether a shard could not be reached when it was last tried."""
        return shard in self._lost

    def close(self) -> None:
        """Close every shard."""
        with self._lock:
            self._open.clear()


def _groups(members: Sequence[Member], gap: int) -> list[list[int]]:
    """Return the members' numbers, put together where at most `gap` bytes lie between two."""
    groups: list[list[int]] = []
    end = 0
    for i in sorted(range(len(members)), key=lambda i: members[i][0]):
        offset, size, _ = members[i]
        if groups and offset - end <= gap:
            groups[-1].append(i)
        else:
            groups.append([i])
        end = max(end, offset + size)
    return groups
