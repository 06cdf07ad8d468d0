"""Random bits for stochastic rounding, as a hash instead of a random number generator.

A *salt* is made of a seed, a step, a parameter and a rank. The bits of an element are a hash of the
salt and the element's index, by the 32-bit finalizer "lowbias32" of Chris Wellons' hash prospector
(github.com/skeeto/hash-prospector), here in two's complement.
Invariants: no random number generator is used, so other random numbers do not change and a repeated
step rounds in the same way. Salts are inputs of a program, not constants: it is compiled once.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_MASK = 0xFFFFFFFF


def salt_of(*parts: int) -> int:
    """Hash integers (of any size, in this order) to one signed 32-bit integer."""
    salt = 0
    for part in parts:
        for word in (part & _MASK, (part >> 32) & _MASK):
            salt = _mixed((salt * 31 + word + 0x9E3779B9) & _MASK)
    return _signed(salt)


def random_bits(shape: torch.Size, salt: Tensor) -> Tensor:
    """Return an int32 tensor of this shape, all bits of which are random.

    Args:
        shape: shape of the result.
        salt: int32, one element, on the device.
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
    # torch's shift copies the sign, and torch_xla implements it as a division, which rounds
    # negative numbers up unless the bits that are shifted out are zero.
    return ((x & -(1 << by)) >> by) & ((1 << (32 - by)) - 1)


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 15)) * _SECOND) & _MASK
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
