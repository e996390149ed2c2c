"""The index against Python's own tarfile, and shards that are damaged in every place."""

import io
import json
import os
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

import data.index
from data.column_file import map_columns
from data.index import build_index
from data.index_part import Kind
from tests.shards import picture_bytes, simple_samples, write_shard


def words(text: str) -> int:
    return len(text.split()) + 5


def index_of(tmp_path, *shards, count=words, tokenizer="t"):
    return build_index([str(s) for s in shards], count, tokenizer, tmp_path / "cache")


def test_records_point_at_the_bytes(tmp_path):
    a = write_shard(tmp_path / "a.tar", simple_samples(5))
    b = write_shard(tmp_path / "b.tar", simple_samples(3, "t"))
    index = index_of(tmp_path, a, b)
    assert len(index) == 8 and not index.rejects
    assert [index[i].key for i in (0, 4, 5)] == ["a.tar/s000", "a.tar/s004", "b.tar/t000"]
    for i in range(8):
        record = index[i]
        shard = (a, b)[record.shard]
        with tarfile.open(shard) as archive:
            stem = record.key.split("/")[1]
            png, meta = archive.extractfile(f"{stem}.png").read(), archive.extractfile(f"{stem}.json").read()
        data = shard.read_bytes()
        assert data[record.image_offset : record.image_offset + record.image_size] == png
        assert data[record.meta_offset : record.meta_offset + record.meta_size] == meta
        assert (record.image_crc32, record.meta_crc32) == (zlib.crc32(png), zlib.crc32(meta))
        captions = json.loads(meta)["captions"]
        assert record.caption_tokens == {lang: tuple(words(c) for c in captions[lang]) for lang in ("en", "zh")}
    assert (index[1].height, index[1].width, index[1].group) == (32, 64, "b")
    with pytest.raises(IndexError):
        index[8]


def test_cache_is_used_verified_and_keyed(tmp_path):
    shard = write_shard(tmp_path / "a.tar", simple_samples(4))
    calls = []

    def count(text):
        calls.append(text)
        return words(text)

    first = index_of(tmp_path, shard, count=count)
    num_calls = len(calls)
    assert index_of(tmp_path, shard, count=count).fingerprint == first.fingerprint and len(calls) == num_calls
    index_of(tmp_path, shard, count=count, tokenizer="other")
    assert len(calls) == 2 * num_calls
    records = [first[i] for i in range(4)]
    assert [first[i] for i in range(4)] == records and len(calls) == 2 * num_calls
    files = {file: file.read_bytes() for file in (tmp_path / "cache" / "index").iterdir()}
    assert sorted(file.suffix for file in files) == [".part", ".part", ".summary", ".summary"]
    # Damage at every place: of the summary alone, of parts alone, of all; what needs no part looks at none.
    whole = dict(files)
    length = max(map(len, whole.values()))
    for place in [*range(0, length, 7), length - 1]:
        for suffixes in ((".summary",), (".part",), (".summary", ".part")):
            for file, content in whole.items():
                flipped = content[:place] + bytes([content[min(place, len(content) - 1)] ^ 1]) + content[place + 1 :]
                file.write_bytes(flipped[: len(content)] if file.suffix in suffixes else content)
            index = index_of(tmp_path, shard, count=count)
            assert index.fingerprint == first.fingerprint and len(index) == 4
            assert [index[i] for i in range(4)] == records
    for damage in (lambda b: b[:-1], lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b + b"?"):
        for file, content in whole.items():
            file.write_bytes(damage(content))
        calls.clear()
        index = index_of(tmp_path, shard, count=count)
        assert [index[i] for i in range(4)] == records and len(calls) == num_calls
    write_shard(shard, simple_samples(5))
    assert index_of(tmp_path, shard).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "samples, message",
    [
        (simple_samples(5), "a.tar has .* bytes here, .* where it was looked up first"),
        (simple_samples(4, prefix="b"), "a.tar is not what it was when this run began"),
    ],
    ids=["another size", "the same size"],
)
def test_a_shard_that_changes_under_a_run_is_an_error(tmp_path, samples, message):
    shard = write_shard(tmp_path / "a.tar", simple_samples(4))
    index = index_of(tmp_path, shard)
    part = next((tmp_path / "cache" / "index").glob("*.part"))
    part.unlink()
    write_shard(shard, samples)
    with pytest.raises(ValueError, match=message):
        index[0]


