"""The store that fails to order: checkpoints go through it, and each fault is met by who asks next."""

import os

import pytest

from parallel.checkpoint_storage import S3Storage
from tests.s3_server import KEYS, put, s3_server
from tools.faulty_store import faulty_store
from utils import byte_source
from utils.byte_source import Patience
from utils.fault_injection import STORE_VARIABLE, FaultInjector, parse_faults

HASTY = Patience(max_retries=3, first_wait_s=0.01, max_wait_s=0.02, stall_s=0.5, total_s=5)
CONTENT = os.urandom(300_000)


@pytest.fixture
def store(monkeypatch):
    """The proxy of an empty bucket."""
    with s3_server() as moto, faulty_store(moto) as proxy:
        put(moto, "/bucket")
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": proxy.url, STORE_VARIABLE: proxy.url}).items():
            monkeypatch.setenv(name, value)
        proxy.stall_s = 1.0
        byte_source._store.cache_clear()
        yield proxy
    byte_source._store.cache_clear()


def strike(what, folder):
    injector = FaultInjector(parse_faults(f"{what}@rank=0,step=1,phase=save"), 0, folder)
    injector.strike(1, "save")
    return injector


def test_every_fault_of_the_store(store, tmp_path):
    storage = S3Storage("s3://bucket/run", HASTY)
    for number, (what, expected) in enumerate(
        {"s3error=2": ["503"] * 2, "s3cut=1": ["cut"], "s3stall": ["stall"], "s3error=1": ["503"]}.items()
    ):
        store.struck.clear()
        strike(what, tmp_path / str(number))
        name = f"step-{number:08d}"
        storage.write(name, "a.bin", [CONTENT])
        assert store.struck == expected
        strike("s3cut=1", tmp_path / f"read {number}")  # now of what is read
        source, content = storage.open(name, "a.bin"), bytearray(len(CONTENT))
        source.read_into(0, memoryview(content))
        assert bytes(content) == CONTENT and storage.sizes(name) == {"a.bin": len(CONTENT)}
    injector = strike("s3denied", tmp_path / "denied")
    with pytest.raises(OSError, match="s3://bucket/run"):
        storage.write("step-00000009", "a.bin", [CONTENT])
    injector.end_phase()
    assert storage.sizes("step-00000009") == {}
    storage.delete("step-00000000")
    assert "step-00000000" not in storage.names()
    with pytest.raises(ValueError, match="one of 503"):
        store.order("flood", 1)


def test_a_fault_of_the_store_needs_one(monkeypatch, tmp_path):
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="s3cut@rank=0.*INJECT_FAULTS_STORE"):
        FaultInjector(parse_faults("s3cut@rank=0,step=1,phase=save"), 0, tmp_path)
