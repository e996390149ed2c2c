"""The cache of remote blocks: exact, bounded at every moment, shared, and indifferent to kills and full disks."""

import errno
import fcntl
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from data import shard_cache
from data.shard_cache import ShardCache

BLOCK = 1000
CONTENT = random.Random(0).randbytes(20_500)


class Source:
    """A remote file in memory that counts what is read of it."""

    size, version = len(CONTENT), '"first"'

    def __init__(self, location="https://host/a.tar", delay_s=0.0):
        self.location, self.delay_s, self.reads = location, delay_s, []

    def read_into(self, offset, buffer):
        time.sleep(self.delay_s)
        self.reads.append((offset, len(buffer)))
        buffer[:] = CONTENT[offset : offset + len(buffer)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(shard_cache, "BLOCK_BYTES", BLOCK)


def blocks(folder, partial=False):
    return [p for p in Path(folder).glob("??/*") if p.name.endswith(".partial") == partial]


def in_use(folder):
    sizes = {}
    for path in Path(folder).glob("??/*"):
        with suppress(FileNotFoundError):  # renamed since
            sizes[path.stat().st_ino] = path.stat().st_size
    return sum(sizes.values())


def noted(folder):
    return int.from_bytes((Path(folder) / "lock").read_bytes(), "little")


def test_ranges_are_exact_and_each_block_is_fetched_once(tmp_path):
    cache, source, rng = ShardCache(tmp_path, 10**6), Source(), random.Random(1)
    for _ in range(300):
        start, end = sorted(rng.sample(range(len(CONTENT) + 1), 2))
        assert cache.read(source, start, end - start) == CONTENT[start:end]
    assert sorted(source.reads) == [(i * BLOCK, min(BLOCK, len(CONTENT) - i * BLOCK)) for i in range(21)]
    assert in_use(tmp_path) == noted(tmp_path) == len(CONTENT)
    again = Source()  # another process, later
    assert ShardCache(tmp_path, 10**6).read(again, 0, len(CONTENT)) == CONTENT and not again.reads


def test_what_else_is_called_so_does_not_collide(tmp_path):
    cache = ShardCache(tmp_path, 10**6)
    sources = [Source(), Source("https://host/b/a.tar"), Source(), Source()]
    sources[2].version, sources[3].size = '"second"', 5000
    for source in sources:
        cache.read(source, 0, 10)
        assert source.reads == [(0, BLOCK)]
    assert len(blocks(tmp_path)) == 4


def test_the_least_recently_used_go_first_and_the_bound_holds(tmp_path):
    cache, source = ShardCache(tmp_path, 10 * BLOCK), Source()
    for number in range(10):
        cache.read(source, number * BLOCK, 5)
        for path in blocks(tmp_path):  # as if some time had passed
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**10))
    cache.read(source, 0, 5)  # used again
    for number in range(10, 20):
        cache.read(source, number * BLOCK, 5)
        assert in_use(tmp_path) == noted(tmp_path) <= 10 * BLOCK
    numbers = {int(p.name.rpartition("-")[2]) for p in blocks(tmp_path)}
    assert 1 not in numbers and 2 not in numbers and set(range(15, 20)) <= numbers
    source.reads.clear()
    cache.read(source, 0, 5)
    assert (0 in numbers) == (not source.reads)
    tiny = ShardCache(tmp_path / "tiny", BLOCK - 1)
    assert tiny.read(source, 1500, 3000) == CONTENT[1500:4500] and not blocks(tmp_path / "tiny")


def test_a_block_that_somebody_reads_is_not_taken_away(tmp_path):
    cache, source = ShardCache(tmp_path, 3 * BLOCK), Source()
    cache.read(source, 0, 5)
    [path] = blocks(tmp_path)
    os.utime(path, (0, 0))
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        for number in range(1, 9):
            assert cache.read(source, number * BLOCK, BLOCK) == CONTENT[number * BLOCK : (number + 1) * BLOCK]
        assert path.exists() and in_use(tmp_path) <= 3 * BLOCK
    cache.read(source, 9 * BLOCK, 5)
    assert not path.exists()


def test_threads_share_fetches(tmp_path):
    cache, source = ShardCache(tmp_path, 10**6), Source(delay_s=0.05)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda i: cache.read(source, 100 * i, 100), range(40)))
    assert b"".join(parts) == CONTENT[:4000] and len(source.reads) == 4


def _reads_at_random(folder, seed, results):
    shard_cache.BLOCK_BYTES = BLOCK
    cache, source, rng = ShardCache(folder, 6 * BLOCK), Source(), random.Random(seed)
    right = True
    for _ in range(400):
        start = rng.randrange(len(CONTENT) - 1500)
        right &= cache.read(source, start, 1500) == CONTENT[start : start + 1500]
    results.put(right)


