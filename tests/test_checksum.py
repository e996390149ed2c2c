"""The fast CRC-32 against zlib's."""

import zlib

import numpy as np
import pytest

from utils.checksum import crc32


def test_the_standard_check_value():
    assert crc32(b"123456789") == 0xCBF43926  # of CRC-32/ISO-HDLC


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 4096, 1_000_003])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_equals_zlib_whole_and_in_pieces(size, kind):
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    data, cut = kind(content), size // 3
    assert crc32(data) == zlib.crc32(content)
    assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(content)
    assert crc32(memoryview(data)[cut:]) == zlib.crc32(content[cut:])


def test_takes_arrays_as_zlib_does():
    array = np.arange(1000, dtype=np.float32)
    assert crc32(array) == zlib.crc32(array)
