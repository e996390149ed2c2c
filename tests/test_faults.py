"""No silent loss: whatever happens to a shard or to its server, a sample is right byte for byte, or it is counted."""

import json
import logging
import random
import shutil
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import obstore
import pytest

from data.index import build_index
from data.loader import Loader
from data.order import GlobalOrder
from data.plan import BatchPlan, every_language
from data.reader import BadDataError, Reader
from data.shard_cache import ShardCache
from tests.range_server import range_server
from tests.s3_server import KEYS, put, s3_server
from tests.shards import simple_samples, write_shard
from tests.spawn import run_ranks
from utils import byte_source
from utils.byte_source import Patience

HASTY = Patience(max_retries=3, first_wait_s=0.01, max_wait_s=0.02, stall_s=0.3, total_s=5)
COUNT = 8


def words(text):
    return len(text.split()) + 5


def index_of(folder, *shards):
    return build_index([str(shard) for shard in shards], words, "t", Path(folder) / "cache")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("data.shard_bytes._FIRST_WAIT_S", 0.001)


@pytest.fixture
def shard(tmp_path):
    return write_shard(tmp_path / "a.tar", simple_samples(COUNT))


@pytest.fixture(scope="module")
def server():
    """One for many tests: the first request to another would cost a second."""
    with range_server({}) as running:
        yield running


def contents(reader):
    """Return {key: (captions, picture)} of every sample that can be read, and {key: reason} of the others."""
    right, bad = {}, {}
    for i in range(len(reader.index)):
        try:
            right[reader.index.key(i)] = reader.read_captions(i), reader.read_pixels(i).numpy().tobytes()
        except (ValueError, OSError) as error:
            bad[reader.index.key(i)] = str(error)
    return right, bad


def test_a_thousand_flips_after_indexing(tmp_path, shard):
    """A flip in a sample's bytes is found when that sample is read; any other changes no sample."""
    index, data, rng = index_of(tmp_path, shard), shard.read_bytes(), random.Random(0)
    expected, none_bad = contents(Reader(index))
    assert len(expected) == COUNT and not none_bad
    places = {}
    for i in range(COUNT):
        record = index[i]
        for start, size in ((record.image_offset, record.image_size), (record.meta_offset, record.meta_size)):
            places |= dict.fromkeys(range(start, start + size), record.key)
    found = 0
    for _ in range(1000):
        place = rng.randrange(len(data))
        with shard.open("r+b") as file:
            file.seek(place)
            file.write(bytes([data[place] ^ (1 << rng.randrange(8))]))
        reader = Reader(index)
        right, bad = contents(reader)
        assert list(bad) == ([places[place]] if place in places else [])
        assert right == {key: value for key, value in expected.items() if key not in bad}
        assert all("changed since they were indexed" in reason for reason in bad.values())
        found += len(bad)
        with shard.open("r+b") as file:
            file.seek(place)
            file.write(data[place : place + 1])
    assert 300 < found < 1000  # both kinds were tried


def test_a_thousand_flips_before_indexing(tmp_path, shard):
    """A flip in the tar's structure is an error, one in a sample's bytes another index; any other changes nothing."""
    index, data, rng = index_of(tmp_path, shard), shard.read_bytes(), random.Random(1)
    other, outcomes = tmp_path / "b" / "a.tar", {"refused": 0, "rejected": 0, "other index": 0, "harmless": 0}
    other.parent.mkdir()
    records = [index[i] for i in range(COUNT)]
    for number in range(1000):
        place = rng.randrange(len(data))
        other.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
        try:
            flipped = index_of(tmp_path / str(number), other)
        except ValueError as error:
            assert "a.tar" in str(error)
            outcomes["refused"] += 1
            continue
        finally:
            shutil.rmtree(tmp_path / str(number), ignore_errors=True)
        if flipped.rejects:
            outcomes["rejected"] += 1
        elif flipped.fingerprint != index.fingerprint:
            outcomes["other index"] += 1
        else:
            assert [flipped[i] for i in range(COUNT)] == records
            outcomes["harmless"] += 1
    assert all(outcomes.values()), outcomes