def test_the_index_stays_small_in_memory_and_reads_only_the_parts_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr("data.index._MAX_OPEN_PARTS", 2)
    shards = [write_shard(tmp_path / f"{n}.tar", simple_samples(3, f"{n}-")) for n in range(6)]
    index_of(tmp_path, *shards)
    opened = []
    monkeypatch.setattr(
        "data.index_part.IndexPart.open",
        classmethod(lambda cls, path, verify: opened.append(verify) or cls(map_columns(path, verify))),
    )
    index = index_of(tmp_path, *shards)
    assert len(index) == 18 and index.fingerprint and not index.rejects and not opened
    descriptors = len(os.listdir("/dev/fd"))
    for _ in range(2):
        assert [index.key(i) for i in range(18)] == [f"{n}.tar/{n}-{i:03d}" for n in range(6) for i in range(3)]
    assert opened == [True] * 6 + [False] * 6  # a checksum is compared once
    assert len(os.listdir("/dev/fd")) <= descriptors + 2
    assert index.spread(4, max_shards=2) == [0, 1, 2, 9] and index.spread(100) == list(range(18))


def test_samples_are_found_by_kind(tmp_path):
    samples = simple_samples(6) + [{"key": "only", "captions": {"en": "x"}, "category": "b"}]
    shards = [write_shard(tmp_path / "a.tar", samples), write_shard(tmp_path / "b.tar", simple_samples(1, "t"))]
    index = index_of(tmp_path, *shards)
    both = ("en", "zh")
    assert index.summary.kinds == [("a", both, False), ("b", ("en",), False), ("b", both, False)]
    for kinds in ([Kind("b", both)], [Kind("b", ("en",)), Kind("a", both)], [Kind("c", both)]):
        wanted = [tuple(kind) for kind in kinds]
        records = [index[i] for i in range(len(index))]
        found_in = [(record.group, tuple(sorted(record.caption_tokens)), False) for record in records]
        expected = [i for i, kind in enumerate(found_in) if kind in wanted]
        counts = index.summary.count(kinds).tolist()
        found = [index.of_kinds(s, frozenset(kinds), place) for s in range(2) for place in range(counts[s])]
        assert found == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_share_the_work_and_agree(tmp_path, num_ranks, monkeypatch):
    shards = [str(write_shard(tmp_path / f"{n}.tar", simple_samples(2, f"{n}-"))) for n in range(6)]
    alone = build_index(shards, words, "t", tmp_path / "alone")
    ranks = range(num_ranks)
    begun, together, index_shard = [], Barrier(num_ranks), data.index._index_shard

    def slowly(shard, version, *how):
        if len(begun) < num_ranks:  # all ranks are at their first shard at a time
            begun.append(shards.index(shard))
            together.wait(timeout=20)
        return index_shard(shard, version, *how)

    monkeypatch.setattr("data.index._index_shard", slowly)
    with ThreadPoolExecutor(num_ranks) as pool:
        indices = list(pool.map(lambda rank: build_index(shards, words, "t", tmp_path / "c", rank, num_ranks), ranks))
    assert {index.fingerprint for index in indices} == {alone.fingerprint}
    assert sorted(begun) == [rank * 6 // num_ranks for rank in ranks]


def test_a_shard_cut_anywhere_is_refused(tmp_path):
    """Inside and between headers, contents, padding, samples, and inside the end mark itself."""
    shard = write_shard(tmp_path / "a.tar", simple_samples(3))
    data = shard.read_bytes()
    with tarfile.open(shard) as archive:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in archive)
    for block in range(0, end + 1024, 512):
        for cut in (block, block + 1, block + 300):
            if cut < end + 1024:
                shard.write_bytes(data[:cut])
                with pytest.raises(ValueError, match="a.tar"):
                    index_of(tmp_path, shard)
    shard.write_bytes(data[: end + 1024])  # the padding after the end mark may be missing
    assert len(index_of(tmp_path, shard)) == 3


def test_a_damaged_header_and_a_joined_tar_are_refused(tmp_path):
    shard = write_shard(tmp_path / "a.tar", simple_samples(4))
    data = shard.read_bytes()
    with tarfile.open(shard) as archive:
        headers = [m.offset for m in archive]
    for header in headers:
        shard.write_bytes(data[: header + 3] + bytes([data[header + 3] ^ 1]) + data[header + 4 :])
        with pytest.raises(ValueError, match="a.tar"):
            index_of(tmp_path, shard)
    shard.write_bytes(data + data)
    with pytest.raises(ValueError, match="a.tar goes on after its end mark"):
        index_of(tmp_path, shard)


def test_an_empty_shard_has_no_samples(tmp_path):
    index = index_of(tmp_path, write_shard(tmp_path / "a.tar", []))
    assert len(index) == 0 and not index.rejects and index.fingerprint


