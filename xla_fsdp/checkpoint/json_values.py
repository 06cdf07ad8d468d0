"""What users save beside a model (schedulers, counters, data positions) as JSON and tensors.

Invariants: unpacking runs no code and gives equal values of the same types (subclasses of ``tuple``
become ``tuple``); what cannot be packed is refused with its name, all of it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xla_fsdp.checkpoint.errors import CheckpointError

TAG = "!"  # the key of a JSON dict that means what JSON has not, such as a tuple
PLAIN = (bool, int, float, str, type(None))
SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS = {"dict": dict, "Counter": Counter}
MAX_DEPTH = 100  # far below the depth at which Python's own JSON gives up


@dataclass(frozen=True)
class Packed:
    """A JSON value, and the tensors that it refers to by position."""

    json: Any
    tensors: list[Tensor]


def pack(value: Any, name: str) -> Packed:
    """Turn ``value`` into JSON and tensors.

    Args:
        value: None, bool, int, float, str, tensor, numpy array or number, or a list, tuple, set,
            dict or Counter of such.
        name: of the value, for messages.

    Raises:
        CheckpointError: naming everything in it that is none of these.
    """
    problems = list(_problems(value, name, 0))
    if problems:
        raise CheckpointError(problems)
    tensors: list[Tensor] = []
    return Packed(_packed(value, tensors), tensors)


def unpack(json: Any, tensors: Sequence[Tensor]) -> Any:
    """Turn what ``pack`` returned into the value again.

    Raises:
        CheckpointError: if ``json`` is not what ``pack`` makes.
    """
    try:
        return _unpacked(json, tensors)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"saved values are damaged: {error!r}") from error


def _problems(value: Any, where: str, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"{where} is nested more than {MAX_DEPTH} deep"
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                yield from _problems(key, f"{where}: key {key!r}", depth + 1)
            yield from _problems(part, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for index, part in enumerate(value):
            yield from _problems(part, f"{where}.{index}", depth + 1)
    elif isinstance(value, np.ndarray) and not _has_torch_dtype(value):
        yield f"{where} is an array of {value.dtype}, which torch does not have; convert it"
    elif not isinstance(value, (*PLAIN, Tensor, np.ndarray, np.number, np.bool_)):
        yield (
            f"{where} is a {type(value).__name__}, which cannot be saved without running code when "
            f"it is loaded; save numbers, strings, tensors and containers of them"
        )


def _has_torch_dtype(array: np.ndarray) -> bool:
    try:
        torch.from_numpy(np.empty(0, array.dtype))
    except TypeError:
        return False
    return True


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {TAG: "tensor", "at": len(tensors) - 1}
    if isinstance(value, np.ndarray | np.number | np.bool_):
        tensors.append(torch.from_numpy(np.array(value)))  # a copy, as it may be read-only
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {TAG: kind, "at": len(tensors) - 1}
    if isinstance(value, Mapping):
        return _packed_mapping(value, tensors)
    parts = [_packed(part, tensors) for part in value]
    if isinstance(value, list):
        return parts
    kind = next(kind for kind, made in SEQUENCES.items() if isinstance(value, made))
    return {TAG: kind, "of": parts}


def _packed_mapping(value: Mapping[Any, Any], tensors: list[Tensor]) -> Any:
    counts = isinstance(value, Counter)
    if not counts and TAG not in value and all(isinstance(key, str) for key in value):
        return {key: _packed(part, tensors) for key, part in value.items()}
    pairs = [[_packed(key, tensors), _packed(part, tensors)] for key, part in value.items()]
    return {TAG: "Counter" if counts else "dict", "of": pairs}


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
