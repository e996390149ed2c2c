"""Bytes of remote shards kept on a local disk: bounded in size, shared by all processes of a host.

Kept are blocks of BLOCK_BYTES, not shards: what is needed now waits for one block, never for a whole shard, and a shard
of which few samples are read costs few blocks.  A block is a file named by the hash of its shard's URL, size and ETag.

There is no server and nothing to repair: every state that a killed process can leave is a state that the others expect.
* `<block>.partial` is made, at its full size, before a byte is fetched: it reserves the room, finds a full disk early,
  and its lock (flock, which the kernel lifts when a process dies) tells the others that somebody is fetching.
* A whole block is renamed to `<block>`.  Readers hold a shared lock, so eviction passes over what is being read.
* `lock` holds the bytes in use, and is locked where that changes; every eviction counts anew, so it cannot drift.
What the disk itself damages is found by the checksum of the sample, and dropped by whoever found it.
"""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from utils.byte_source import RemoteFile
from utils.counts import count

log = logging.getLogger("train")
BLOCK_BYTES = 2 << 20  # some 20 ms at 100 MB/s: about as long as the wait for its first byte
_EVICT_TO = 0.9  # of the limit: one look at every file then serves many new ones
_TOUCH_S = 1.0  # how exact "least recently used" is
_PATIENCE_S = 10.0  # for another process that fetches the same block, or holds the lock; then without the cache
_POLL_S, _MAX_POLL_S = 0.001, 0.05
_PARTIAL = ".partial"


class ShardCache:
    """A folder of blocks, at most `max_bytes` in all, those that are being fetched included.

    Errors of the disk end the writing, with one warning, and never a run: reads then go to the source.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._writes = True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked() as file:  # also clears away what killed processes left
                _set_total(file, self._evict(max_bytes))
        except TimeoutError:
            pass
        except OSError as error:
            self._stop_writing(error)

    def read(self, source: RemoteFile, offset: int, size: int) -> bytes:
        """Return a range of a remote file; blocks of it that are not here are fetched, and kept.

        Raises: OSError, from the source.
        """
        parts, end = [], offset + size
        while offset < end:
            number, low = divmod(offset, BLOCK_BYTES)
            high = min(BLOCK_BYTES, low + end - offset)
            parts.append(self._part(source, number, low, high))
            offset += high - low
        return b"".join(parts)

    def drop(self, source: RemoteFile, offset: int, size: int) -> None:
        """Take the blocks of a range out: their bytes turned out to be damaged."""
        for number in range(offset // BLOCK_BYTES, (offset + size - 1) // BLOCK_BYTES + 1):
            try:
                with self._locked() as file:
                    path = self._path(source, number)
                    num_bytes = path.stat().st_size
                    path.unlink()
                    _set_total(file, _total(file) - num_bytes)
            except OSError:  # not there, or not ours to take
                pass

    def _part(self, source: RemoteFile, number: int, low: int, high: int) -> bytes:
        """Return bytes `low` to `high` of a block."""
        path, length = self._path(source, number), min(BLOCK_BYTES, source.size - number * BLOCK_BYTES)
        if (part := _read_block(path, length, low, high)) is not None:
            count("cache_hits")
            return part
        count("cache_misses")
        deadline, pause = time.monotonic() + _PATIENCE_S, _POLL_S
        while self._writes and time.monotonic() < deadline:
            try:
                partial = self._claim(path, length)
            except BlockingIOError:  # another thread or process is fetching it
                time.sleep(pause)
                pause = min(2 * pause, _MAX_POLL_S)
                if (part := _read_block(path, length, low, high)) is not None:
                    return part
                continue
            except TimeoutError:
                break
            except OSError as error:
                self._stop_writing(error)
                break
            if partial is None:
                break
            try:
                data = _read(source, number * BLOCK_BYTES, length)
            except BaseException:
                self._abandon(path, partial)
                raise
            self._publish(path, partial, data)
            return data[low:high]
        return _read(source, number * BLOCK_BYTES + low, high - low)

    def _claim(self, path: Path, length: int) -> int | None:
        """Reserve a block's room; return its partial file, open and locked, or None if there is no room to be made.

        Raises: BlockingIOError if somebody else is fetching it; TimeoutError; OSError of the disk.
        """
        with self._locked() as file:
            if _num_bytes(path) == length:
                raise BlockingIOError(f"{path} has just been written")
            path.parent.mkdir(exist_ok=True)
            name = path.with_name(path.name + _PARTIAL)
            partial = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not name.exists():
                    raise BlockingIOError(f"{path} has just been written")
                if os.fstat(partial).st_size == length:  # left by a process that was killed
                    return partial
                total = _total(file)
                if total + length > self.max_bytes:
                    total = self._evict(int(_EVICT_TO * self.max_bytes) - length)
                if total + length > self.max_bytes:
                    name.unlink()
                    _set_total(file, total)
                    os.close(partial)
                    return None
                try:
                    _reserve(partial, length)
                    _set_total(file, total + length)
                except OSError:
                    name.unlink()
                    raise
                return partial
            except BaseException:
                os.close(partial)
                raise

    def _publish(self, path: Path, partial: int, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(partial, memoryview(data)[written:], written)
            fcntl.flock(partial, fcntl.LOCK_SH)  # may be read from now on, but not yet taken away
            with self._locked():  # a count meanwhile could miss a file under both its names
                os.rename(path.with_name(path.name + _PARTIAL), path)
        except TimeoutError:  # a left-over, for others to clear away
            os.close(partial)
        except OSError as error:
            self._stop_writing(error)
            self._abandon(path, partial)
        else:
            os.close(partial)

    def _abandon(self, path: Path, partial: int) -> None:
        """Give a reserved room back."""
        try:
            with self._locked() as file:
                num_bytes = os.fstat(partial).st_size
                path.with_name(path.name + _PARTIAL).unlink()
                _set_total(file, _total(file) - num_bytes)
        except OSError:  # the next to evict does it
            pass
        finally:
            os.close(partial)

    def _evict(self, target: int) -> int:
        """Take blocks away, least recently used first, until `target` bytes are left; return how many are.

        What somebody reads or writes stays.  What a killed process left half-written goes first.
        """
        entries = []
        for folder in (entry.path for entry in os.scandir(self.folder) if entry.is_dir()):
            for entry in os.scandir(folder):
                status = entry.stat()
                entries.append((not entry.name.endswith(_PARTIAL), status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, _, size, _ in entries)
        for is_whole, _, size, path in sorted(entries):
            if is_whole and total <= target:
                break
            if _take_away(path):
                total -= size
        return total

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the folder; yield its file, whose content is the bytes in use.

        Raises: TimeoutError.
        """
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{self.folder}/lock is held by another process") from None
                    time.sleep(_POLL_S)
            yield file
        finally:
            os.close(file)  # which lifts the lock

    def _path(self, source: RemoteFile, number: int) -> Path:
        name = f"{source.location}\0{source.size}\0{source.version}"
        digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        return self.folder / digest[:2] / f"{digest}-{number}"

    def _stop_writing(self, error: OSError) -> None:
        if self._writes:
            self._writes = False
            log.warning("nothing more is kept in the shard cache %s: %s; reading goes on", self.folder, error)


