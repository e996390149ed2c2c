"""Byte ranges are exact or an error, from a disk, a web server and an S3 store, whatever the network does."""

import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.range_server import STALL_S, range_server
from utils.byte_source import Patience, SourceChangedError, is_remote, open_source
from utils.quick_limit import QuickLimit

CONTENT = random.Random(0).randbytes(300_000)
HASTY = Patience(max_retries=3, first_wait_s=0.01, max_wait_s=0.02, stall_s=0.6, total_s=10)


@pytest.fixture
def server():
    with range_server({"/folder/a b.bin": CONTENT, "/folder/empty.bin": b""}) as running:
        yield running


def read(source, offset, length):
    buffer = bytearray(length)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def opened(server, patience=HASTY, pinned=None):
    return open_source(f"{server.url}/folder/a%20b.bin", patience, pinned)


def gets(server):
    return [request for request in server.requests if request[0] == "GET"]


def test_a_local_file(tmp_path):
    path = tmp_path / "a b.bin"
    path.write_bytes(CONTENT)
    source = open_source(path)
    assert (source.size, source.version, source.location) == (len(CONTENT), None, str(path))
    for start, end in ((0, 1), (7, 250_000), (len(CONTENT) - 1, len(CONTENT)), (5, 5), (0, len(CONTENT))):
        assert read(source, start, end - start) == CONTENT[start:end]
    os.truncate(path, 1000)
    with pytest.raises(OSError, match="a b.bin ends at byte 1000, 100 bytes early"):
        read(source, 900, 200)
    source.close()
    with pytest.raises(SourceChangedError, match="has 1000 bytes here, 1001 where"):
        open_source(path, pinned=(1001, None))
    open_source(path, pinned=(1000, None)).close()
    with pytest.raises(FileNotFoundError):
        open_source(tmp_path / "none.bin")


def test_ranges_of_a_web_server(server):
    source = opened(server)
    assert (source.size, source.version) == (len(CONTENT), '"first"')
    for start, end in ((0, 1), (7, 250_000), (len(CONTENT) - 1, len(CONTENT)), (5, 5), (0, len(CONTENT))):
        assert read(source, start, end - start) == CONTENT[start:end]
    assert open_source(f"{server.url}/folder/empty.bin", HASTY).size == 0
    # Nothing but what was asked for has been sent.
    assert [request[2] for request in gets(server)][:2] == ["bytes=0-0", "bytes=7-249999"]


def test_a_pinned_file_is_not_asked_for_its_size(server):
    assert read(opened(server, pinned=(len(CONTENT), '"first"')), 10, 20) == CONTENT[10:30]
    assert [request[0] for request in server.requests] == ["GET"]


@pytest.mark.parametrize("fault", [500, 502, 503, 429, "cut", "stall", "stutter"])
def test_passing_faults_are_tried_again(server, fault):
    source = opened(server)
    server.faults = [fault, fault]
    assert read(source, 1000, 200_000) == CONTENT[1000:201_000]
    # A small read starts anew after its first attempt; then obstore goes on where it was cut.
    last = "bytes=101000-200999" if fault in ("cut", "stutter") else "bytes=1000-200999"
    assert [request[2] for request in gets(server)] == ["bytes=1000-200999", "bytes=1000-200999", last]


@pytest.mark.parametrize("fault", ["cut", "stutter"])
def test_a_large_read_goes_on_where_it_was_cut(server, fault):
    large = server.files["/folder/large.bin"] = CONTENT * 8
    source = open_source(f"{server.url}/folder/large.bin", HASTY)
    server.faults = [fault]
    assert read(source, 1000, 2_200_000) == large[1000:2_201_000]
    assert [request[2] for request in gets(server)] == ["bytes=1000-2200999", "bytes=1101000-2200999"]


def test_a_stall_is_given_up_as_soon_as_answers_have_shown_how_quick_they_are(server):
    patience = replace(HASTY, stall_s=30.0, max_retries=1)  # which nobody else has: what was learnt is shared
    source = opened(server, patience)
    for _ in range(32):
        read(source, 0, 10)
    server.faults, started = ["stall"], time.monotonic()
    assert read(source, 1000, 2000) == CONTENT[1000:3000]
    assert 0.4 < time.monotonic() - started < STALL_S / 2
    server.faults = ["stall", 503]  # no more attempts than ever
    with pytest.raises(OSError, match="could not be read"):
        read(source, 1000, 2000)


