"""Reading: exact bytes, any number of threads, bad samples replaced alike everywhere."""

import logging
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from data.images import decode_image
from data.index import build_index
from data.loader import Loader
from data.order import GlobalOrder
from data.plan import BatchPlan, every_language
from data.reader import BadDataError, Reader
from data.word_filter import WordFilter
from tests.range_server import range_server
from tests.shards import picture_bytes, simple_samples, write_shard


def make_index(folder, count=12):
    shard = write_shard(folder / "a.tar", simple_samples(count))
    return shard, build_index([str(shard)], lambda text: len(text.split()) + 5, "t", folder / "cache")


def plan_of(index, batch=6, num_ranks=1, rank=0):
    order = GlobalOrder(len(index), batch, seed=1)
    return BatchPlan(index, order, num_ranks=num_ranks, rank=rank, max_tokens=60, seed=1, num_empty_tokens=5)


def contents(micro_batches):
    return [[(s.key, s.caption, s.plan, s.read_pixels().numpy().tobytes()) for s in micro] for micro in micro_batches]


def test_pixels_and_captions_are_the_samples(tmp_path):
    _, index = make_index(tmp_path)
    reader = Reader(index)
    for i in range(len(index)):
        expected = np.asarray(decode_image(picture_bytes(index[i].height, index[i].width, seed=i)))
        assert np.array_equal(reader.read_pixels(i).permute(1, 2, 0), expected)
        for planned, caption in zip(every_language(index, i), (f"thing {i}", f"东西{i}"), strict=True):
            assert reader.read(planned).caption == caption
            assert reader.read(replace(planned, drop_caption=True)).caption == ""


def test_any_number_of_threads_gives_the_same(tmp_path):
    _, index = make_index(tmp_path)
    results = []
    for workers, prefetch in ((0, 1), (1, 1), (2, 3), (4, 2)):
        loader = Loader(Reader(index), plan_of(index), 2, workers, prefetch)
        results.append([contents(loader.next_step()) for _ in range(6)])
        loader.close()
    assert all(result == results[0] for result in results)
    assert [s.plan for micro in Loader(Reader(index), plan_of(index), 2, 0).next_step() for s in micro] == [
        p for micro in plan_of(index).micro_batches(2) for p in micro
    ]


def test_known_latents_need_no_picture(tmp_path):
    _, index = make_index(tmp_path)
    loader = Loader(Reader(index), plan_of(index), 0, 2, 1, needs_pixels=lambda key: key.endswith("3"))
    samples = [s for micro in loader.next_step() for s in micro]
    assert all((s.pixels is not None) == s.key.endswith("3") for s in samples)
    assert all(s.read_pixels().shape[1:] == (s.plan.height, s.plan.width) for s in samples)
    loader.close()


@pytest.mark.parametrize("part", ["image", "meta"])
def test_a_flipped_byte_is_replaced_alike_on_every_world_size(tmp_path, part, caplog):
    shard, index = make_index(tmp_path)
    record = index[4]
    data = bytearray(shard.read_bytes())
    data[(record.image_offset if part == "image" else record.meta_offset) + 9] ^= 0x40
    shard.write_bytes(data)
    logging.getLogger("train").propagate = True

    def keys(num_ranks):
        found = Counter()
        for rank in range(num_ranks):
            loader = Loader(Reader(index), plan_of(index, num_ranks=num_ranks, rank=rank), 0, 0)
            for _ in range(4):
                for micro in loader.next_step():
                    found.update((s.plan.epoch, s.key, s.caption) for s in micro if s.plan.weight)
            if rank == 0 and num_ranks == 1:
                assert list(loader.reader.bad_samples) == ["a.tar/s004"]
        return found

    alone = keys(1)
    assert "a.tar/s004" not in {key for _, key, _ in alone} and alone.total() == 24
    assert keys(2) == alone == keys(3)
    assert sum("a.tar/s004" in message for message in caplog.messages) >= 1
    # The one in its place has the same size and no more text.
    planned = every_language(index, 4)[0]
    instead = Reader(index).read(planned)
    assert instead.key == "a.tar/s008" and instead.plan.num_tokens <= planned.num_tokens


