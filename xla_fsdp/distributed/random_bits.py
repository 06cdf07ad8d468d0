"""Random bits that are a function of where they are used, for rounding.

A *salt* is a number for one use (a seed, a step, a parameter, a rank); the bits of an element are a
hash of the salt and the element's number, by the 32-bit finalizer "lowbias32" of Chris Wellons'
hash prospector (github.com/skeeto/hash-prospector), here in two's complement.
Invariants: no random number generator is read or moved on, so nobody else's random numbers change
and a step that is repeated rounds in the same way. Salts are inputs of a program, not constants in
it: it is compiled once.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_MASK = 0xFFFFFFFF


def salt_of(*parts: int) -> int:
    """Return one signed 32-bit number for the given ones (of any size, in this order)."""
    salt = 0
    for part in parts:
        for word in (part & _MASK, (part >> 32) & _MASK):
            salt = _mixed((salt * 31 + word + 0x9E3779B9) & _MASK)
    return _signed(salt)


def random_bits(shape: torch.Size, salt: Tensor) -> Tensor:
    """Return 32 random bits for each of the elements of a tensor.

    Args:
        shape: of the result.
        salt: int32, one element, on the device.

    Returns:
        An int32 tensor, whose low and high bits are all usable.
    """
    number = torch.arange(shape.numel(), dtype=torch.int32, device=salt.device)
    # Twice: after one pass over consecutive numbers, similar salts give similar bits.
    return _hashed(_hashed(number) + salt.reshape(())).reshape(shape)


def _hashed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 16)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 15)) * _signed(_SECOND)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros."""
    # torch's own shift copies the sign, and torch_xla divides in its place, which rounds negative
    # numbers up unless the bits that are shifted out are zero.
    return ((x & -(1 << by)) >> by) & ((1 << (32 - by)) - 1)


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 15)) * _SECOND) & _MASK
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
