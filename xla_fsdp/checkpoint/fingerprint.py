"""Fingerprints of tensors, to find bytes that changed on disk. Pure.

Words: a *fingerprint* is ``"crc32:"`` and eight hex digits over a tensor's raw little-endian bytes
(of a shard: padding included); to *combine* is to get that of joined bytes from those of the parts.
Always true: combining gives what one pass over the joined bytes would have given, so parts may be
read in parallel, and a merged tensor's fingerprint follows from its pieces without reading it.
CRC-32 finds every flipped bit and every damage of up to 32 bits in a row; it is no protection
against someone who changes a file on purpose. zlib's runs at several GB/s, more than most disks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from functools import lru_cache

PREFIX = "crc32:"

EMPTY = f"{PREFIX}00000000"

"""Of no bytes; also what a header holds in a fingerprint's place before it is known."""

_POLYNOMIAL = 0xEDB88320  # CRC-32's, with the lowest power in the highest bit, as zlib has it

_ONE = 1 << 31

_PATTERN = re.compile(rf"{PREFIX}[0-9a-f]{{8}}")


def is_fingerprint(text: str) -> bool:
    """Whether this is how a fingerprint is written."""
    return _PATTERN.fullmatch(text) is not None


def written(checksum: int) -> str:
    """The fingerprint of bytes whose CRC-32 is ``checksum``."""
    return f"{PREFIX}{checksum:08x}"


def fingerprint(data: bytes | bytearray | memoryview) -> str:
    """The fingerprint of these bytes."""
    return written(zlib.crc32(data))


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of joined bytes, from (CRC-32, number of bytes) of each part, in order."""
    joined = 0
    for checksum, length in parts:
        joined = _product(_power(length), joined) ^ checksum
    return joined


# CRC-32 is a remainder of polynomials over bits: appending n bytes multiplies by x^(8 n).


@lru_cache(maxsize=4096)
def _power(num_bytes: int) -> int:
    """x^(8 * num_bytes) modulo the polynomial."""
    result, square, exponent = _ONE, _ONE >> 1, 8 * num_bytes
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result


def _product(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    result = 0
    bit = _ONE
    while bit:
        if a & bit:
            result ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return result
