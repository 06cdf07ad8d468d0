"""Fingerprints find damage, and those of parts give that of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from xla_fsdp.checkpoint.files.checksum import (
    BLOCK,
    checksum,
    combine,
    crcs_in,
    is_checksum,
    room_for,
    whole_of,
    written,
)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_parts_combine_to_the_whole(parts: list[bytes]) -> None:
    whole = combine((zlib.crc32(part), len(part)) for part in parts)
    assert written(whole) == checksum(b"".join(parts))


def test_large_parts_combine() -> None:
    parts = [bytes(1 << 20), b"x" * ((1 << 20) + 1)]
    joined = combine((zlib.crc32(part), len(part)) for part in parts)
    assert written(joined) == checksum(b"".join(parts))


def test_long_tensors_have_a_checksum_for_each_block() -> None:
    data = bytes(BLOCK) + b"x" * BLOCK + b"end"
    crcs = [zlib.crc32(data[at : at + BLOCK]) for at in (0, BLOCK, 2 * BLOCK)]
    text = checksum(data)
    assert text == "crc32:" + "".join(f"{crc:08x}" for crc in crcs)
    assert crcs_in(text) == crcs
    assert is_checksum(text)
    assert len(text) == len(room_for(len(data)))
    assert whole_of(text, len(data)) == zlib.crc32(data)
    assert whole_of(written(zlib.crc32(data)), len(data)) == zlib.crc32(data)  # of version 3
    assert whole_of(text, BLOCK) is None


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_flipped_bit_is_found(data: bytes, choose: st.DataObject) -> None:
    at = choose.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[at // 8] ^= 1 << at % 8
    assert checksum(data) != checksum(flipped)


def test_how_fingerprints_are_written() -> None:
    assert checksum(b"") == written()
    assert checksum(b"123456789") == "crc32:cbf43926"  # the check value of CRC-32
    for text in ("crc32:CBF43926", "crc32:cbf4392", "cbf43926", "crc32:cbf439266", "crc32:", ""):
        assert not is_checksum(text)
    assert is_checksum(written())