def cuts(shard, data):
    """Return {kind: place} of one cut of each kind, in the middle of the shard where there are several."""
    with tarfile.open(shard) as archive:
        members = archive.getmembers()
    member, last = members[len(members) // 2], members[-1]
    end = last.offset_data + -(-last.size // 512) * 512
    return {
        "in the name": member.offset + 3,
        "in the header": member.offset + 200,
        "after the header": member.offset_data,
        "in the data": member.offset_data + member.size // 2,
        "in the padding": member.offset_data + member.size + 1,
        "between members": members[len(members) // 2 + 1].offset,
        "in the last padding": last.offset_data + last.size + 1,
        "before the end mark": end,
        "in the end mark": end + 512,
        "near the end of the mark": end + 1023,
        "at the start": 0,
    }


def test_every_kind_of_cut(tmp_path, shard):
    """Before indexing the shard is refused; after it, exactly the samples behind the cut are found bad."""
    index, data = index_of(tmp_path, shard), shard.read_bytes()
    expected, _ = contents(Reader(index))
    for kind, place in cuts(shard, data).items():
        shard.write_bytes(data[:place])
        right, bad = contents(Reader(index))
        behind = {
            record.key
            for record in (index[i] for i in range(COUNT))
            if max(record.image_offset + record.image_size, record.meta_offset + record.meta_size) > place
        }
        assert set(bad) == behind, kind
        assert right == {key: value for key, value in expected.items() if key not in bad}, kind
        with pytest.raises(ValueError, match="a.tar"):
            index_of(tmp_path, shard)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("has_etags", [True, False])
@pytest.mark.parametrize(
    "faults",
    [
        ["flip", "flip"], ["cut", "cut"], ["unsized_cut"], ["stall"], ["stutter"], [503, 500, 429], [404], [403, 404],
        ["changed"], ["grown"], ["other_range"], ["slow"],
    ],
    ids=lambda faults: "+".join(map(str, faults)),
)  # fmt: skip
def test_passing_faults_of_a_server_are_healed(server, tmp_path, shard, faults, has_etags, cached):
    expected, _ = contents(Reader(index_of(tmp_path, shard)))
    server.files, server.has_etags = {"/a.tar": shard.read_bytes()}, has_etags
    index = index_of(tmp_path, f"{server.url}/a.tar")
    cache = ShardCache(tmp_path / "kept", 2**30) if cached else None
    server.faults = list(faults)
    assert contents(Reader(index, cache=cache, patience=HASTY)) == (expected, {})
    assert cached or not server.faults  # with a cache there is one request, for everything


@pytest.mark.parametrize("cached", [False, True])
def test_an_object_replaced_by_its_copy_is_the_same_data(tmp_path, shard, cached, caplog):
    logging.getLogger("train").propagate = True
    expected, _ = contents(Reader(index_of(tmp_path, shard)))
    with range_server({"/a.tar": shard.read_bytes()}) as server:
        index = index_of(tmp_path, f"{server.url}/a.tar")
        server.etag = "second"
        reader = Reader(index, cache=ShardCache(tmp_path / "kept", 2**30) if cached else None, patience=HASTY)
        assert contents(reader) == (expected, {})
        assert sum("changed while it was read" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("cached", [False, True])
def test_an_object_replaced_by_another_is_counted(tmp_path, shard, cached):
    data = shard.read_bytes()
    expected, _ = contents(Reader(index_of(tmp_path, shard)))
    with range_server({"/a.tar": data}) as server:
        index = index_of(tmp_path, f"{server.url}/a.tar")
        record, changed = index[3], bytearray(data)
        changed[record.image_offset + 50] ^= 1
        server.files["/a.tar"], server.etag = bytes(changed), "second"
        reader = Reader(index, cache=ShardCache(tmp_path / "kept", 2**30) if cached else None, patience=HASTY)
        right, bad = contents(reader)
        assert list(bad) == ["a.tar/s003"] and "changed since they were indexed" in bad["a.tar/s003"]
        assert right == {key: value for key, value in expected.items() if key not in bad}
        server.files["/a.tar"], server.etag = data[:2000], "third"  # and once more, cut short
        right, bad = contents(Reader(index, patience=HASTY))
        assert len(bad) == COUNT and all("changed" in r or "shorter" in r for r in bad.values())


@pytest.mark.parametrize("fault, reason", [(404, "does not exist"), (403, "was refused"), ("stall", "could not be")])
def test_a_lost_shard_is_counted_and_left_alone(tmp_path, fault, reason):
    """Its samples are replaced from other shards, with few requests, until the budget is used up."""
    shards = [write_shard(tmp_path / f"{n}.tar", simple_samples(20, n)) for n in "ab"]
    with range_server({f"/{shard.name}": shard.read_bytes() for shard in shards}) as server:
        index = index_of(tmp_path, *(f"{server.url}/{shard.name}" for shard in shards))
        server.requests.clear()
        server.by_path = {"/a.tar": fault}
        reader = Reader(index, max_bad_samples=10, patience=HASTY)
        for i in range(10):
            assert reader.read(every_language(index, i)[0]).key.startswith("b.tar/")
        assert list(reader.bad_samples) == [f"a.tar/a{i:03d}" for i in range(10)]
        assert all("its shard is lost" in r and reason in r for r in reader.bad_samples.values())
        assert sum(path == "/a.tar" for _, path, *_ in server.requests) <= 1 + HASTY.max_retries
        with pytest.raises(BadDataError, match="11 bad samples, over --max_bad_samples"):
            reader.read(every_language(index, 10)[0])


def test_a_shard_that_comes_back_is_read_again(tmp_path, shard, monkeypatch):
    with range_server({"/a.tar": shard.read_bytes()}) as server:
        index = index_of(tmp_path, f"{server.url}/a.tar")
        reader = Reader(index, patience=HASTY)
        server.forever = 404
        with pytest.raises(BadDataError, match="a.tar/s000 is bad"):
            reader.read(every_language(index, 0)[0])
        server.forever = None
        with pytest.raises(OSError, match="lost"):
            reader.read_pixels(1)
        monkeypatch.setattr("data.shard_bytes.time.monotonic", lambda: 10**9)
        assert reader.read(every_language(index, 1)[0]).key == "a.tar/s001"


def _steps_with_faults(rank, world_size, url, folder, peers):
    """Read 6 steps, each rank its own samples or, as peers, the same ones; return the keys and the bad ones."""
    import torch.distributed as dist

    index = index_of(folder, f"{url}/a.tar", f"{url}/b.tar")
    order = GlobalOrder(len(index), 8, seed=1)
    ranks = (1, 0) if peers else (world_size, rank)
    plan = BatchPlan(index, order, num_ranks=ranks[0], rank=ranks[1], max_tokens=60, seed=1, num_empty_tokens=5)

    def gather(value):
        values = [None] * world_size
        dist.all_gather_object(values, value)
        return values

    reader = Reader(index, patience=replace(HASTY, max_retries=8))
    record = index[3]  # which rank 1 alone cannot read

    def fail(shard, members, read=reader.shards.read):
        if rank == 1 and shard == record.shard and any(offset == record.image_offset for offset, *_ in members):
            raise ValueError("this rank's memory is bad")
        return read(shard, members)

    if peers:
        reader.shards.read = fail
    loader = Loader(reader, plan, 0, 2, 2, gather=gather if peers else None)
    steps = []
    for _ in range(6):
        micro_batches = loader.next_step()
        steps.append([[(s.key, s.plan.weight, zlib.crc32(s.read_pixels().numpy())) for s in m] for m in micro_batches])
        dist.barrier()
    loader.close()
    return steps, sorted(reader.bad_samples)


@pytest.fixture
def two_shards(tmp_path):
    shards = [write_shard(tmp_path / f"{n}.tar", simple_samples(12, n)) for n in "ab"]
    return {f"/{shard.name}": shard.read_bytes() for shard in shards}


def keys_of(results):
    return [sorted(key for steps, _ in results for m in steps[i] for key, weight, _ in m if weight) for i in range(6)]


def test_two_ranks_stay_in_step(tmp_path, two_shards):
    with range_server(two_shards) as server:
        undisturbed = run_ranks(_steps_with_faults, 2, server.url, tmp_path, False)
        rng = random.Random(3)
        faults = ["none"] * 12 + ["flip", "cut", "cut", "cut", 503, 503, 404, "unsized_cut"]
        server.faults = rng.choices(faults, k=400)
        disturbed = run_ranks(_steps_with_faults, 2, server.url, tmp_path, False)
        assert disturbed == undisturbed and not disturbed[0][1]
        # A sample that is bad for good is replaced by the same one, whichever rank reads it.
        server.faults = []
        record = index_of(tmp_path, f"{server.url}/a.tar")[5]
        server.damaged = {"/a.tar": record.image_offset + 40}
        one = run_ranks(_steps_with_faults, 1, server.url, tmp_path, False)
        two = run_ranks(_steps_with_faults, 2, server.url, tmp_path, False)
    assert keys_of(one) == keys_of(two) != keys_of(undisturbed)
    assert one[0][1] == ["a.tar/a005"]
    for results in (undisturbed, two):
        assert all(len(a) == len(b) for a, b in zip(results[0][0], results[1][0], strict=True))


def test_ranks_that_work_on_the_same_samples_agree(tmp_path, two_shards):
    with range_server(two_shards) as server:
        alone = run_ranks(_steps_with_faults, 1, server.url, tmp_path, True)
        first, second = run_ranks(_steps_with_faults, 2, server.url, tmp_path, True)
    assert first[0] == second[0] and "a.tar/a003" not in {key for step in first[0] for m in step for key, *_ in m}
    assert "a.tar/a003" in {key for step in alone[0][0] for m in step for key, *_ in m}
    assert first[1] == second[1] == ["a.tar/a003"]


def test_an_s3_store_with_faults(tmp_path, shard, monkeypatch):
    data = shard.read_bytes()
    expected, _ = contents(Reader(index_of(tmp_path, shard)))
    with s3_server() as moto, range_server({}) as proxy:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": moto}).items():
            monkeypatch.setenv(name, value)
        byte_source._store.cache_clear()
        put(moto, "/bkt")
        direct = byte_source._store("s3://bkt", HASTY)
        obstore.put(direct, "a.tar", data)
        byte_source._store.cache_clear()
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.upstream = moto
        index = index_of(tmp_path, "s3://bkt/a.tar")
        assert index.versions[0][0] == len(data)
        proxy.faults = ["flip", "cut", "none", 503, 500, "none", 404, "none", 403, "stall", "none", "stutter"]
        assert contents(Reader(index, patience=HASTY)) == (expected, {}) and not proxy.faults
        changed = bytearray(data)
        changed[index[2].image_offset + 60] ^= 4
        reader = Reader(index, patience=HASTY)
        assert reader.read(every_language(index, 0)[0]).key == "a.tar/s000"
        obstore.put(direct, "a.tar", bytes(changed))  # while it is in use
        right, bad = contents(reader)
        assert list(bad) == ["a.tar/s002"] and right == {k: v for k, v in expected.items() if k not in bad}
        obstore.delete(direct, "a.tar")
        reader = Reader(index, patience=HASTY)
        with pytest.raises(BadDataError, match="s000 is bad"):
            reader.read(every_language(index, 0)[0])
        assert "its shard is lost" in json.dumps(reader.bad_samples)
    byte_source._store.cache_clear()