def damage(shard, *records):
    data = bytearray(shard.read_bytes())
    for record in records:
        data[record.image_offset + 5] ^= 1
    shard.write_bytes(data)


def test_a_smaller_one_takes_the_place_where_none_is_of_its_size(tmp_path):
    shard, index = make_index(
        tmp_path, count=4
    )  # of 32 x 32, 32 x 64, 64 x 32 and 48 x 48 pixels: 4, 8, 8 and 9 tokens
    damage(shard, index[1], index[2])
    planned = every_language(index, 1)[1]
    instead = Reader(index).read(planned)  # 2 is as large but bad, 3 is too large
    assert instead.key == "a.tar/s000" and instead.plan.num_tokens <= planned.num_tokens
    assert (instead.plan.height, instead.plan.width, instead.plan.num_image_tokens) == (32, 32, 4)
    assert instead.pixels.shape == (3, 32, 32) and instead.caption == "东西0"


def test_a_dropped_caption_stays_dropped(tmp_path):
    shard, index = make_index(tmp_path)
    damage(shard, index[4])
    planned = replace(every_language(index, 4)[0], drop_caption=True, num_text_tokens=5, weight=0.0)
    instead = Reader(index).read(planned)
    assert (instead.key, instead.caption) == ("a.tar/s008", "")
    assert instead.plan == replace(planned, index=8)


def test_nothing_fits_in_its_place(tmp_path):
    shard, index = make_index(tmp_path, count=3)
    damage(shard, index[0])  # the smallest
    with pytest.raises(BadDataError, match="a.tar/s000.*11 tokens"):
        Reader(index).read(every_language(index, 0)[0])


def test_the_budget_of_bad_samples(tmp_path):
    shard, index = make_index(tmp_path)
    damage(shard, index[0], index[4], index[8])
    reader = Reader(index, max_bad_samples=2)
    with pytest.raises(BadDataError, match="3 bad samples.*--max_bad_samples.*a.tar/s008"):
        reader.read(every_language(index, 0)[0])
    loader = Loader(Reader(index, max_bad_samples=2), plan_of(index, batch=12), 0, 2)  # from a thread as well
    with pytest.raises(BadDataError):
        for _ in range(3):
            loader.next_step()
    loader.close()


def num_open(folder):
    """Return how many files of a folder this process has open."""
    return sum(os.path.realpath(f"/dev/fd/{n}").startswith(str(folder)) for n in os.listdir("/dev/fd"))


def test_more_shards_than_stay_open(tmp_path, monkeypatch):
    """Threads read on while others open and close shards."""
    monkeypatch.setattr("data.shard_bytes._MAX_OPEN_SHARDS", 2)
    shards = [write_shard(tmp_path / f"{n}.tar", simple_samples(4)) for n in range(8)]
    index = build_index([str(s) for s in shards], lambda text: 3, "t", tmp_path / "cache")
    heights = [index[i].height for i in range(len(index))]  # opens the index's own files
    reader, open_before = Reader(index), num_open(tmp_path)
    order = [i % 32 for i in range(0, 32 * 11 * 4, 11)]
    with ThreadPoolExecutor(4) as pool:
        pixels = list(pool.map(reader.read_pixels, order))
    for i, picture in zip(order, pixels, strict=True):
        expected = decode_image(picture_bytes(heights[i], index[i].width, seed=i % 4))
        assert np.array_equal(picture.permute(1, 2, 0), expected)
    assert num_open(tmp_path) == open_before + 2
    reader.close()
    assert num_open(tmp_path) == open_before


def test_captions_are_kept_within_bounds(tmp_path, monkeypatch):
    _, index = make_index(tmp_path)
    reader = Reader(index)
    first = reader.read_captions(3)
    assert reader.read_captions(3) is first
    monkeypatch.setattr("data.reader._MAX_CAPTION_BYTES", 2 * index[3].meta_size)
    for i in (4, 5, 6):
        reader.read_captions(i)
    assert reader.read_captions(3) is not first and reader.read_captions(3) == first


