"""CRC-32 checksums of tensors, to detect bytes that changed on disk.

A checksum is the text ``"crc32:"`` and eight hex digits. It covers a tensor's raw little-endian
bytes (of a shard: including its padding). CRC-32 detects every single flipped bit and every damaged
run of up to 32 bits, but no deliberate change. zlib computes it at several GB/s.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from functools import lru_cache

PREFIX = "crc32:"
# The checksum of no bytes. It also reserves room in a header for a checksum not yet known.
EMPTY = f"{PREFIX}00000000"

_POLYNOMIAL = 0xEDB88320  # of CRC-32, in zlib's bit order: the lowest power is the highest bit
_ONE = 1 << 31
_PATTERN = re.compile(rf"{PREFIX}[0-9a-f]{{8}}")


def is_checksum(text: str) -> bool:
    """Return whether ``text`` has the form of a checksum."""
    return _PATTERN.fullmatch(text) is not None


def written(crc: int) -> str:
    """Return the checksum text of a CRC-32."""
    return f"{PREFIX}{crc:08x}"


def checksum(data: bytes | bytearray | memoryview) -> str:
    return written(zlib.crc32(data))


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of concatenated parts.

    Args:
        parts: CRC-32 and number of bytes of each, in order.
    """
    combined = 0
    for crc, length in parts:
        combined = _product(_power(length), combined) ^ crc
    return combined


# CRC-32 is a remainder of polynomials over bits: appending n bytes multiplies by x^(8 n).


@lru_cache(maxsize=4096)
def _power(num_bytes: int) -> int:
    """Return x^(8 * num_bytes) modulo the polynomial."""
    result, square, exponent = _ONE, _ONE >> 1, 8 * num_bytes
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Return a * b modulo the polynomial."""
    result = 0
    bit = _ONE
    while bit:
        if a & bit:
            result ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return result
