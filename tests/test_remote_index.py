"""An index of shards behind a web server is that of the same shards on a disk."""

import pytest

from data.index import build_index
from data.versions import shard_versions
from tests.range_server import range_server
from tests.shards import simple_samples, write_shard
from utils.byte_source import RemoteFile


def words(text):
    return len(text.split()) + 5


def index_of(tmp_path, *shards):
    return build_index([str(shard) for shard in shards], words, "t", tmp_path / "cache")


@pytest.fixture
def shard(tmp_path):
    return write_shard(tmp_path / "a.tar", simple_samples(12))


@pytest.fixture
def server(shard):
    with range_server({"/set/a.tar": shard.read_bytes()}) as running:
        yield running


@pytest.mark.parametrize("piece", [512, 5000, 2**23])
def test_records_are_those_of_the_local_shard(tmp_path, shard, server, monkeypatch, piece):
    """Pieces smaller than members, of no round size, and larger than the shard."""
    monkeypatch.setattr(RemoteFile, "request_bytes", piece)
    server.delay_s = 0.002
    local, remote = index_of(tmp_path, shard), index_of(tmp_path, f"{server.url}/set/a.tar")
    assert [remote[i] for i in range(12)] == [local[i] for i in range(12)]
    assert remote.fingerprint == local.fingerprint
    assert remote.versions == [(shard.stat().st_size, '"first"')]
    # Read once, and with several requests under way.
    assert len([r for r in server.requests if r[0] == "GET"]) == -(-shard.stat().st_size // piece)
    assert server.most_at_once > 1 or piece == 2**23


def test_the_cache_is_keyed_by_url_size_and_etag(tmp_path, shard, server):
    url = f"{server.url}/set/a.tar"
    first = index_of(tmp_path, url)
    server.requests.clear()
    assert index_of(tmp_path, url).fingerprint == first.fingerprint
    assert [r[0] for r in server.requests] == ["HEAD"]
    write_shard(shard, simple_samples(12, "t"))  # of the same size
    server.files["/set/a.tar"], server.etag = shard.read_bytes(), "second"
    assert index_of(tmp_path, url).key(0) == "a.tar/t000"
    server.files["/b/a.tar"] = server.files["/set/a.tar"] + bytes(512)
    assert index_of(tmp_path, f"{server.url}/b/a.tar").versions == [(shard.stat().st_size + 512, '"second"')]


def test_passing_faults_are_healed_and_lasting_ones_named(tmp_path, shard, server, monkeypatch):
    monkeypatch.setattr(RemoteFile, "request_bytes", 5000)
    server.faults = [503, "cut", 500, "cut", 200, 429]
    remote = index_of(tmp_path, f"{server.url}/set/a.tar")
    assert remote.fingerprint == index_of(tmp_path, shard).fingerprint
    with pytest.raises(ValueError, match="none.tar.*does not exist"):
        index_of(tmp_path, f"{server.url}/set/none.tar")
    server.files["/set/b.tar"] = shard.read_bytes()[:-11000]
    with pytest.raises(ValueError, match="b.tar.*cut"):
        index_of(tmp_path, f"{server.url}/set/b.tar")
    server.files["/set/c.tar"] = shard.read_bytes()
    version = shard_versions([f"{server.url}/set/c.tar"])
    server.etag = "second"
    monkeypatch.setattr("data.index.shard_versions", lambda shards: version)
    with pytest.raises(ValueError, match="c.tar.*changed while it was read"):
        index_of(tmp_path, f"{server.url}/set/c.tar")
