"""Checkpoints behind s3://: the same calls, whatever the server does."""

import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from parallel import checkpoint
from parallel.checkpoint_resume import load_weights
from parallel.checkpoint_saver import MODES, CheckpointSaver
from parallel.checkpoint_storage import S3Storage, open_storage
from tests.s3_server import KEYS, put, s3_server
from tests.test_checkpoint_saver import assert_loads, save, tensors_of
from utils import byte_source
from utils.byte_source import Patience

HASTY = Patience(max_retries=3, first_wait_s=0.01, max_wait_s=0.02, stall_s=0.3, total_s=5)


@pytest.fixture
def s3(monkeypatch):
    """An empty bucket of an S3 server."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with s3_server() as moto:
        put(moto, "/bucket")
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": moto}).items():
            monkeypatch.setenv(name, value)
        byte_source._store.cache_clear()
        yield moto
    byte_source._store.cache_clear()


def test_checkpoints_in_s3(s3, caplog):
    folder = "s3://bucket/runs/one/checkpoints"
    assert checkpoint.latest(folder) is None
    for mode in MODES:
        saver = CheckpointSaver(folder, mode, keep_last=2)
        for step in (1, 2, 3):
            save(saver, step + 10 * MODES.index(mode))
        saver.close()
    storage = open_storage(folder)
    assert isinstance(storage, S3Storage) and storage.names() == ["step-00000022", "step-00000023"]
    for step in (22, 23):
        assert_loads(folder, step)
    # A record is missing, or an object is damaged: as if it were not there.
    storage.write(
        "step-00000023", "rank-00000-00000.bin", [b"x" * storage.sizes("step-00000023")["rank-00000-00000.bin"]]
    )
    assert checkpoint.latest(folder) == 22 and "does not match its checksum" in caplog.text
    storage.write("step-00000024", "rank-00000-00000.bin", [b"of a save that was killed"])
    assert checkpoint.latest(folder) == 22
    saver = CheckpointSaver(folder, keep_last=1)
    save(saver, 24)
    saver.close()
    assert storage.names() == ["step-00000024"]
    assert_loads(folder, 24)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0.0).items()}
    assert load_weights("s3://bucket/runs/one", tensors, {}, "model") == 24
    assert torch.equal(tensors["model.a"], tensors_of(24.0)["model.a"])


def test_a_large_tensor_is_several_objects(s3, monkeypatch):
    """A PUT takes 5 GiB at most, so no object depends on how large a tensor is; here with a limit of 100 bytes."""
    monkeypatch.setattr(S3Storage, "file_bytes", 100)
    tensors = {
        "model.a": torch.arange(200.0).view(2, 100),  # a row is too much already
        "model.b": torch.arange(60.0).view(20, 3),
        "model.t": torch.arange(60.0).view(3, 20).T,  # not contiguous
        "model.u": torch.arange(90, dtype=torch.bfloat16).view(1, 1, 90),
        "model.empty": torch.zeros(0, 7),
        "step": torch.tensor(4.0),
    }
    checkpoint.save("s3://bucket/run", 1, tensors, {})
    saver = CheckpointSaver("s3://bucket/run", "thread")
    saver.save(2, tensors, {})
    saver.close()
    for step in (1, 2):
        sizes = open_storage("s3://bucket/run").sizes(f"step-0000000{step}")
        data = [size for file, size in sizes.items() if file.endswith(".bin")]
        assert max(data) <= 200 and sum(data) == 4 * (200 + 60 + 60 + 1) + 2 * 90
        loaded = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
        checkpoint.load("s3://bucket/run", step, loaded)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


class _FaultyPuts(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.server.faults.pop(0) if self.server.faults else self.server.forever
        if fault == "stall":
            time.sleep(0.5)
        if fault in ("stall", "cut"):
            self.close_connection = True
            return
        self.server.bodies.append(body if fault is None else fault)
        self.send_response(fault or 200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def puts(monkeypatch):
    """A server that takes PUTs, with faults in the first of them."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _FaultyPuts) as server:
        server.daemon_threads, server.faults, server.forever, server.bodies = True, [], None, []
        server.handle_error = lambda *_: None  # a client that gave up is no news
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}).items():
            monkeypatch.setenv(name, value)
        byte_source._store.cache_clear()
        yield server
        server.shutdown()
    byte_source._store.cache_clear()


def test_a_put_is_tried_again(puts):
    storage = S3Storage("s3://bucket/run", HASTY)
    puts.faults = [503, "cut", 500]
    storage.write("step-00000001", "a.bin", [b"some", b"thing"])
    assert puts.bodies == [503, 500, b"something"]
    puts.faults = ["stall"]
    storage.write("step-00000001", "b.bin", [b"more"])
    assert puts.bodies[-1] == b"more"


def test_a_put_that_always_fails_is_an_error(puts):
    puts.forever = 503
    started = time.monotonic()
    with pytest.raises(OSError, match="s3://bucket/run"):
        S3Storage("s3://bucket/run", HASTY).write("step-00000001", "a.bin", [b"something"])
    assert time.monotonic() - started < 5 and puts.bodies == [503] * 4
