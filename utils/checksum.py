"""CRC-32 as of zlib and PNG, an order of magnitude faster where ISA-L is installed: 70 rather than 6 GB/s."""

try:
    from isal.isal_zlib import crc32, crc32_combine
except ImportError:  # no build for this machine
    from zlib import crc32

    def crc32_combine(first: int, second: int, num_bytes: int) -> int:
        """Return the checksum of two parts, one after the other, from theirs; num_bytes: of the second."""
        power, square = 1 << 31, 1 << 23  # x^0, and x^8 for a byte; polynomials modulo that of CRC-32, bits reversed
        while num_bytes:
            if num_bytes & 1:
                power = _multiply(square, power)
            square, num_bytes = _multiply(square, square), num_bytes >> 1
        return _multiply(power, first) ^ second


def _multiply(a: int, b: int) -> int:
    """Return a product of polynomials modulo that of CRC-32, bits reversed.  Source: zlib's multmodp."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b, bit = (b >> 1) ^ (0xEDB88320 if b & 1 else 0), bit >> 1
    return product


__all__ = ["crc32", "crc32_combine"]