def test_processes_share_a_cache_smaller_than_what_they_read(tmp_path):
    context = multiprocessing.get_context("fork")
    results, most = context.SimpleQueue(), 0
    processes = [context.Process(target=_reads_at_random, args=(tmp_path, seed, results)) for seed in range(3)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        with (tmp_path / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # nothing is added or taken away meanwhile, only renamed
            most = max(most, in_use(tmp_path))
    for process in processes:
        process.join()
    assert [results.get() for _ in processes] == [True] * 3
    assert 4 * BLOCK <= most <= 6 * BLOCK and not blocks(tmp_path, partial=True)


_STALLED = """
import sys, time
from data import shard_cache
from tests.test_shard_cache import Source
shard_cache.BLOCK_BYTES = {block}
source, cache = Source(delay_s=60), shard_cache.ShardCache({folder!r}, {limit})
print("ready", flush=True)
cache.read(source, 0, 10)
"""


def test_a_killed_fetch_is_taken_over_or_cleared_away(tmp_path):
    def killed():
        code = _STALLED.format(block=BLOCK, folder=str(tmp_path), limit=10**6)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
        process.stdout.readline()
        while not [p for p in blocks(tmp_path, partial=True) if p.stat().st_size]:
            time.sleep(0.01)
        return process

    process, cache = killed(), ShardCache(tmp_path, 10**6)
    assert blocks(tmp_path, partial=True)  # somebody is at work on it
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert cache.read(Source(), 5, 10) == CONTENT[5:15]  # taken over
    assert not blocks(tmp_path, partial=True) and in_use(tmp_path) == noted(tmp_path) == BLOCK
    blocks(tmp_path)[0].unlink()
    process = killed()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    ShardCache(tmp_path, 10**6)
    assert not blocks(tmp_path, partial=True) and noted(tmp_path) == 0


def test_nobody_waits_long_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_cache, "_PATIENCE_S", 0.1)
    cache, source = ShardCache(tmp_path, 10**6), Source()
    slow = Source(delay_s=1.0)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(cache.read, slow, 0, BLOCK)
        while not blocks(tmp_path, partial=True):
            time.sleep(0.01)
        assert cache.read(source, 5, 10) == CONTENT[5:15] and source.reads == [(5, 10)]
        with (tmp_path / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert cache.read(source, 5005, 10) == CONTENT[5005:5015] and source.reads[1:] == [(5005, 10)]
        assert pending.result() == CONTENT[:BLOCK]


def test_a_failed_fetch_leaves_nothing(tmp_path):
    cache, source = ShardCache(tmp_path, 10**6), Source()
    source.read_into = lambda offset, buffer: (_ for _ in ()).throw(OSError("no network"))
    with pytest.raises(OSError, match="no network"):
        cache.read(source, 0, 5)
    assert in_use(tmp_path) == noted(tmp_path) == 0 and not blocks(tmp_path, partial=True)
    assert cache.read(Source(), 0, 5) == CONTENT[:5]


@pytest.mark.parametrize("where", ["posix_fallocate", "pwrite", "rename", "mkdir"])
def test_a_full_disk_ends_the_cache_and_nothing_else(tmp_path, monkeypatch, caplog, where):
    monkeypatch.setattr("data.shard_cache.log.propagate", True)
    cache, source = ShardCache(tmp_path / "c", 10**6), Source()
    assert cache.read(source, 0, 5) == CONTENT[:5]

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, where, full)
    if where == "mkdir":
        cache = ShardCache(tmp_path / "d", 10**6)
    for number in range(1, 8):
        assert cache.read(source, number * BLOCK, 5) == CONTENT[number * BLOCK : number * BLOCK + 5]
    monkeypatch.undo()
    assert [m for m in caplog.messages if "No space left" in m and "reading goes on" in m] == caplog.messages[-1:]
    if where != "mkdir":
        assert in_use(tmp_path / "c") == BLOCK and not blocks(tmp_path / "c", partial=True)


def test_damage_of_the_disk_is_dropped(tmp_path):
    cache, source = ShardCache(tmp_path, 10**6), Source()
    cache.read(source, 0, 2500)
    for path in blocks(tmp_path):
        path.write_bytes(bytes(path.stat().st_size))
    assert cache.read(source, 1100, 10) == bytes(10)  # which the sample's checksum shows
    cache.drop(source, 900, 300)
    assert cache.read(source, 900, 300) == CONTENT[900:1200]
    assert cache.read(source, 2100, 10) == bytes(10)
    for path in blocks(tmp_path):
        os.truncate(path, 10)  # as after a power cut
    assert cache.read(source, 0, 2500) == CONTENT[:2500]
