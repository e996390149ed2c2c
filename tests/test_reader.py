"""Reading: exact bytes, any number of threads, bad samples replaced alike everywhere."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from data.images import decode_image
from data.index import build_index
from data.order import GlobalOrder
from data.plan import BatchPlan, every_language
from data.reader import BadDataError, Loader, Reader
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
        found = {}
        for rank in range(num_ranks):
            loader = Loader(Reader(index), plan_of(index, num_ranks=num_ranks, rank=rank), 0, 0)
            for _ in range(4):
                for micro in loader.next_step():
                    found |= {(s.plan.epoch, s.key): s.plan.num_tokens for s in micro if s.plan.weight}
            if rank == 0 and num_ranks == 1:
                assert list(loader.reader.bad_samples) == ["a.tar/s004"]
        return found

    alone = keys(1)
    assert "a.tar/s004" not in {key for _, key in alone}
    assert keys(2) == alone == keys(3)
    assert sum("a.tar/s004" in message for message in caplog.messages) >= 1
    # The one in its place has the same size and no more text.
    planned = every_language(index, 4)[0]
    instead = Reader(index).read(planned)
    assert instead.key == "a.tar/s008" and instead.plan.num_tokens <= planned.num_tokens


def test_nothing_fits_in_its_place(tmp_path):
    shard, index = make_index(tmp_path, count=3)  # three different sizes
    data = bytearray(shard.read_bytes())
    data[index[1].image_offset + 5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BadDataError, match="a.tar/s001.*32 x 64"):
        Reader(index).read(every_language(index, 1)[0])


def test_a_shard_cut_after_indexing_is_a_bad_sample_not_a_hang(tmp_path):
    shard, index = make_index(tmp_path)
    shard.write_bytes(shard.read_bytes()[: index[8].image_offset])
    reader = Reader(index)
    assert reader.read(every_language(index, 8)[0]).key == "a.tar/s000"
    assert list(reader.bad_samples) == ["a.tar/s008"]


def test_bad_settings_are_refused(tmp_path):
    _, index = make_index(tmp_path)
    with pytest.raises(ValueError, match="prefetch_steps"):
        Loader(Reader(index), plan_of(index), 0, 2, 0)
