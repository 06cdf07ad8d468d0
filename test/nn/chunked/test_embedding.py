"""An embedding whose table comes piece by piece, or stays where it is while rows are sent: against
the plain one, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from test.common.garbage import live_tensors
from test.common.models import FEATURES, WIDTH, EmbeddingNet, TiedSignsNet, WideSignsNet
from test.common.parity import Case, Runs, assert_parity, run_cases, whole
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scenarios import RANKS, Scenarios, fsdp, make, message
from test.common.warned import recorded_warnings
from xla_fsdp import StreamedEmbedding
from xla_fsdp.nn.chunked.chunks import Chunks, cut_into
from xla_fsdp.nn.chunked.lookup_strategies import part_size
from xla_fsdp.xla import ops

scenarios = Scenarios(__name__)
result = scenarios.result

ROWS = 37
TABLE = "tokens.weight"
BY_ROWS: dict[str, Any] = {"shard_param_on_dim_0": True}
TOLERANCE = 2e-6

# ---------------------------------------------------------------- without ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "padding": {"padding_idx": 4},
    "padding_from_the_end": {"padding_idx": -1},
    "max_norm": {"max_norm": 0.5, "norm_type": 1.0},
    "by_frequency": {"scale_grad_by_freq": True},
    "sparse": {"sparse": True},
    "double": {"dtype": torch.float64},
    "bf16": {"dtype": torch.bfloat16, "padding_idx": 0},
}
SETTINGS = (
    "num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type",
    "scale_grad_by_freq", "sparse", "training",
)  # fmt: skip


def table_of(kind: type[nn.Embedding] = nn.Embedding, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind(ROWS, WIDTH, **options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_an_embedding(name: str, dtype: torch.dtype) -> None:
    plain, made = (table_of(kind, **OPTIONS[name]) for kind in (nn.Embedding, StreamedEmbedding))
    numbers = torch.tensor([[4, 0, 36], [4, 4, 21]], dtype=dtype)
    for module in (plain, made):
        rows = module(numbers)
        (rows * torch.arange(3)[:, None]).sum().backward()
    assert torch.equal(made(numbers), plain(numbers))
    assert torch.equal(made.weight, plain.weight)
    assert torch.equal(made.weight.grad.to_dense(), plain.weight.grad.to_dense())
    assert made.weight.grad.any()


@pytest.mark.parametrize("name", OPTIONS)
def test_from_embedding_takes_over_the_parameter_and_all_options(name: str) -> None:
    plain = table_of(**OPTIONS[name]).eval()
    plain.weight.requires_grad_(False)
    values = plain.weight.clone()
    made = StreamedEmbedding.from_embedding(plain, pieces=4)
    assert made.weight is plain.weight
    assert torch.equal(made.weight, values)  # nor has the row for padding been set to zero anew
    assert [getattr(made, each) for each in SETTINGS] == [getattr(plain, each) for each in SETTINGS]
    assert (
        repr(made) == repr(plain).replace("Embedding(", "StreamedEmbedding(")[:-1] + ", pieces=4)"
    )
    assert StreamedEmbedding.from_embedding(plain).pieces is None


def test_from_embedding_keeps_a_row_for_padding_that_has_values() -> None:
    plain = table_of()
    plain.padding_idx = 3
    assert StreamedEmbedding.from_embedding(plain).weight[3].all()


def test_a_table_of_ones_own_is_taken_as_by_an_embedding() -> None:
    values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    made: Any = StreamedEmbedding.from_pretrained(values, padding_idx=1)
    assert isinstance(made, StreamedEmbedding)
    assert torch.equal(made(torch.arange(ROWS)), values)
    assert not made.weight.requires_grad


def test_state_dicts_are_those_of_an_embedding() -> None:
    plain, made = nn.Embedding(ROWS, WIDTH), table_of(StreamedEmbedding, pieces=2)
    assert list(made.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(made.state_dict())
    assert torch.equal(plain.weight, made.weight)
    made.load_state_dict(nn.Embedding(ROWS, WIDTH).state_dict())
    assert not torch.equal(plain.weight, made.weight)


class Scaled(nn.Embedding):
    """Whose rows are not those of its table."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_what_is_no_plain_embedding_is_not_taken_over() -> None:
    with pytest.raises(TypeError, match=r"takes an nn\.Embedding, got Linear"):
        StreamedEmbedding.from_embedding(nn.Linear(2, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Scaled has a forward of its own, which .* would not run"):
        StreamedEmbedding.from_embedding(Scaled(3, 4))
    streamed = table_of(StreamedEmbedding)
    assert StreamedEmbedding.from_embedding(streamed, pieces=2).weight is streamed.weight
    plain = table_of()
    plain.weight = nn.Parameter(plain.weight.detach()[:19])
    with pytest.raises(ValueError, match=r"has shape \(19, 11\), not \(37, 11\): it is sharded"):
        StreamedEmbedding.from_embedding(plain)


@pytest.mark.parametrize("pieces", [0, -1, 2.0, "3"])
def test_pieces_are_a_number_from_one(pieces: Any) -> None:
    with pytest.raises(ValueError, match=f"pieces is {pieces!r}; expected a number from 1"):
        StreamedEmbedding(ROWS, WIDTH, pieces=pieces)
    with pytest.raises(ValueError, match=f"pieces is {pieces!r}; expected a number from 1"):
        StreamedEmbedding.from_embedding(table_of(), pieces=pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_numbers_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"is {dtype}; give row numbers, as int32 or int64"):
        table_of(StreamedEmbedding)(torch.ones(2, dtype=dtype))


@settings(deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 9), st.integers(1, 20), st.sampled_from([0, 1, 5]), st.data()
)
def test_every_class_has_one_place_and_what_is_none_has_none(
    classes: int, ranks: int, rows: int, extra: int, data: Any
) -> None:
    """Whatever the padding: of shards, and of pieces."""
    pieces = Chunks(classes, ranks, -(-classes // ranks) + extra, rows)
    wrong = st.integers(-(2**31), -1) | st.integers(classes, 2**31 - 1)
    none = data.draw(st.lists(wrong, max_size=5))
    wanted = torch.tensor([*none, -1, classes, *range(classes)], dtype=torch.int32)
    found = torch.zeros(len(wanted), dtype=torch.int64)
    for number in torch.arange(pieces.count, dtype=torch.int32)[:, None]:
        places, is_here = pieces.locate(wanted, number)
        assert places.dtype == torch.int32
        assert torch.equal(pieces.classes(number)[places[is_here]], wanted[is_here])
        assert not places[~is_here].any()
        found += is_here
    assert found.tolist() == [0] * (len(none) + 2) + [1] * classes


# ---------------------------------------------------------------- one step against the plain model


def net(**options: Any) -> Callable[[], nn.Module]:
    return partial(EmbeddingNet, **options)


def batch(rank: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """This rank's row numbers; in the usual shape, there are of all pieces, and some twice."""
    generator = torch.Generator().manual_seed(20 + rank)
    return torch.randint(0, ROWS, shape or (4, 6), generator=generator, dtype=dtype)


def unchanged(model: Any) -> None:
    pass


def streamed(
    build: Callable[[], nn.Module], change: Callable[[Any], None] = unchanged, **more: Any
) -> Any:
    """The model with an embedding that is a unit of its own."""
    model = make(build)
    change(model)
    options = {**BY_ROWS, "execute_sharding_on_init": False}
    model.tokens = fsdp(model.tokens, **{**options, **more})
    return fsdp(model, **options)


def in_place(build: Callable[[], nn.Module], *, together: tuple[str, ...] = ("tokens",)) -> Any:
    from xla_fsdp import fully_shard

    model: Any = make(build)
    parts = [model.get_submodule(name) for name in together]
    fully_shard(parts if len(parts) > 1 else parts[0])
    return fully_shard(model)


def streams(model: Any) -> bool:
    return model.tokens._fsdp_module_state.forward_override is not None


def to_device(*tensors: Tensor) -> list[Tensor]:
    import torch_xla

    return [tensor.to(torch_xla.device()) for tensor in tensors]


def usual(rank: int) -> Tensor:
    [numbers] = to_device(batch(rank))
    return numbers


def whole_grads(model: Any) -> dict[str, Tensor]:
    grads = {name: param.grad for name, param in model.named_parameters()}
    present = {name: grad for name, grad in grads.items() if grad is not None}
    return {name: grad.cpu() for name, grad in whole(model, present).items()}


Of = Callable[[int], Tensor]
"""A rank's row numbers."""


def distances(rank: int, model: Any, plain: Any, of: Of = batch) -> dict[str, float]:
    """How far one step's output and gradients are from those of the plain model, where the table
    streams."""
    assert streams(model)
    return apart(rank, model, plain, of)


def apart(rank: int, model: Any, plain: Any, of: Of = batch) -> dict[str, float]:
    """The same, whether it does or not."""
    [numbers] = to_device(of(rank))
    found = model(numbers)
    found.square().mean().backward()
    expected = [plain(of(each)) for each in range(ops.world_size())]
    torch.stack([each.square().mean() for each in expected]).mean().backward()
    assert found.shape == expected[rank].shape
    of_output = (found.detach().cpu() - expected[rank]).abs().max().item()
    return {"output": of_output, **furthest(whole_grads(model), grads_of(plain))}


def grads_of(plain: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.to_dense() for name, p in plain.named_parameters() if p.grad is not None}


def furthest(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By name: the largest difference."""
    assert set(grads) == set(expected)
    return {name: (grad - expected[name]).abs().max().item() for name, grad in grads.items()}


def differences(
    rank: int,
    build: Callable[[], nn.Module],
    change: Callable[[Any], None] = unchanged,
    of: Of = batch,
    **options: Any,
) -> dict[str, float]:
    """The same, of a wrapped model."""
    plain = make(build)
    change(plain)
    return distances(rank, streamed(build, change, **options), plain, of)


def every_row(rank: int) -> Tensor:
    """All rows from the last to the first, and then some once more."""
    return torch.cat([torch.arange(ROWS).flip(0), torch.arange(0, ROWS, 3 + rank)])


LARGE: dict[str, Any] = {"rows": 70_001, "width": 64, "pieces": None}
"""Options of a table that takes more than a piece; ranks ask for less of it than they have."""


def of_large(rank: int) -> Tensor:
    """Rows of both ranks' shards, the first and last of each among them, and some twice."""
    half = -(-LARGE["rows"] // RANKS)
    ends = torch.tensor([0, half - 1, half, LARGE["rows"] - 1, 7 + rank, half + 7 + rank])
    return torch.cat([ends, ends[rank : rank + 3]])


VARIANTS: dict[str, tuple[dict[str, Any], Of]] = {
    "usual": ({}, batch),
    "more_pieces_than_rows": ({"pieces": 1000, "padding_idx": 36}, every_row),
    "cube_int32": (
        {"pieces": 2, "padding_idx": -18},
        lambda rank: batch(rank, 2, 3, 4, dtype=torch.int32),
    ),
    "one_number": ({}, lambda rank: batch(rank).flatten()[3]),
    "one_row_for_all": ({"pieces": 4}, lambda rank: torch.full((50,), 5 + rank)),
    "nothing_but_padding": ({"padding_idx": 5}, lambda rank: torch.full((2,), 5)),
    "sends_rows": ({**LARGE, "padding_idx": 7}, of_large),
    "sends_rows_of_all_shapes": (LARGE, lambda rank: of_large(rank)[:8].reshape(2, 1, 4).int()),
}


@scenarios.add
def variants(rank: int) -> dict[str, dict[str, float]]:
    return {
        name: differences(rank, net(**options), of=of) for name, (options, of) in VARIANTS.items()
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_is_that_of_the_plain_model(name: str) -> None:
    for rank in range(RANKS):
        found = result("variants", rank)[name]
        assert max(found.values()) < TOLERANCE, found
    assert TABLE in found


@scenarios.add
def no_numbers(rank: int) -> tuple[list[int], float]:
    model = streamed(net())
    found = model.tokens(*to_device(batch(rank)[:0]))
    found.sum().backward()
    return list(found.shape), whole_grads(model)[TABLE].abs().max().item()


def test_no_numbers_have_no_rows_and_no_gradient() -> None:
    assert result("no_numbers") == ([0, 6, WIDTH], 0.0)


def test_the_usual_batch_is_of_all_pieces_and_repeats_rows() -> None:
    shard_rows = -(-ROWS // RANKS)
    for rank in range(RANKS):
        numbers = batch(rank).flatten().int()
        assert len(set(numbers.tolist())) < len(numbers)
        pieces = cut_into(ROWS, RANKS, shard_rows, 3)
        for number in range(3):
            assert pieces.locate(numbers, torch.tensor([number]))[1].any()


@scenarios.add
def frozen(rank: int) -> dict[str, dict[str, float]]:
    def freeze(model: Any, *names: str) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(name in names)

    trained = {"head": ("head.weight", "head.bias"), "table": (TABLE,)}
    return {
        name: differences(rank, net(), lambda model, of=of: freeze(model, *of))
        for name, of in trained.items()
    }


def test_what_is_frozen_has_no_gradient_and_the_rest_the_right_one() -> None:
    found = result("frozen")
    assert all(max(each.values()) < TOLERANCE for each in found.values()), found
    assert set(found["head"]) == {"output", "head.weight", "head.bias"}
    assert set(found["table"]) == {"output", TABLE}


def wrong_numbers(rank: int, rows: int) -> Tensor:
    """Some that are no row's: of a shard's padding, of none, and beyond what int32 holds."""
    wrong = [rows, -1, -rows, 10**6, -(2**31), 2**31 - 1, 2**32 + 5, -(2**32) + 5]
    return torch.tensor([5, *wrong, 6 + rank, 5])


Wrong = tuple[list[list[bool]], float, float]


@scenarios.add
def no_rows(rank: int) -> list[Wrong]:
    """Of a table in pieces, and of one of which rows are sent."""
    return [wrong_rows(rank, {"rows": ROWS}), wrong_rows(rank, LARGE)]


def wrong_rows(rank: int, options: dict[str, Any]) -> Wrong:
    """What is NaN, and how far the rest, and the gradient, are from the plain ones."""
    model, plain = streamed(net(**options)), make(net(**options)).tokens
    found = model.tokens(*to_device(wrong_numbers(rank, options["rows"])))
    of_rows = torch.arange(1.0, 1 + len(found))[:, None].expand_as(found)
    found.backward(*to_device(of_rows))  # also of what is no row's
    expected = []
    for each in range(RANKS):
        numbers = wrong_numbers(each, options["rows"])
        good = (numbers >= 0) & (numbers < options["rows"])
        expected.append(plain(numbers[good]))
        expected[-1].backward(of_rows[good] / RANKS)
    values, own_grad = found.detach().cpu(), model.tokens.weight.grad.cpu()
    padding = own_grad[options["rows"] - rank * len(own_grad) :] if rank == RANKS - 1 else []
    assert not any(row.any() for row in padding)
    return (
        values.isnan().tolist(),
        (values[good] - expected[rank]).abs().max().item(),
        (whole_grads(model)[TABLE] - plain.weight.grad).abs().max().item(),
    )


def test_a_number_that_is_no_row_gives_nan_and_nothing_else_changes() -> None:
    for is_nan, of_rows, of_grads in result("no_rows"):
        wrong = [False, *[True] * 8, False, False]
        assert is_nan == [[each] * len(is_nan[0]) for each in wrong]
        assert of_rows == 0
        assert of_grads < TOLERANCE


# ---------------------------------------------------------------- what a step is made of


@scenarios.add
def programs(rank: int) -> dict[Any, tuple[int, int, bool]]:
    """By number of pieces: collectives, loops, and whether anything is as large as the table."""
    from xla_fsdp.xla.graph import lowered_hlo
    from xla_fsdp.xla.host import execute_pending

    found = {}
    for pieces in (1, None, 2, 8):
        model = streamed(net(width=128, rows=512, pieces=pieces))
        execute_pending()  # collectives wait for those before them, here
        model(usual(rank)).sum().backward()
        text = lowered_hlo([param.grad for param in model.parameters()])
        moved = text.count(" all-gather(") + text.count(" reduce-scatter(")
        whole = any(shape in text for shape in ("[512,128]", "[2,256,128]", "[65536]"))
        found[pieces] = moved, text.count(" while("), whole
    return found


def test_neither_the_table_nor_its_gradient_is_ever_whole() -> None:
    found = result("programs")
    assert [whole for _, _, whole in found.values()] == [True, True, False, False]
    assert [loops for _, loops, _ in found.values()] == [0, 0, 2, 2]
    assert found[2][0] == found[8][0]
    assert found[2][0] == found[1][0] - 1  # other units gather their parameters for backward, too


@scenarios.add
def by_default(rank: int) -> list[bool]:
    """Whether a table streams whose rows are as long as a TPU's, and one with shorter ones."""
    models = [make(WideSignsNet), make(net())]
    parts = [fsdp(model.tokens, execute_sharding_on_init=False) for model in models]
    return [part._fsdp_module_state.forward_override is not None for part in parts]


def test_a_table_of_long_rows_needs_no_option_to_stream() -> None:
    assert result("by_default") == [True, False]


@scenarios.add
def sent_rows(rank: int) -> tuple[int, bool, int]:
    """Loops, whether anything is as large as the table, and the largest thing that is gathered or
    reduced."""
    from xla_fsdp.xla.graph import lowered_hlo
    from xla_fsdp.xla.host import execute_pending

    model = streamed(net(**LARGE))
    execute_pending()
    model(*to_device(of_large(rank))).sum().backward()
    text = lowered_hlo([model.tokens.weight.grad])
    whole = any(shape in text for shape in ("[70001,64]", "[70002,64]", "[2,35001,64]"))
    sent = re.findall(r"\[([0-9,]+)\]\S* (?:all-gather|reduce-scatter)\(", text)
    return text.count(" while("), whole, max(math.prod(map(int, each.split(","))) for each in sent)


def test_few_rows_of_a_large_table_are_sent_in_its_place() -> None:
    loops, whole, largest = result("sent_rows")
    assert (loops, whole) == (0, False)
    assert largest == RANKS * LARGE["width"] ** 2  # the block's weight


@scenarios.add
def many_rows(rank: int) -> tuple[int, dict[str, float]]:
    """Loops where a rank asks for more rows than it has, and distances from the plain model."""
    from xla_fsdp.xla.graph import lowered_hlo
    from xla_fsdp.xla.host import execute_pending

    def of(rank: int) -> Tensor:
        return (torch.arange(35_001) * 2 + rank) % LARGE["rows"]

    model = streamed(net(**LARGE))
    execute_pending()
    text = lowered_hlo([model(*to_device(of(rank)))])
    return text.count(" while("), differences(rank, net(**LARGE), of=of)


def test_a_large_table_is_sent_where_that_is_less() -> None:
    loops, found = result("many_rows")
    assert loops == 1
    assert max(found.values()) < TOLERANCE, found


SIX_RANKS = 6
IN_PARTS: dict[str, Any] = {"rows": 17_501, "width": 256, "pieces": None}
PART, SHARD = 2, 2_917  # shards of a part, rows of a shard, which are no whole tiles of 8 rows


def of_parts(rank: int) -> Tensor:
    """Of all parts, the first and last rows of each shard among them, some twice, and no rows."""
    ends = [each * SHARD + at for each in range(SIX_RANKS) for at in (0, SHARD - 1)]
    numbers = (torch.arange(1_750) * 11 + rank * 1_250) % IN_PARTS["rows"]
    return torch.cat([torch.tensor(ends).clamp(max=IN_PARTS["rows"] - 1), numbers, numbers[:10]])


def in_parts(rank: int) -> tuple[list[int], bool, dict[str, float], list[bool]]:
    """Loops and gathers of a table's rows, whether each shard in a part is whole tiles, distances
    from the plain model, and which of the rows -1 and 0 are NaN."""
    from xla_fsdp.xla.graph import lowered_hlo
    from xla_fsdp.xla.host import execute_pending

    model = streamed(net(**IN_PARTS))
    execute_pending()
    numbers = torch.cat([torch.tensor([-1, 0]), of_parts(rank)[2:]])
    rows = model.tokens(*to_device(numbers))
    text = lowered_hlo([rows])
    counts = [text.count(f" {each}(") for each in ("while", "all-gather", "reduce-scatter")]
    in_tiles = f"f32[{PART * (SHARD + 3)},{IN_PARTS['width']}]" in text
    is_nan = rows[:2].isnan().all(1).tolist()
    return counts, in_tiles, differences(rank, net(**IN_PARTS), of=of_parts), is_nan


@cached_outcome
def parts() -> list[tuple[list[int], bool, dict[str, float], list[bool]]]:
    return run_on_ranks(in_parts, SIX_RANKS)


def test_ranks_gather_parts_of_a_table_and_send_rows_in_smaller_groups() -> None:
    for counts, in_tiles, found, is_nan in parts():
        assert counts == [0, 2, 1]  # gathered are the part and the numbers
        assert in_tiles
        assert max(found.values()) < TOLERANCE, found
        assert is_nan == [True, False]


def test_rows_are_sent_where_that_is_less() -> None:
    like = {"dtype": torch.float32, "reduce_dtype": torch.float32, "width": 64}
    weights: Any = SimpleNamespace(shard_rows=35_001, num_ranks=2, **like)
    sizes = {rows: part_size(weights, rows) for rows in (1, 35_000, 35_001, 60_000)}
    assert sizes == {1: 1, 35_000: 1, 35_001: None, 60_000: None}
    weights.reduce_dtype = torch.bfloat16  # rows travel in float32, their gradients, too
    assert (part_size(weights, 26_000), part_size(weights, 27_000)) == (1, None)
    weights.num_ranks = 10**6 + 3  # a prime
    assert part_size(weights, 1) is None


@pytest.mark.parametrize(
    ("num_ranks", "num_rows", "size"),
    [(4, 1024, 1), (16, 1024, 2), (64, 1024, 8), (256, 1024, 32), (64, 8, 1), (64, 8192, 32)],
)
def test_parts_are_those_with_the_least_traffic(num_ranks: int, num_rows: int, size: int) -> None:
    """Of a table of 50,304 rows in bf16."""
    bf16 = {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    shard_rows = -(-50_304 // num_ranks)
    weights: Any = SimpleNamespace(num_ranks=num_ranks, shard_rows=shard_rows, width=512, **bf16)

    def sent(size: int) -> int:
        return (num_ranks // size - 1) * num_rows + (size - 1) * shard_rows

    assert part_size(weights, num_rows) == size
    divisors = [each for each in range(1, num_ranks + 1) if num_ranks % each == 0]
    assert sent(size) == min(map(sent, divisors))


def test_parts_and_rows_fit_their_limit() -> None:
    bf16 = {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    weights: Any = SimpleNamespace(num_ranks=64, shard_rows=2048, width=4096, **bf16)
    assert part_size(weights, 64) == 1
    assert part_size(weights, 128) == 2  # both take 32 MiB
    assert part_size(weights, 256) is None
    weights.width = 2048
    assert part_size(weights, 256) == 2


@scenarios.add
def tied(rank: int) -> tuple[int, bool, dict[str, float]]:
    """A table that is a head's weight: loops, whether it is ever whole, how far gradients are."""
    from xla_fsdp.xla.graph import lowered_hlo
    from xla_fsdp.xla.host import execute_pending

    def data(rank: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(rank))
        return x, torch.arange(6) * 5 + rank

    model, plain = make(TiedSignsNet), make(TiedSignsNet)
    model.tokens, model.head = fsdp(model.tokens, **BY_ROWS), fsdp(model.head, **BY_ROWS)
    model = fsdp(model, **BY_ROWS)
    execute_pending()
    model(*to_device(*data(rank))).backward()
    text = lowered_hlo([param.grad for param in model.parameters()])
    torch.stack([plain(*data(each)) for each in range(RANKS)]).mean().backward()
    is_whole = any(shape in text for shape in ("[37,11]", "[38,11]", "[2,19,11]"))
    return text.count(" while("), is_whole, furthest(whole_grads(model), grads_of(plain))


def test_a_table_tied_to_a_head_streams_for_both() -> None:
    loops, is_whole, found = result("tied")
    assert loops == 4
    assert not is_whole
    assert max(found.values()) < TOLERANCE, found
    assert TABLE in found


@scenarios.add
def left_alive(rank: int) -> list[int]:
    """Device tensors after each of some steps."""
    import torch_xla

    model = streamed(net())
    optimizer = torch.optim.AdamW(model.parameters())
    numbers = usual(rank)
    alive = []
    for _ in range(4):
        model(numbers).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        alive.append(live_tensors())
    return alive


def test_nothing_of_a_step_stays_alive() -> None:
    alive = result("left_alive")
    assert alive[2] == alive[1]
    assert alive[3] == alive[1]


# ---------------------------------------------------------------- ways to call it


@scenarios.add
def calls(rank: int) -> dict[str, Any]:
    from xla_fsdp.xla.host import execute_pending
    from xla_fsdp.xla.ops import is_pending

    model, plain = streamed(net()), make(net())
    numbers = usual(rank)
    execute_pending()
    held = model(numbers)
    pending = [name for name, param in model.named_parameters() if is_pending(param)]
    seen: list[str] = []
    model.tokens.register_forward_hook(lambda *_: seen.append("wrapper"))
    model.tokens.module.register_forward_hook(lambda *_: seen.append("embedding"))
    with torch.no_grad():
        without_grad = model(numbers).cpu()
        by_keyword = model.tokens(input=numbers[:2]).cpu()  # another shape
    model(numbers).sum().backward()  # after forwards that had none
    return {
        "pending": pending if held.requires_grad else ["no forward"],
        "without_grad": (without_grad - plain(batch(rank))).abs().max().item(),
        "by_keyword": torch.equal(by_keyword, plain.tokens(batch(rank)[:2])),
        "hooks": seen,
        "state": model.tokens._fsdp_unit.state.name,
    }


def test_it_is_called_like_any_module() -> None:
    found = result("calls")
    assert found["without_grad"] < TOLERANCE
    assert found["by_keyword"]
    assert found["hooks"] == ["embedding", "wrapper"] * 3
    assert found["pending"] == []  # a forward alone leaves shards as they are
    assert found["state"] == "SHARDED"


@scenarios.add
def rematerialized(rank: int) -> dict[str, Any]:
    from xla_fsdp import checkpoint_module

    def inside(model: Any) -> None:
        model.tokens = checkpoint_module(model.tokens)

    def outside(model: Any) -> None:
        checkpoint_module(model)

    changes = {"inside": inside, "outside": outside}
    return {name: differences(rank, net(), change) for name, change in changes.items()}


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_checkpointed_embedding_streams(where: str) -> None:
    found = result("rematerialized")[where]
    assert max(found.values()) < TOLERANCE, found


@scenarios.add
def accumulated(rank: int) -> dict[str, float]:
    """A backward that does not reduce, one that reduces what both have, and one by itself."""
    model, plain = streamed(net(padding_idx=2)), make(net(padding_idx=2))
    [first, second] = to_device(batch(rank), batch(rank + RANKS))
    with model.no_sync():
        model(first).sum().backward()
        kept = [param.grad for param in model.tokens.parameters()]
    model(second).sum().backward()
    torch.stack([plain(batch(each)).sum() for each in range(2 * RANKS)]).sum().div(RANKS).backward()
    found = furthest(whole_grads(model), grads_of(plain))
    model.zero_grad()
    plain.zero_grad()
    after = max(distances(rank, model, plain).values())
    return {"kept": 0.0 if kept == [None] else 1.0, "after": after, **found}


def test_gradients_that_are_not_reduced_yet_are_kept() -> None:
    found = result("accumulated")
    assert found["kept"] == 0
    assert found["after"] < TOLERANCE
    assert max(found.values()) < 1e-5, found


@scenarios.add
def hooked(rank: int) -> dict[str, float]:
    """A hook of the user's replaces the reduction."""
    from xla_fsdp import comm_hooks

    calls = []

    def hook(state: Any, *given: Any) -> Any:
        calls.append(rank)
        return comm_hooks.reduce_scatter_hook(state, *given)

    model = in_place(net())
    model.tokens.register_comm_hook(comm_hooks.DefaultState(), hook)
    found = distances(rank, model, make(net()))
    return {"calls": abs(len(calls) - 1), **found}


def test_gradients_go_through_a_users_hook() -> None:
    assert max(result("hooked").values()) < TOLERANCE


@scenarios.add
def copies(rank: int) -> list[bool]:
    model = streamed(net())
    numbers = usual(rank)
    expected = model(numbers)
    expected.sum().backward()
    model.zero_grad()
    others = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    assert all(streams(each) for each in others)
    with torch.no_grad():  # the copies' tables are their own
        model.tokens.weight.zero_()
    return [torch.equal(each(numbers).cpu(), expected.detach().cpu()) for each in (*others, model)]


def test_copies_stream_by_themselves() -> None:
    assert result("copies") == [True, True, False]


# ---------------------------------------------------------------- what cannot stream


class Twice(StreamedEmbedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


def twice() -> nn.Module:
    model = EmbeddingNet()
    model.tokens.__class__ = Twice
    return model


WHOLE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "flat": (net(), {"flatten_parameters": True, "shard_param_on_dim_0": False}),
    "cut_rows": (net(), {"shard_param_on_dim_0": False}),
    "subclass": (twice, {}),
    "max_norm": (net(max_norm=2.0), {}),
    "by_frequency": (net(scale_grad_by_freq=True), {}),
    "sparse": (net(sparse=True), {}),
    "one_piece": (net(pieces=1), {}),
    "larger": (net(), {}),
    "small": (net(pieces=None), {}),
}
SAYS = {
    "flat": "no whole rows of the weight",
    "cut_rows": "no whole rows of the weight",
    "subclass": "Twice has a forward of its own",
    "max_norm": "will hold its whole table: it has max_norm",
    "by_frequency": "will hold its whole table: it has scale_grad_by_freq",
    "sparse": "will hold its whole table: it has sparse",
    "larger": "a number for reshard_after_forward is ignored; False is, too",
}


def as_any_unit(rank: int, name: str, model: Any) -> Any:
    """How far a step's output and gradients are from the plain model's, or what it says. Those that
    differ from others by their warnings alone run no step."""
    if name in ("cut_rows", "one_piece", "larger"):
        return {}
    plain = make(WHOLE[name][0])
    if name == "max_norm":
        return message(partial(model, usual(rank)))
    if name == "sparse":  # XLA knows no sparse gradients
        with torch.no_grad():
            return {"output": (model(usual(rank)).cpu() - plain(batch(rank))).abs().max().item()}
    if name == "flat":  # the table's gradient is a vector
        plain.tokens.requires_grad_(False)
        model.tokens.requires_grad_(False)
    return apart(rank, model, plain)


@scenarios.add
def not_streamed(rank: int) -> dict[str, list[Any]]:
    """Whether each has something that streams it, how it runs, and what it warns of."""

    models = {name: streamed(build, **options) for name, (build, options) in WHOLE.items()}
    found = {
        name: [streams(model), as_any_unit(rank, name, model)] for name, model in models.items()
    }
    models["larger"].tokens._fsdp_unit.settings.keeps_larger = True  # as in groups of fewer ranks
    for name, model in models.items():
        with recorded_warnings() as texts:
            model.tokens.module._fsdp_forward_override(model.tokens._fsdp_unit)
        found[name].append(texts)
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_stream_says_so_and_runs_as_any_unit(name: str) -> None:
    does_stream, found, said = result("not_streamed")[name]
    assert does_stream is (name in ("larger", "small"))
    if name == "max_norm":  # which no unit can do
        assert "weight was changed in place in the forward of its FSDP unit" in found
    else:
        assert max(found.values(), default=0) < TOLERANCE, found
        assert (TABLE in found) is (name in ("subclass", "by_frequency", "small"))
    if name in SAYS:
        assert len(said) == 1
        assert SAYS[name] in said[0]
    else:
        assert said == []


@scenarios.add
def cut_in_columns(rank: int) -> dict[str, list[Any]]:
    """By ``fully_shard`` and by tensor parallelism: whether it streams, its rows, a warning."""
    from torch.distributed.tensor import Replicate, Shard

    from xla_fsdp import fully_shard, init_mesh
    from xla_fsdp.tensor_parallel import ColwiseParallel, parallelize_module

    def embedding() -> nn.Module:
        return EmbeddingNet(width=12).tokens

    mesh = init_mesh((1, RANKS), ("shard", "tensor"))
    style = ColwiseParallel(output_layouts=Replicate())
    cut = {
        "fully_shard": fully_shard(make(embedding), shard_placement_fn=lambda _: Shard(1)),
        "tensor": fully_shard(
            parallelize_module(make(embedding), mesh["tensor"], style), mesh=mesh["shard"]
        ),
    }
    found: dict[str, list[Any]] = {}
    for name, module in cut.items():
        same = torch.equal(module(usual(0)).cpu(), make(embedding)(batch(0)))
        found[name] = [module._fsdp_module_state.forward_override is not None, same]
    for name, module in cut.items():
        with recorded_warnings() as texts:
            module._fsdp_forward_override(module._fsdp_unit)
        found[name].extend(texts)
    return found


def test_a_table_cut_in_columns_says_so_and_runs_as_any_unit() -> None:
    found = result("cut_in_columns")
    assert [each[:2] for each in found.values()] == [[False, True]] * 2
    assert "its weight is cut along dim 1; let dim 0 be cut" in found["fully_shard"][2]
    assert "tensor parallelism has cut its table" in found["tensor"][2]


@scenarios.add
def together(rank: int) -> dict[str, float]:
    """Table and head in one unit, which is gathered whole; they are tied."""

    def tied() -> nn.Module:
        model = EmbeddingNet(rows=7)
        model.head.weight = model.tokens.weight
        return model

    model = in_place(tied, together=("tokens", "head"))
    assert not streams(model)
    return apart(rank, model, make(tied), lambda rank: batch(rank) % 7)


def test_parts_of_one_unit_are_gathered_whole() -> None:
    found = result("together")
    assert max(found.values()) < TOLERANCE, found
    assert TABLE in found


@scenarios.add
def refused(rank: int) -> dict[str, str]:
    from xla_fsdp import XlaFullyShardedDataParallel

    model = streamed(net())
    numbers = usual(rank)
    found = {
        "host": message(lambda: model.tokens(batch(rank))),
        "dtype": message(lambda: model.tokens(numbers.float())),
    }
    with XlaFullyShardedDataParallel.summon_full_params(model):
        found["summoned"] = message(lambda: model(numbers))
    found["sharded"] = message(lambda: StreamedEmbedding.from_embedding(model.tokens.module))
    rows = model.tokens(numbers).cpu()  # as if nothing had been refused
    found["then"] = str(torch.equal(rows, make(net()).tokens(batch(rank))))
    return found


def test_what_would_go_wrong_is_refused() -> None:
    found = result("refused")
    assert found["host"] == "nothing was raised"  # an outermost unit moves its inputs
    assert "TypeError: the input of StreamedEmbedding is torch.float32; give" in found["dtype"]
    assert "inside summon_full_params" in found["summoned"]
    assert "ValueError: the layer's weight has shape (19, 11), not (37, 11)" in found["sharded"]
    assert found["then"] == "True"


# ---------------------------------------------------------------- training

BF16 = {"compute_dtype": torch.bfloat16}
CASES = {
    "adamw_no_sync": Case(
        "PaddedSignsNet",
        in_place=True,
        optimizer="adamw",
        micro_batches=2,
        no_sync=True,
        tolerance=1e-3,
    ),
    "rows": Case("PaddedSignsNet", options=BY_ROWS, clip=(0.3, 2.0)),
    "wide": Case("WideSignsNet"),
    "wide_torus_2x2": Case("WideSignsNet", torus=(2, 2)),
    "frozen": Case("FrozenSignsNet", options=BY_ROWS),
    "shared": Case("SharedSignsNet", options=BY_ROWS),
    "with_head": Case("SignsToLossNet", options=BY_ROWS, computes_loss=True),
    "tied": Case("TiedSignsNet", options=BY_ROWS, computes_loss=True),
    "tied_no_sync": Case(
        "TiedSignsNet", options=BY_ROWS, computes_loss=True, micro_batches=2, no_sync=True
    ),
    "bf16": Case("SignsNet", options={**BY_ROWS, **BF16}, tolerance=0.05),
    "bf16_fp32_reduce": Case(
        "PaddedSignsNet",
        options={**BY_ROWS, **BF16, "fp32_reduce_scatter": True},
        tolerance=0.05,
    ),
    "fp16": Case("SignsNet", options={**BY_ROWS, "compute_dtype": torch.float16}, tolerance=0.02),
    "no_barriers": Case(
        "PaddedSignsNet",
        options={
            **BY_ROWS,
            "optimization_barrier_in_forward": False,
            "optimization_barrier_in_backward": False,
        },
    ),
    "sends_rows": Case("LargeSignsNet", options=BY_ROWS, clip=(0.3, 2.0)),
    "sends_rows_torus_2x2": Case("LargeSignsNet", torus=(2, 2)),
    "sends_rows_bf16": Case("LargeSignsNet", options={**BY_ROWS, **BF16}, tolerance=0.05),
    "sends_rows_no_sync": Case("LargeSignsNet", options=BY_ROWS, micro_batches=2, no_sync=True),
    "sends_rows_hybrid_2x2": Case("LargeSignsNet", options=BY_ROWS, mesh=(2, 2)),
    "kept": Case("SignsNet", options={**BY_ROWS, "reshard_after_forward": False}, micro_batches=2),
    "accumulate": Case("PaddedSignsNet", options=BY_ROWS, micro_batches=2),
    "no_sync": Case("PaddedSignsNet", options=BY_ROWS, micro_batches=3, no_sync=True),
    "joint_backward": Case("PaddedSignsNet", options=BY_ROWS, micro_batches=2, joint_backward=True),
    "evaluate": Case("SignsToLossNet", options=BY_ROWS, computes_loss=True, evaluate=True),
    "groups_of_two": Case("PaddedSignsNet", options=BY_ROWS, groups_of=2),
    "hybrid_2x2": Case("PaddedSignsNet", options=BY_ROWS, mesh=(2, 2)),
    "hybrid_2x2_no_sync": Case(
        "PaddedSignsNet", options=BY_ROWS, mesh=(2, 2), micro_batches=2, no_sync=True
    ),
    "hybrid_2x4_bf16": Case("WideSignsNet", options=BF16, mesh=(2, 4), tolerance=0.05),
}
QUICK = ("adamw_no_sync", "bf16", "sends_rows")
FULL = Runs({(n, name): c for n in (1, 3, 4, 8) for name, c in CASES.items() if c.fits(n)})


@scenarios.add
def trained(rank: int) -> dict[str, Any]:
    return run_cases(rank, {name: CASES[name] for name in QUICK})


@pytest.mark.parametrize("name", QUICK)
def test_parity(name: str) -> None:
    assert_parity(CASES[name], [result("trained", rank)[name] for rank in range(RANKS)])


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), FULL.cases)
def test_parity_in_full(num_ranks: int, name: str) -> None:
    FULL.check(num_ranks, name)


# ---------------------------------------------------------------- state


@scenarios.add
def states(rank: int) -> dict[str, Any]:
    """State dicts go from and to a model whose embedding is an nn.Embedding."""
    from xla_fsdp import full_state_dict

    def ordinary() -> nn.Module:
        model: Any = EmbeddingNet()
        model.tokens = nn.Embedding(ROWS, WIDTH)
        return model

    given, model, other = make(ordinary, seed=9), streamed(net()), make(ordinary, seed=10)
    model.load_state_dict(given.state_dict())
    full = full_state_dict(model)
    other.load_state_dict({name: value.cpu() for name, value in full.items()})
    rows = model.tokens(usual(rank)).cpu()
    return {
        "names": list(full) == list(given.state_dict()),
        "table": torch.equal(other.tokens.weight, given.tokens.weight),
        "rows": torch.equal(rows, given.tokens(batch(rank))),
    }


def test_state_dicts_of_shards_are_those_of_an_embedding() -> None:
    assert result("states") == {"names": True, "table": True, "rows": True}


# ---------------------------------------------------------------- a model of transformers


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 27, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=ROWS, pad_token_id=0, **sizes, **heads))


def trained_llama(rank: int, values: dict[str, Tensor]) -> dict[str, Any]:
    """Loss and gradients of one whose embedding is put in place of its own, then wrapped."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from xla_fsdp import one_rank_at_a_time
    from xla_fsdp.wrap import transformer_auto_wrap_policy

    with one_rank_at_a_time():  # transformers builds with settings of the whole process
        model = llama()
    model.load_state_dict(values)
    plain = model.get_input_embeddings()
    model.set_input_embeddings(StreamedEmbedding.from_embedding(plain, pieces=3))
    layers = {LlamaDecoderLayer, StreamedEmbedding}
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
    model = fsdp(model, auto_wrap_policy=policy, **BY_ROWS)
    assert model.get_input_embeddings()._fsdp_module_state.forward_override is not None
    numbers = usual(rank)
    loss = model(input_ids=numbers, labels=numbers).loss
    loss.backward()
    return {"loss": loss.item(), "grads": whole_grads(model)}


@pytest.mark.slow
def test_it_takes_the_place_of_a_llamas_embedding() -> None:
    pytest.importorskip("transformers")
    plain = llama()
    found = run_on_ranks(trained_llama, RANKS, plain.state_dict())
    losses = [plain(input_ids=ids, labels=ids).loss for ids in map(batch, range(RANKS))]
    torch.stack(losses).mean().backward()
    for rank in range(RANKS):
        assert found[rank]["loss"] == pytest.approx(losses[rank].item(), rel=1e-5)
        assert max(furthest(found[rank]["grads"], grads_of(plain)).values()) < TOLERANCE
