"""Whatever is in a file: what is wrong is said in a CheckpointError, and little is allocated."""

from __future__ import annotations

import json
import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from test.common.shard_maker import with_optimizer
from xla_fsdp.checkpoint import CheckpointError, ShardMetadata, find_problems, open_shard
from xla_fsdp.checkpoint.safetensors_file import DTYPES, read_header
from xla_fsdp.checkpoint.shard_files import Shard
from xla_fsdp.checkpoint.torch_file import read_torch_file

EXAMPLES = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FEW = settings(EXAMPLES, max_examples=60)
LIMIT = 30_000_000

numbers = st.one_of(
    st.integers(-2, 40), st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30]), st.floats()
)
words = st.one_of(st.text(max_size=8), st.sampled_from(["w", "model/w", "../w", "F32", "BF16"]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=12,
)
lines = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*DTYPES, "F4", ""]),
            "shape": st.lists(numbers, max_size=3),
            "data_offsets": st.lists(numbers, min_size=1, max_size=3),
        }
    ),
    values,
)


class Bytes:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See ``ByteSource``."""
        buffer[:] = self._data[start : start + len(buffer)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A shard file of each kind."""
    base = tmp_path_factory.mktemp("sound")
    model = with_optimizer()
    return {
        "safetensors": model.save_safetensors(base, 1)[0].read_bytes(),
        "pth": model.save(base, 1)[0].read_bytes(),
    }


def result_or_problems(read: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What ``read`` gives, or the lines of the error that it raises."""
    try:
        return read(), []
    except CheckpointError as error:
        assert str(error) == "\n".join(error.problems)  # noqa: PT017 (any other error is one)
        return None, error.problems


def header_is_read_or_refused(data: bytes) -> None:
    """And if it is read, it is as it should be."""
    tracemalloc.start()
    header, problems = result_or_problems(lambda: read_header(Bytes(data), "file"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < LIMIT
    assert all(p.startswith("file: ") and "\n" not in p and len(p) < 1000 for p in problems)
    if header is not None:
        assert header.file_size == len(data)
        assert all(0 <= e.start <= e.stop <= len(data) for e in header.entries.values())


@EXAMPLES
@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_as_header(text: bytes, length: int) -> None:
    header_is_read_or_refused(length.to_bytes(8, "little") + text)
    header_is_read_or_refused(len(text).to_bytes(8, "little") + text)


@EXAMPLES
@given(st.dictionaries(words | st.just("__metadata__"), lines, max_size=4), st.integers(0, 64))
def test_any_json_as_header(header: dict[str, Any], size: int) -> None:
    text = json.dumps(header).encode()
    header_is_read_or_refused(len(text).to_bytes(8, "little") + text + bytes(size))


@EXAMPLES
@given(values)
def test_any_json_as_metadata(value: Any) -> None:
    metadata_is_read_or_refused(value)


def metadata_is_read_or_refused(value: Any) -> None:
    """Also when it comes with a state dict that it does not describe."""
    metadata, _ = result_or_problems(lambda: ShardMetadata.from_dict(value))
    if metadata is not None:
        assert ShardMetadata.from_dict(metadata.to_dict()) == metadata
    problems = find_problems([Shard("file", {}, value)])
    assert all(isinstance(problem, str) for problem in problems)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    below = [(*path, key) for key, _ in items]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        if isinstance(each, dict | list):
            below += places(each, (*path, key))
    return below


@EXAMPLES
@given(st.data(), values)
def test_metadata_with_one_thing_changed(choose: st.DataObject, value: Any) -> None:
    shard = with_optimizer().shard(0, 1)
    metadata: Any = json.loads(json.dumps(shard["shard_metadata"]))
    *path, last = choose.draw(st.sampled_from(places(metadata)))
    target = metadata
    for key in path:
        target = target[key]
    target[last] = value
    metadata_is_read_or_refused(metadata)


@FEW
@given(data=st.data(), kind=st.sampled_from(["safetensors", "pth"]))
def test_a_file_with_some_bytes_changed(
    tmp_path: Path, sound: dict[str, bytes], data: st.DataObject, kind: str
) -> None:
    content = bytearray(sound[kind])
    end = len(content) if kind == "pth" else 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, end - 1))
        replacement = data.draw(st.binary(min_size=1, max_size=9))
        content[start : start + len(replacement)] = replacement
    path = tmp_path / f"f.{kind}"
    path.write_bytes(content[: data.draw(st.integers(0, 2 * len(content)))])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shard, problems = result_or_problems(lambda: open_shard(str(path)))
    assert all(problem.startswith(f"{path}: ") for problem in problems)
    if shard is not None:
        assert all(isinstance(problem, str) for problem in find_problems([shard]))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 20 * LIMIT  # the first file loads parts of torch


@pytest.mark.parametrize("zipped", [True, False])
def test_absurd_sizes_in_a_torch_file_are_not_believed(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "f.pth"
    small = torch.ones(1)
    for absurd in (small.expand(10**12), small.as_strided((10**6, 10**6), (0, 0))):
        torch.save({"model": {"w": absurd}}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(CheckpointError, match=f"^{path}: "):
            read_torch_file(str(path))
