"""CRC-32 checksums of tensors, to detect bytes that changed on disk, and digests of descriptions.

The checksum of a tensor is the text ``"crc32:"`` and eight hex digits for each block of ``BLOCK``
bytes, so that a slice can be verified without the rest. It covers the tensor's raw little-endian
bytes (of a shard: including its padding). Files of versions before 4, and merged ones, have eight
digits for the whole tensor, however long it is. CRC-32 detects every single flipped bit and every
damaged run of up to 32 bits, but no deliberate change. zlib computes it at several GB/s.

The digest of a file is the SHA-256 of its description: names, shapes and checksums.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

PREFIX = "crc32:"
BLOCK = 1 << 22  # bytes; a part of format version 4

_DIGITS = 8
_POLYNOMIAL = 0xEDB88320  # of CRC-32, in zlib's bit order: the lowest power is the highest bit
_ONE = 1 << 31
_PATTERN = re.compile(rf"{PREFIX}(?:[0-9a-f]{{{_DIGITS}}})+")


def is_checksum(text: str) -> bool:
    """Return whether ``text`` has the form of a checksum."""
    return _PATTERN.fullmatch(text) is not None


def written(*crcs: int) -> str:
    """Return the checksum text of the CRC-32s of all blocks, or of the whole."""
    return PREFIX + "".join(f"{crc:0{_DIGITS}x}" for crc in crcs or (0,))


def crcs_in(text: str) -> list[int]:
    """Return the CRC-32s in a checksum text."""
    digits = text.removeprefix(PREFIX)
    return [int(digits[i : i + _DIGITS], 16) for i in range(0, len(digits), _DIGITS)]


def room_for(nbytes: int) -> str:
    """Return a text as long as the checksum of so many bytes, to reserve room in a header."""
    return written(*[0] * -(-nbytes // BLOCK))


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of a tensor's bytes."""
    view = memoryview(data)
    return written(*(zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)))


def whole(crcs: Sequence[int], nbytes: int) -> int:
    """Return the CRC-32 of ``nbytes`` bytes from those of their blocks."""
    lengths = (min(BLOCK, nbytes - at) for at in range(0, nbytes, BLOCK))
    return combine(zip(crcs, lengths, strict=True))


def whole_of(text: str, nbytes: int) -> int | None:
    """Return the CRC-32 that a checksum states for ``nbytes`` bytes; None if it is for another
    number of bytes."""
    crcs = crcs_in(text)
    if len(crcs) == 1:
        return crcs[0]
    return whole(crcs, nbytes) if len(crcs) == -(-nbytes // BLOCK) else None


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of concatenated parts, from that and the number of bytes of each."""
    combined = 0
    for crc, length in parts:
        combined = _product(_power(length), combined) ^ crc
    return combined


def digest(description: bytes) -> str:
    """Return the digest of a file's description."""
    return f"sha256:{hashlib.sha256(description).hexdigest()}"


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
