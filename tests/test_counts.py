"""What readers count of their troubles, for whoever watches the run."""

import pytest

from data.plan import every_language
from data.reader import Reader
from data.shard_cache import ShardCache
from tests.range_server import range_server
from tests.test_reader import damage, make_index
from utils.byte_source import Patience, open_source
from utils.counts import count, counts


@pytest.fixture
def counted():
    """Return {(name, kind): count} since the test began."""
    before = counts()
    return lambda: {key: n - before.get(key, 0) for key, n in counts().items() if n != before.get(key, 0)}


def test_names_and_kinds_are_counted_apart(counted):
    count("a")
    count("a", "b", amount=3)
    count("a", "b")
    assert counted() == {("a", ""): 1, ("a", "b"): 4}


def test_a_damaged_sample(tmp_path, counted):
    shard, index = make_index(tmp_path)
    damage(shard, index[4])
    reader = Reader(index)
    for _ in range(2):  # the second time it is known
        reader.read(every_language(index, 4)[0])
    seen = counted()
    attempts = seen["data_errors", "checksum"]
    assert attempts > 1  # each look at the wrong bytes, all but the first a retry
    assert seen == {
        ("data_errors", "checksum"): attempts, ("data_retries", ""): attempts - 1, ("data_errors", "bad_sample"): 1,
    }  # fmt: skip


def test_a_lost_shard(tmp_path, counted):
    shard, index = make_index(tmp_path)
    shard.unlink()
    reader = Reader(index)
    with pytest.raises(ValueError):
        reader.read(every_language(index, 4)[0])
    assert counted()["data_errors", "unreachable"] == 1


def test_a_request_that_fails_and_blocks_of_the_cache(tmp_path, counted):
    content = bytes(range(256)) * 40
    with range_server({"/a.tar": content}) as server:
        source = open_source(f"{server.url}/a.tar", Patience(first_wait_s=0.01, max_wait_s=0.02))
        server.faults = [503]
        cache = ShardCache(tmp_path, 10**8)
        for _ in range(3):
            assert cache.read(source, 100, 1000) == content[100:1100]
    assert counted() == {("data_retries", ""): 1, ("cache_misses", ""): 1, ("cache_hits", ""): 2}
