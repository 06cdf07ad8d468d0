"""Checksums of tensors (CRC-32), which find bytes that changed on disk.

A checksum is written as ``"crc32:"`` and eight hex digits, over a tensor's raw little-endian bytes
(of a shard: padding included). CRC-32 finds every flipped bit and all damage of up to 32 bits in a
row; it is no protection against someone who changes a file on purpose. zlib computes it at several
GB/s, faster than most disks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from functools import lru_cache

PREFIX = "crc32:"
# Of no bytes; a header also holds it before a tensor's checksum is known, since it is as long.
EMPTY = f"{PREFIX}00000000"

_POLYNOMIAL = 0xEDB88320  # CRC-32's, with the lowest power in the highest bit, as zlib has it
_ONE = 1 << 31
_PATTERN = re.compile(rf"{PREFIX}[0-9a-f]{{8}}")


def is_checksum(text: str) -> bool:
    """Return whether this is how a checksum is written."""
    return _PATTERN.fullmatch(text) is not None


def written(crc: int) -> str:
    """Write a CRC-32 as a checksum."""
    return f"{PREFIX}{crc:08x}"


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of these bytes."""
    return written(zlib.crc32(data))


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of joined bytes, from (CRC-32, number of bytes) of each part, in order."""
    joined = 0
    for crc, length in parts:
        joined = _product(_power(length), joined) ^ crc
    return joined


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