def test_what_is_slow_is_waited_for():
    """Against the definition: four times what nine of ten take, up to a power of two, within bounds."""
    limit = QuickLimit(30.0)
    for _ in range(31):
        limit.note(0.01)
    assert limit.seconds == 30.0
    limit.note(0.01)
    assert limit.seconds == 0.5
    for n in range(128):
        limit.note(0.9 if n % 5 == 0 else 0.01)  # one of five: nine of ten take up to 0.9
    assert limit.seconds == 4.0
    for _ in range(128):
        limit.note(9.0)
    assert limit.seconds == 30.0


@pytest.mark.parametrize("fault", [500, "stall"])
def test_lasting_faults_end_in_an_error(server, fault):
    source, server.forever = opened(server), fault
    started = time.monotonic()
    with pytest.raises(OSError, match="a%20b.bin could not be read"):
        read(source, 0, 1000)
    assert time.monotonic() - started < 4 * HASTY.stall_s + STALL_S
    assert len(gets(server)) == 1 + HASTY.max_retries


def test_nobody_listens():
    with range_server({}) as server:
        url = server.url
    with pytest.raises(OSError, match="could not be read"):
        open_source(f"{url}/x.bin", HASTY)


@pytest.mark.parametrize("faults", [["changed"], ["grown"], ["cut", "changed"]])
def test_a_changed_file_is_an_error(server, faults):
    source = opened(server)
    server.faults = faults
    with pytest.raises(OSError) as caught:
        read(source, 1000, 200_000)
    if len(faults) == 1:
        assert isinstance(caught.value, SourceChangedError) and "changed while it was read" in str(caught.value)


def test_a_server_without_etags(server):
    server.has_etags = False
    source = opened(server)
    server.faults = ["cut", 500, "cut"]
    assert read(source, 1000, 200_000) == CONTENT[1000:201_000]
    server.faults = ["changed"]
    with pytest.raises(SourceChangedError):
        read(source, 1000, 200_000)


def test_refusals_are_not_tried_again(server):
    source = opened(server)
    for status, error in ((403, PermissionError), (401, PermissionError)):
        server.faults = [status]
        with pytest.raises(error, match="was refused"):
            read(source, 0, 10)
    server.faults = ["no_range"]
    with pytest.raises(OSError, match="[Rr]ange"):
        read(source, 5, 10)
    assert len(gets(server)) == 3
    with pytest.raises(FileNotFoundError, match="none.bin does not exist"):
        open_source(f"{server.url}/folder/none.bin", HASTY)


def test_several_reads_at_once(server):
    source, server.delay_s = opened(server), 0.1
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda i: read(source, i * 1000, 1000), range(16)))
    assert b"".join(parts) == CONTENT[:16_000]
    assert server.most_at_once == 8


def test_an_s3_object(server, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    source = open_source("s3://folder/a b.bin", HASTY)  # path style: /bucket/key
    assert (source.size, source.version) == (len(CONTENT), '"first"')
    server.faults = [503, "cut"]
    assert read(source, 1000, 200_000) == CONTENT[1000:201_000]
    signature = r"AWS4-HMAC-SHA256 Credential=someone/\d{8}/eu-north-1/s3/aws4_request, SignedHeaders=.*host.*"
    assert all(re.match(signature, request[3]) for request in server.requests)
    server.faults = ["changed"]
    with pytest.raises(SourceChangedError):
        read(source, 0, 10)
    with pytest.raises(FileNotFoundError, match="s3://folder/none.bin does not exist"):
        open_source("s3://folder/none.bin", HASTY)


def test_what_is_remote():
    assert is_remote("s3://bucket/key") and is_remote("https://host/a") and not is_remote("/a/b") and not is_remote("a")
    with pytest.raises(ValueError, match="no reader for gs://; use a local path or https, http, s3"):
        is_remote("gs://bucket/key")
    with pytest.raises(ValueError, match="a URL with a query"):
        open_source("https://host/a.bin?token=x")
