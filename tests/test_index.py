"""The index against Python's own tarfile, and shards that are damaged in every place."""

import json
import tarfile
import zlib

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
    for file in (tmp_path / "cache" / "index").iterdir():
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 0xFF
        file.write_bytes(damaged)
    assert index_of(tmp_path, shard, count=count).fingerprint == first.fingerprint and len(calls) == 3 * num_calls
    write_shard(shard, simple_samples(5))
    assert index_of(tmp_path, shard).fingerprint != first.fingerprint


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.5, 0.77, 0.9, 0.999])
def test_a_shard_cut_anywhere_is_refused(tmp_path, share):
    shard = write_shard(tmp_path / "a.tar", simple_samples(6))
    data = shard.read_bytes()
    with tarfile.open(shard) as archive:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in archive)
    shard.write_bytes(data[: int(end * share)])
    with pytest.raises(ValueError, match="a.tar"):
        index_of(tmp_path, shard)


def test_a_shard_cut_between_two_members_is_refused(tmp_path):
    shard = write_shard(tmp_path / "a.tar", simple_samples(6))
    with tarfile.open(shard) as archive:
        cuts = [m.offset for m in archive][1:]
    data = shard.read_bytes()
    for cut in cuts:
        shard.write_bytes(data[:cut])
        with pytest.raises(ValueError, match="cut short"):
            index_of(tmp_path, shard)


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