def open_shard_cache(folder: Path, gib: float) -> ShardCache | None:
    """Return a cache of at most `gib` GiB, or None for 0.

    Raises: ValueError if it has no room for a block.
    """
    if 0 < gib * 2**30 < BLOCK_BYTES or gib < 0:
        raise ValueError(f"--shard_cache_gib {gib} holds no block of {BLOCK_BYTES >> 20} MiB; give more, or 0 for none")
    return ShardCache(folder, int(gib * 2**30)) if gib else None


def _read_block(path: Path, length: int, low: int, high: int) -> bytes | None:
    """Return bytes `low` to `high` of a block that is here, or None."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        status = os.fstat(file)
        if status.st_size != length:
            return None
        if time.time() - status.st_mtime > _TOUCH_S:
            os.utime(file)
        part = os.pread(file, high - low, low)
        return part if len(part) == high - low else None
    except OSError:  # being taken away, or the disk fails
        return None
    finally:
        os.close(file)


def _take_away(path: str) -> bool:
    """Remove a file unless somebody has locked it; return whether it was removed."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(file)


def _read(source: RemoteFile, offset: int, size: int) -> bytes:
    data = bytearray(size)
    source.read_into(offset, memoryview(data))
    return bytes(data)


def _num_bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _reserve(file: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(file, 0, length)
    else:
        os.ftruncate(file, length)


def _total(file: int) -> int:
    return int.from_bytes(os.pread(file, 8, 0), "little")


def _set_total(file: int, total: int) -> None:
    os.pwrite(file, max(0, total).to_bytes(8, "little"), 0)
