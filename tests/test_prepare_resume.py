"""tools.prepare: equal for any number of ranks, resumable after kill -9 and a full disk, one process at a time."""

import dataclasses
import multiprocessing
import resource
import time

import pytest

from tests.collections_of_pictures import faulty_collection, files_of, prepare_config, records, write_collection
from tests.spawn import run_ranks
from tools import prepare, prepare_shards

pytestmark = pytest.mark.usefixtures("no_group_stays")


def _prepare(rank, world_size, cfg):
    prepare.main(cfg)


def test_one_and_two_ranks_write_the_same_bytes(tmp_path):
    source = faulty_collection(tmp_path / "in")
    prepare.main(prepare_config(source, tmp_path / "one", num_workers=0))
    run_ranks(_prepare, 2, prepare_config(source, tmp_path / "two", num_workers=3))
    one, two = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert list(one) == list(two) and len([name for name in one if name.endswith(".tar")]) == 6
    assert {name for name in one if one[name] != two[name]} == set()


def _prepare_slowly(cfg, delay_s):
    make = prepare_shards.make_sample

    def slow(*args):
        time.sleep(delay_s)
        return make(*args)

    prepare_shards.make_sample = slow
    prepare.main(cfg)


def _wait_for(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("when", ["in the first shard", "between", "in the last"])
def test_after_kill_9_at_most_one_shard_is_made_again(tmp_path, when, monkeypatch):
    source, output = faulty_collection(tmp_path / "in"), tmp_path / "out"
    cfg = prepare_config(source, output, num_workers=0)
    prepare.main(dataclasses.replace(cfg, output=str(tmp_path / "whole")))
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_prepare_slowly, args=(cfg, 0.03))
    process.start()
    work = output / ".work"
    done = {"in the first shard": 0, "between": 3, "in the last": 5}[when]
    try:
        _wait_for(lambda: len(list(work.glob("*.jsonl"))) >= done and list(work.glob("*.tar.*.tmp")))
    finally:
        process.kill()
        process.join()
    before = {path.name: path.stat() for path in work.iterdir() if path.suffix in (".tar", ".jsonl")}
    num_done = sum(name.endswith(".jsonl") for name in before)
    assert done <= num_done < 6 and not list(output.glob("*.tar"))
    begun = {path.name.split(".")[0] for path in work.glob("*.tar*")}
    assert len(begun) <= num_done + 1  # so at most one shard's work is lost
    made = []
    monkeypatch.setattr(prepare, "make_shard", lambda *a, f=prepare.make_shard: (made.append(a[1]), f(*a)))
    prepare.main(cfg)
    assert len(made) == 6 - num_done and not {f"train-{number:06d}.jsonl" for number in made} & before.keys()
    assert files_of(output) == files_of(tmp_path / "whole") and not work.exists()


def test_a_start_stopped_while_it_publishes_goes_on(tmp_path, monkeypatch):
    source, output = faulty_collection(tmp_path / "in"), tmp_path / "out"
    prepare.main(prepare_config(source, tmp_path / "whole"))
    publish = prepare.publish_shard

    def stop_at_3(output, number, repeated):
        if number == 3:
            raise KeyboardInterrupt
        publish(output, number, repeated)

    monkeypatch.setattr(prepare, "publish_shard", stop_at_3)
    with pytest.raises(KeyboardInterrupt):
        prepare.main(prepare_config(source, output))
    assert len(list(output.glob("*.tar"))) == 3
    monkeypatch.undo()
    prepare.main(prepare_config(source, output))
    assert files_of(output) == files_of(tmp_path / "whole")


def test_what_is_complete_stays_and_is_looked_after(tmp_path):
    source, output = write_collection(tmp_path / "in", "csv", records()), tmp_path / "out"
    prepare.main(prepare_config(source, output))
    before = files_of(output)
    prepare.main(prepare_config(source, output, num_workers=0))  # how it runs may change
    assert files_of(output) == before
    with pytest.raises(ValueError, match=r"another configuration:\n  --quality: 95 there, 80 here\nuse the same"):
        prepare.main(prepare_config(source, output, quality=80))
    shard = output / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    with pytest.raises(ValueError, match="train-000001.tar is of .* bytes, it was made with"):
        prepare.main(prepare_config(source, output))
    shard.unlink()
    with pytest.raises(ValueError, match="train-000001.tar is missing"):
        prepare.main(prepare_config(source, output))
    write_collection(tmp_path / "in", "csv", records(9))
    with pytest.raises(ValueError, match="the input has changed since .*: 7 rows then, 9 now"):
        prepare.main(prepare_config(source, output))


def test_a_full_disk_leaves_nothing_half_written_and_the_run_goes_on_later(tmp_path):
    source, output = write_collection(tmp_path / "in", "csv", records()), tmp_path / "out"
    prepare.main(prepare_config(source, tmp_path / "whole"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # then a write fails, as on a full disk
    try:
        with pytest.raises(ValueError, match="train-000000.tar cannot be written: .*same command again"):
            prepare.main(prepare_config(source, output))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in output.rglob("*")) == [".work", "lock", "prepare.json"]
    prepare.main(prepare_config(source, output))
    assert files_of(output) == files_of(tmp_path / "whole")


def test_two_at_once_in_one_folder(tmp_path):
    source, output = write_collection(tmp_path / "in", "csv", records()), tmp_path / "out"
    process = multiprocessing.get_context("forkserver").Process(
        target=_prepare_slowly, args=(prepare_config(source, output), 0.5)
    )
    process.start()
    try:
        _wait_for(lambda: (output / "prepare.json").exists())
        with pytest.raises(ValueError, match="another process is writing to"):
            prepare.main(prepare_config(source, output))
    finally:
        process.kill()
        process.join()
