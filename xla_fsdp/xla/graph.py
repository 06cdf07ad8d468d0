"""Read the traced program that computes given tensors; nothing is compiled or executed."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch_xla
from torch import Tensor


def lowered_hlo(tensors: Sequence[Tensor]) -> str:
    """Return the HLO text, before optimization, of the program that computes ``tensors``."""
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def program_of(tensors: Sequence[Tensor]) -> bytes:
    """Return the serialized HLO module, before optimization, that computes ``tensors``."""
    return torch_xla._XLAC._get_xla_tensors_hlo_proto(list(tensors))


# Numbers of fields in XLA's messages, nested: the metadata (7) of each instruction (2) of each
# computation (3) of a module, and the lines of source (17) that these refer to.
_METADATA: dict[int, Any] = {3: {2: {7: None}}, 17: None}


def without_metadata(program: bytes) -> bytes:
    """Return a serialized HLO module without the metadata of its operations."""
    return _without(memoryview(program), _METADATA)


def _without(message: memoryview, unwanted: Mapping[int, Any]) -> bytes:
    """Return a message of protocol buffers without some fields: those that None stands for, and in
    others the fields in their mapping."""
    found = bytearray()
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        if tag & 7 == _BYTES:
            size, begin = _varint(message, at)
            at = begin + size
        elif tag & 7 == _VARINT:
            _, at = _varint(message, at)
        else:
            at += _FIXED[tag & 7]
        if tag >> 3 not in unwanted:
            found += message[start:at]
        elif (inside := unwanted[tag >> 3]) is not None:
            inner = _without(message[begin:at], inside)
            found += _as_varint(tag) + _as_varint(len(inner)) + inner
    return bytes(found)


# Types of fields on the wire, and the sizes of those that have one.
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the number at ``at``, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def has_metadata() -> bool:
    """Return whether operations are traced and lowered with metadata: scopes, lines of source."""
    return bool(torch_xla._XLAC._get_ir_debug())


@contextlib.contextmanager
def metadata(on: bool) -> Iterator[None]:
    """Trace and lower operations inside the block with or without metadata."""
    before = has_metadata()
    torch_xla._XLAC._set_ir_debug(on)
    try:
        yield
    finally:
        torch_xla._XLAC._set_ir_debug(before)


class Scope:
    """A named scope of the operations that this thread traces, from now until ``close``.

    The last one that was opened is to be closed first, by the same thread. A sync raises
    RuntimeError inside a scope.
    """

    def __init__(self, name: str) -> None:
        self._pushed = torch_xla._XLAC.profiler.scope_pusher(name)
        # The interpreter's end would close it in another thread, and C++ then aborts the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pushed))

    def close(self) -> None:
        """Close the scope."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._pushed))
        del self._pushed


def program_key(tensors: Sequence[Tensor]) -> bytes:
    """Return a hash of the graph that computes ``tensors``; equal ones have the same program."""
    return bytes(torch_xla._XLAC._get_graph_hash(list(tensors)))


@dataclass(frozen=True)
class ProgramInputs:
    """The inputs of a traced program, in order.

    Args:
        values: a tensor for each, which holds its buffer.
        buffers: numbers that identify the buffers, as ``buffer_id``.
        tensors: ``tensor_id`` of the tensor that brought each in; -1 of numbers.
        seeds: positions of random number states.
    """

    values: list[Tensor]
    buffers: list[int]
    tensors: list[int]
    seeds: list[int]


def inputs_of(outputs: Sequence[Tensor]) -> ProgramInputs:
    """Return the inputs of the program that computes ``outputs``."""
    ids, values = torch_xla._XLAC._get_tensors_xla_device_data_node(list(outputs))
    seed = torch_xla._XLAC._get_seed_info_id()
    return ProgramInputs(
        list(values),
        list(torch_xla._XLAC._get_tensors_handle(values)),
        list(ids),
        [position for position, each in enumerate(ids) if each == seed],
    )


def buffer_id(tensor: Tensor) -> int | None:
    """Return a number that identifies a tensor's device buffer; None if it has none yet."""
    try:
        return torch_xla._XLAC._get_tensors_handle([tensor])[0]
    except RuntimeError:  # the value has not been uploaded yet
        return None


def tensor_id(tensor: Tensor) -> int:
    """Return a number that identifies an XLA tensor, of which there may be several Python objects;
    it grows with each that torch_xla makes."""
    return torch_xla._XLAC._xla_get_tensor_id(tensor)
