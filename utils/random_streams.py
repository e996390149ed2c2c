"""Random numbers that belong to a sample: a pure function of (seed, epoch, sample, purpose), never of the rank."""

import hashlib

import torch


def stream_seed(seed: int, epoch: int, sample_id: int | str, purpose: str) -> int:
    """Return a 63-bit seed, uncorrelated between any two different argument tuples."""
    digest = hashlib.blake2b(f"{seed}\0{epoch}\0{sample_id}\0{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(seed: int, epoch: int, sample_id: int | str, purpose: str) -> float:
    """Return one number in [0, 1), with 53 random bits."""
    return (stream_seed(seed, epoch, sample_id, purpose) >> 10) / 2**53


def torch_generator(seed: int, epoch: int, sample_id: int | str, purpose: str) -> torch.Generator:
    """Return a CPU generator: the numbers drawn from it are the same on every kind of device."""
    return torch.Generator("cpu").manual_seed(stream_seed(seed, epoch, sample_id, purpose))
