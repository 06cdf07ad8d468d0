"""Convert values saved beside a model (schedulers, counters) to JSON and tensors, and back.

Invariants: unpacking runs no code, and gives equal values of the same types, but subclasses of
``tuple`` become ``tuple``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xla_fsdp.checkpoint.errors import CheckpointError, dtype_name, raise_if
from xla_fsdp.checkpoint.files.safetensors_file import DTYPES

TAG = "!"  # marks a JSON dict that encodes a type JSON lacks, such as {"!": "tuple", "of": [...]}
PLAIN = (bool, int, float, str, type(None))
SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS = {"dict": dict, "Counter": Counter}
MAX_DEPTH = 100  # far below the depth at which Python's own JSON gives up


@dataclass(frozen=True)
class Packed:
    """A JSON value, and the tensors that it refers to by index."""

    json: Any
    tensors: list[Tensor]


def pack(value: Any, name: str) -> Packed:
    """Convert ``value``, called ``name`` in messages, to JSON and tensors: None, bool, int, float,
    str, tensor, numpy array or number, or a list, tuple, set, frozenset, dict or Counter of
    these."""
    packer = _Packer()
    json = packer.pack(value, name, 0)
    raise_if(packer.problems)
    return Packed(json, packer.tensors)


def unpack(json: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value that was packed."""
    try:
        return _unpacked(json, tensors)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"saved values are damaged: {error!r}") from error


class _Packer:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.problems: list[str] = []

    def pack(self, value: Any, where: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self.problems.append(f"{where} is nested more than {MAX_DEPTH} deep")
            return None
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, Tensor):
            return self._add("tensor", value.detach(), where)
        if isinstance(value, np.ndarray | np.number | np.bool_):
            return self._array(value, where)
        if isinstance(value, Mapping):
            return self._mapping(value, where, depth)
        if isinstance(value, list | tuple | set | frozenset):
            parts = [self.pack(part, f"{where}.{i}", depth + 1) for i, part in enumerate(value)]
            kinds = (kind for kind, made in SEQUENCES.items() if isinstance(value, made))
            return parts if isinstance(value, list) else {TAG: next(kinds), "of": parts}
        self.problems.append(
            f"{where} is a {type(value).__name__}, which cannot be saved without running code when "
            f"it is loaded; save numbers, strings, tensors and containers of them"
        )
        return None

    def _add(self, kind: str, tensor: Tensor, where: str) -> Any:
        if reason := _reason_against(tensor):
            self.problems.append(f"{where} is a tensor {reason}; convert it")
            return None
        self.tensors.append(tensor)
        return {TAG: kind, "at": len(self.tensors) - 1}

    def _array(self, value: Any, where: str) -> Any:
        try:
            tensor = torch.from_numpy(np.array(value))  # a copy, as it may be read-only
        except (TypeError, ValueError):
            self.problems.append(
                f"{where} is an array of {value.dtype}, which torch does not have; convert it"
            )
            return None
        return self._add("array" if isinstance(value, np.ndarray) else "number", tensor, where)

    def _mapping(self, value: Mapping[Any, Any], where: str, depth: int) -> Any:
        pairs = []
        for key, part in value.items():
            is_text = isinstance(key, str)
            packed = key if is_text else self.pack(key, f"{where}: key {key!r}", depth + 1)
            pairs.append([packed, self.pack(part, f"{where}.{key}", depth + 1)])
        is_counter = isinstance(value, Counter)
        if not is_counter and TAG not in value and all(isinstance(key, str) for key in value):
            return dict(pairs)
        return {TAG: "Counter" if is_counter else "dict", "of": pairs}


def _reason_against(tensor: Tensor) -> str:
    """Return why a tensor cannot be in a file; "" if it can."""
    if tensor.is_meta:
        return "on the meta device, which has no values"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"of layout {tensor.layout}{', nested' * tensor.is_nested}, not a dense one"
    if tensor.dtype not in DTYPES.values():
        return f"of {dtype_name(tensor.dtype)}, which safetensors does not have"
    return ""


def _unpacked(json: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(json, list):
        return [_unpacked(part, tensors) for part in json]
    if not isinstance(json, dict):
        return json
    kind = json.get(TAG)
    if kind is None:
        return {key: _unpacked(part, tensors) for key, part in json.items()}
    if kind in SEQUENCES:
        return SEQUENCES[kind](_unpacked(part, tensors) for part in json["of"])
    if kind in MAPPINGS:
        pairs = ((_unpacked(k, tensors), _unpacked(v, tensors)) for k, v in json["of"])
        return MAPPINGS[kind](dict(pairs))
    tensor = tensors[json["at"]]
    if kind == "tensor":
        return tensor
    if kind == "array":
        return tensor.numpy()
    if kind == "number":
        return tensor.numpy()[()]
    raise ValueError(f"unknown tag {kind!r}")