@pytest.mark.parametrize("count, batch, num_ranks", [(1, 4, 2), (3, 4, 2), (2, 2, 4), (12, 1, 3)])
def test_tiny_sets_and_batches(tmp_path, count, batch, num_ranks):
    """One shard on several ranks, fewer samples than a batch, fewer than ranks: the same samples, none waits."""
    _, index = make_index(tmp_path, count)
    for workers in (0, 1, 3):
        loaders = [Loader(Reader(index), plan_of(index, batch, num_ranks, r), 0, workers) for r in range(num_ranks)]
        for step in range(3):
            ranks = [loader.next_step() for loader in loaders]
            assert len({len(rank) for rank in ranks}) == 1 and all(micro for rank in ranks for micro in rank)
            seen = Counter((s.plan.epoch, s.plan.index) for rank in ranks for m in rank for s in m if s.plan.weight)
            assert seen == Counter((ref.epoch, ref.index) for ref in GlobalOrder(count, batch, 1).batch(step))
        for loader in loaders:
            loader.close()


def test_a_shard_cut_after_indexing_is_a_bad_sample_not_a_hang(tmp_path):
    shard, index = make_index(tmp_path)
    shard.write_bytes(shard.read_bytes()[: index[8].image_offset])
    reader = Reader(index)
    assert reader.read(every_language(index, 8)[0]).key == "a.tar/s000"
    assert list(reader.bad_samples) == ["a.tar/s008"]
    shard.unlink()
    gone = Reader(index)
    with pytest.raises(BadDataError):
        gone.read(every_language(index, 8)[0])
    assert list(gone.bad_samples) == ["a.tar/s008"]  # what else is in a lost shard is passed over without a look


def test_bad_settings_are_refused(tmp_path):
    _, index = make_index(tmp_path)
    with pytest.raises(ValueError, match="prefetch_steps"):
        Loader(Reader(index), plan_of(index), 0, 2, 0)


def test_what_was_read_ahead_of_a_sample_found_bad_meanwhile_is_not_taken_for_its_replacement(tmp_path):
    _, index = make_index(tmp_path)
    reader, planned = Reader(index), every_language(index, 4)[0]
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(reader.fetch, planned, lambda key: True)
    reader.note_bad(index.key(4), "another visit of it found that")
    sample, expected = reader.read(planned, fetched=fetched), reader.read(planned)
    assert sample.key == expected.key != index.key(4)
    assert sample.caption == expected.caption and sample.pixels.equal(expected.pixels)


def test_remote_samples_are_asked_for_well_before_their_turn(tmp_path, monkeypatch):
    """However small a step is; and what was asked for is dropped where the plan changes."""
    monkeypatch.setattr("data.loader._NUM_ASKED", 40)
    shard, _ = make_index(tmp_path)
    with range_server({"/a.tar": shard.read_bytes()}) as server:
        index = build_index([f"{server.url}/a.tar"], lambda text: len(text.split()) + 5, "t", tmp_path / "cache")
        server.requests.clear()
        loader = Loader(Reader(index), plan_of(index, batch=2), 0, 2, 1)
        expected = [contents(Loader(Reader(index), plan_of(index, batch=2), step, 0).next_step()) for step in (0, 9)]
        server.requests.clear()
        assert contents(loader.next_step()) == expected[0]
        loader.seek(9)
        assert contents(loader.next_step()) == expected[1]
        loader.close()
        # Two steps are decoded, and 40 samples asked for, before the plan changes and after.
        assert 2 * 2 + 40 <= len(server.requests) <= 2 * (2 * 2 + 40)


def test_where_all_is_refused_the_shards_are_not_to_blame(tmp_path):
    _, index = make_index(tmp_path)
    with pytest.raises(BadDataError, match="the instruction has 1 of the refused words .*--refused_words; shorten"):
        words = WordFilter(["thing", "东西"])
        Reader(index, check_caption=words.check).read(every_language(index, 0)[0])