def test_one_name_twice_and_names_of_any_kind(tmp_path):
    """A sample's key is its identity for noise and caches: no two may share one."""
    members = {"png": picture_bytes(32, 32), "json": b'{"caption": "x"}'}
    other = {"png": picture_bytes(48, 48), "json": b'{"caption": "y"}'}
    samples = [("dir/one", members), ("two", members), ("dir/one", other), ("一", other), ("x" * 200, members)]
    shard = write_shard(tmp_path / "a.tar", [{"key": key, "members": m} for key, m in samples])
    data = shard.read_bytes()
    index = index_of(tmp_path, shard)
    assert [index.key(i) for i in range(4)] == ["a.tar/dir/one", "a.tar/two", "a.tar/一", "a.tar/" + "x" * 200]
    assert index.rejects == [("a.tar/dir/one", "an earlier sample has the same name")] and index[0].height == 32
    with tarfile.open(shard, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        for extension, content in members.items():
            info = tarfile.TarInfo(f"caf\u00e9.{extension}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert index_of(tmp_path, shard).key(0) == "a.tar/caf\\xe9"
    assert shard.read_bytes() != data


def test_a_picture_is_its_plain_extension(tmp_path):
    members = {"mask.png": picture_bytes(16, 16), "png": picture_bytes(48, 48), "json": b'{"caption": "x"}'}
    index = index_of(tmp_path, write_shard(tmp_path / "a.tar", [{"key": "a", "members": members}]))
    assert index[0].height == 48


def test_a_cut_picture_is_rejected_or_read_but_never_stops_the_rest(tmp_path):
    whole, meta = picture_bytes(32, 32), b'{"caption": "x"}'
    cuts = [{"key": f"c{n}", "members": {"png": whole[:n], "json": meta}} for n in (0, 4, 20, 40, len(whole) // 2)]
    index = index_of(
        tmp_path, write_shard(tmp_path / "a.tar", [*cuts, {"key": "w", "members": {"png": whole, "json": meta}}])
    )
    assert len(index) + len(index.rejects) == 6 and index.key(len(index) - 1) == "a.tar/w"


def test_several_at_once_and_a_folder_that_cannot_be(tmp_path):
    shard = write_shard(tmp_path / "a.tar", simple_samples(8))
    with ThreadPoolExecutor(8) as pool:
        prints = set(pool.map(lambda _: index_of(tmp_path, shard).fingerprint, range(16)))
    assert len(prints) == 1 and sorted(f.suffix for f in (tmp_path / "cache" / "index").iterdir()) == [
        ".part",
        ".summary",
    ]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--cache_folder"):
        build_index([str(shard)], words, "t", tmp_path / "file")


def test_what_cannot_be_used_is_rejected_with_its_reason(tmp_path):
    good, meta = picture_bytes(32, 32), json.dumps({"captions": {"en": ["x"]}}).encode()
    shard = write_shard(
        tmp_path / "a.tar",
        [
            {"key": "fine", "members": {"png": good, "json": meta}},
            {"key": "alone", "members": {"png": good}},
            {"key": "text", "members": {"png": b"no picture at all", "json": meta}},
            {"key": "empty", "members": {"png": good, "json": b'{"captions": {"en": ["", "  "]}}'}},
            {"key": "broken", "members": {"png": good, "json": b"{"}},
            {"key": "plain", "members": {"jpg": picture_bytes(16, 48, kind="JPEG"), "txt": "一只狗".encode()}},
        ],
    )
    index = index_of(tmp_path, shard)
    assert [index[i].key for i in range(len(index))] == ["a.tar/fine", "a.tar/plain"]
    assert index[1].caption_tokens == {"zh": (6,)} and (index[1].height, index[1].width) == (16, 48)
    reasons = dict(index.rejects)
    assert "needs a picture or .safetensors, and" in reasons["a.tar/alone"]
    assert "not a readable picture" in reasons["a.tar/text"]
    assert "no caption" in reasons["a.tar/empty"]
    assert "json cannot be read" in reasons["a.tar/broken"]


def test_missing_shards_and_equal_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere.tar"):
        index_of(tmp_path, tmp_path / "nowhere.tar")
    (tmp_path / "x").mkdir()
    a, b = write_shard(tmp_path / "a.tar", simple_samples(1)), write_shard(tmp_path / "x" / "a.tar", simple_samples(1))
    with pytest.raises(ValueError, match="two shards are called a.tar"):
        index_of(tmp_path, a, b)
    (tmp_path / "n.tar").write_bytes(b"not a tar" * 1000)
    with pytest.raises(ValueError, match="n.tar"):
        index_of(tmp_path, tmp_path / "n.tar")
