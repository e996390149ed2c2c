"""What --data may name, and that nothing in it is ever run."""

import pytest
from braceexpand import braceexpand  # one of webdataset's own packages

from data.shards import _expand_braces, expand_shards
from data.versions import shard_versions
from tests.range_server import range_server
from tests.s3_server import KEYS, put, s3_server
from utils import byte_source


def expand(source):
    return expand_shards(str(source), "train", None)


@pytest.fixture
def folder(tmp_path):
    for name in ("a/x-000.tar", "a/x-001.tar", "a/x-002.tar", "a/notes.md", "b/y.tar", "b/deep/z.tar", "b/w{1}.tar"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return tmp_path


def test_local_names(folder):
    xs = [f"{folder}/a/x-00{i}.tar" for i in range(3)]
    assert expand(f"{folder}/a") == expand(f"{folder}/a/") == expand(f"{folder}/a/*.tar") == xs
    assert expand(f"{folder}/a/x-{{002..000}}.tar") == xs[::-1]
    assert expand(f"{folder}/a/x-00{{0,2}}.tar") == [xs[0], xs[2]]
    assert expand(f"{folder}/{{a/x-*,b/y}}.tar") == [*xs, f"{folder}/b/y.tar"]
    assert expand(f"{folder}/*/[y]*.tar") == [f"{folder}/b/y.tar"]
    assert expand(f"{folder}/b/w{{1}}.tar") == [f"{folder}/b/w{{1}}.tar"]  # a name that has braces


@pytest.mark.parametrize(
    "source, complaint",
    [
        ("nowhere", "no shards match.*give emoji-small"),
        ("a/x-{000..003}.tar", "no shards match.*x-003.tar"),
        ("a/x-{000..003.tar", "a brace without its partner"),
        ("a/x-{0..99999999}.tar", "more than 100000 shards"),
        ("empty.txt", "names no shard"),
        ("none.txt", "cannot be read"),
    ],
)
def test_what_is_not_there_is_refused(folder, source, complaint):
    (folder / "empty.txt").write_text("# nothing\n\n")
    with pytest.raises(ValueError, match=complaint):
        expand(f"{folder}/{source}")


def test_a_list_file(folder):
    listing = folder / "all.txt"
    listing.write_bytes(
        "\ufeff# comment\r\na/x-001.tar\r\n\r\n  /abs/y.tar \nhttps://host/z.tar\ns3://bucket/k.tar".encode()
    )
    expected = [f"{folder}/a/x-001.tar", "/abs/y.tar", "https://host/z.tar", "s3://bucket/k.tar"]
    assert expand(listing) == expected
    with range_server({"/set/all.txt": listing.read_bytes()}) as server:
        assert expand(f"{server.url}/set/all.txt") == [f"{server.url}/set/a/x-001.tar", *expected[1:]]


def test_https_needs_names():
    assert expand("https://host/x-{00..02}.tar") == [f"https://host/x-0{i}.tar" for i in range(3)]
    for source in ("https://host/x-*.tar", "https://host/folder/"):
        with pytest.raises(ValueError, match="does not list its files"):
            expand(source)


@pytest.mark.parametrize(
    "command", ["pipe:touch {}", " PIPE:touch {}", "| touch {}", "{}/$(touch {}).tar", "s3://b/`touch {}`.tar"]
)
def test_no_command_is_run(folder, command):
    witness = folder / "witness"
    command = command.replace("{}", str(witness))
    (folder / "list.txt").write_text(f"a/x-000.tar\n{command}\n")
    for source in (command, f"{folder}/list.txt"):
        try:
            shards = expand(source)
        except ValueError as error:
            assert "pipe" not in source.lower() or "is a shell command" in str(error)
        else:
            with pytest.raises(ValueError):
                shard_versions(shards[-1:], byte_source.Patience(0, stall_s=1, total_s=1))
    assert not witness.exists()


@pytest.mark.parametrize(
    "pattern",
    ["{000..011}", "{9..12}", "{08..12}", "{3..1}", "a{b,c{d,e{1..2}}f,}g{0..1}", "{a,b}{1..2}", "{0..0}", "x{,y}"],
)
def test_braces_mean_what_the_package_of_webdataset_says(pattern):
    assert list(_expand_braces(pattern)) == list(braceexpand(pattern))


def test_other_schemes_are_refused():
    for source in ("gs://bucket/a.tar", "file:///a.tar", "hf://x/a.tar"):
        with pytest.raises(ValueError, match="no reader for"):
            expand(source)


def test_s3_names(monkeypatch):
    with s3_server() as url:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": url}).items():
            monkeypatch.setenv(name, value)
        byte_source._store.cache_clear()
        put(url, "/bkt")
        keys = ["set/x-000.tar", "set/x-001.tar", "set/notes.md", "set/deep/y.tar", "setting/z.tar", "a%20b/q.tar"]
        for i, key in enumerate(keys):
            put(url, f"/bkt/{key}", bytes(i + 1))
        xs = ["s3://bkt/set/x-000.tar", "s3://bkt/set/x-001.tar"]
        assert expand("s3://bkt/set") == expand("s3://bkt/set/") == expand("s3://bkt/set/x-*.tar") == xs
        assert expand("s3://bkt/s*/?.tar") == ["s3://bkt/setting/z.tar"]
        assert expand("s3://bkt/a b") == ["s3://bkt/a b/q.tar"]
        assert expand("s3://bkt/set/x-{000..002}.tar") == [*xs, "s3://bkt/set/x-002.tar"]  # named, so not looked up
        for source, complaint in (("s3://bkt/none", "no shards match"), ("s3://b*/x.tar", "must be named")):
            with pytest.raises(ValueError, match=complaint):
                expand(source)
        with pytest.raises(ValueError, match="cannot be listed|no shards match"):
            expand("s3://no-such-bucket/x")
        # One listing says what one request a shard says.
        asked = shard_versions(xs)
        monkeypatch.setattr("data.versions._MIN_LISTED", 1)
        monkeypatch.setattr("data.versions._version", None)
        assert shard_versions(xs) == asked and [size for size, _ in asked] == [1, 2]
    byte_source._store.cache_clear()
