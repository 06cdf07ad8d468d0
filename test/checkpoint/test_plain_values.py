"""What users save beside a model comes back equal and of the same types, without running code."""

from __future__ import annotations

import io
import json
import pickle
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xla_fsdp.checkpoint import CheckpointError
from xla_fsdp.checkpoint.errors import MismatchError
from xla_fsdp.checkpoint.files.json_values import Packed, pack, unpack
from xla_fsdp.checkpoint.files.torch_file import Bytes, read_torch

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
        | st.builds(Counter, st.lists(st.integers(0, 3)))
    ),
)


def there_and_back(value: Any) -> Any:
    packed = pack(value, "extra")
    return unpack(json.loads(json.dumps(packed.json)), packed.tensors)


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types(k), types(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types(part) for part in value]
    return type(value)


@given(values)
def test_json_values_come_back(value: Any) -> None:
    again = there_and_back(value)
    assert again == value
    assert types(again) == types(value)


def test_tags_in_user_values_are_only_values() -> None:
    value = {"!": "tensor", "at": 7, "nested": [{"!": "tuple"}]}
    assert there_and_back(value) == value


def test_tensors_and_arrays() -> None:
    value = {
        "tensor": torch.arange(3, dtype=torch.int16),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::-1],
        "number": np.float32(1.5),
        "flag": np.bool_(True),
        "nan": float("nan"),
    }
    again = there_and_back(value)
    assert torch.equal(again["tensor"], value["tensor"])
    assert again["array"].dtype == np.uint32
    assert (again["array"] == value["array"]).all()
    assert type(again["number"]) is np.float32
    assert type(again["flag"]) is np.bool_
    assert again["nan"] != again["nan"]


def test_states_of_random_number_generators_and_schedulers() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    legacy = np.random.RandomState(3)
    states = [random.Random(1).getstate(), torch.get_rng_state(), scheduler.state_dict()]
    one, two, three = there_and_back(states)
    assert one == states[0]
    assert torch.equal(two, states[1])
    assert three == states[2]
    assert type(three["milestones"]) is Counter
    again = np.random.RandomState()
    again.set_state(there_and_back(legacy.get_state()))
    assert again.rand() == legacy.rand()


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")  # said by newer torches
def test_all_that_cannot_be_saved_is_named() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    value = {
        "fine": 1,
        "function": print,
        "list": [1, {"odd": object()}],
        (1, b"key"): 2,
        "words": np.array(["a"]),
        "deep": deep,
        "sparse": torch.eye(2).to_sparse(),
        "meta": [torch.empty(1, device="meta")],
        "quantized": torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8),
        "swapped": np.zeros(1, ">i4"),
        "wide": np.complex128(1),
    }
    with pytest.raises(CheckpointError) as caught:
        pack(value, "extra")
    first, second, third, fourth, fifth, *tensors = caught.value.problems
    assert first.startswith("extra.function is a builtin_function_or_method, which cannot be saved")
    assert second.startswith("extra.list.1.odd is a object, which")
    assert third.startswith("extra: key (1, b'key').1 is a bytes, which")
    assert fourth == "extra.words is an array of <U1, which torch does not have; convert it"
    assert fifth.endswith("is nested more than 100 deep")
    assert tensors == [
        "extra.sparse is a tensor of layout torch.sparse_coo, not a dense one; convert it",
        "extra.meta.0 is a tensor on the meta device, which has no values; convert it",
        "extra.quantized is a tensor of qint8, which safetensors does not have; convert it",
        "extra.swapped is an array of >i4, which torch does not have; convert it",
        "extra.wide is a tensor of complex128, which safetensors does not have; convert it",
    ]


@pytest.mark.parametrize(
    "json",
    [
        {"!": "tensor", "at": 4},
        {"!": "tensor"},
        {"!": "code", "at": 0},
        {"!": ["tuple"], "at": 0},
        {"!": "dict", "of": [1]},
        {"!": "set", "of": [[1]]},
        {"!": "tuple", "of": 3},
    ],
)
def test_damaged_values_are_refused(json: Any) -> None:
    with pytest.raises(CheckpointError, match="saved values are damaged"):
        unpack(Packed(json, []).json, [torch.ones(1)])


def test_errors_can_be_pickled() -> None:
    for kind in (CheckpointError, MismatchError):
        again = pickle.loads(pickle.dumps(kind(["one", "two\nlines"])))
        assert (type(again), again.problems) == (kind, ["one", r"two\nlines"])


M = (1 << 61) - 1  # the hash of a multiple of it is 0


@pytest.mark.parametrize("kind", ["dict", "set", "tuple", "complex"])
def test_keys_of_one_hash_are_refused(kind: str) -> None:
    """Python takes time in proportion to the square of their number."""
    numbers = [M * k for k in range(1, 3000)]
    made: dict[str, Any] = {
        "dict": dict.fromkeys(numbers),
        "set": set(numbers[:500]),
        "tuple": {(n, 1): 0 for n in numbers[:500]},
        "complex": {complex(-1000003.0 * k, float(k)): 0 for k in range(1, 500)},
    }
    file = io.BytesIO()
    torch.save(made[kind], file)
    with pytest.raises(CheckpointError, match="more than 64 of its keys have one hash"):
        read_torch(io.BytesIO(file.getvalue()), Bytes(file.getvalue()))
