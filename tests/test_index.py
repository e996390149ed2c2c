"""The index against Python's own tarfile, and shards that are damaged in every place."""

import io
import json
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from data.index import build_index
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
    (ours, other) = (tmp_path / "cache" / "index").iterdir()
    whole = ours.read_bytes(), other.read_bytes()
    for damage in (lambda b: b[:-1], lambda b: b"", lambda b: b[: len(b) // 2] + b"?" + b[len(b) // 2 + 1 :]):
        for file, content in zip((ours, other), whole, strict=True):
            file.write_bytes(damage(content))
        calls.clear()
        assert index_of(tmp_path, shard, count=count).fingerprint == first.fingerprint and len(calls) == num_calls
    write_shard(shard, simple_samples(5))
    assert index_of(tmp_path, shard).fingerprint != first.fingerprint


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
    assert len(prints) == 1 and [f.suffix for f in (tmp_path / "cache" / "index").iterdir()] == [".npz"]
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
    assert "needs a picture and" in reasons["a.tar/alone"]
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
