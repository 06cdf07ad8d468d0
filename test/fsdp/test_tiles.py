"""Large matrices whose shards are padded to whole tiles: training, and files of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.ranks import run_on_ranks
from test.common.scenarios import make
from xla_fsdp import consolidate_sharded_model_checkpoints
from xla_fsdp.consolidate_sharded_ckpts import main
from xla_fsdp.distributed import shard_layout
from xla_fsdp.distributed.shard_layout import ROWS, ShardLayout

WIDTH, INNER, BLOCKS, STEPS = 256, 250, 3, 3  # 250 rows of no ranks are whole tiles
NUM_RANKS = (2, 3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.002, momentum=0.9)


def rows(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def wrapped(model: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.wrap import transformer_auto_wrap_policy

    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    sharded = XlaFullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    return sharded, sgd(sharded.parameters())


def in_place(model: Any, optimizer: Any) -> tuple[Any, Any]:
    from xla_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, sgd(model.parameters())


def by_recipe(model: Any, optimizer: Any, **fields: Any) -> tuple[Any, Any]:
    from xla_fsdp import Recipe, parallelize

    return parallelize(model, optimizer, Recipe("fast", **fields))[:2]


WAYS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "vectors": wrapped,
    "rows": partial(wrapped, shard_param_on_dim_0=True),
    "fully_shard": in_place,
    "loop": partial(by_recipe, scan=True, stacked=False),
    "stacked": partial(by_recipe, scan=True),
}


def one_row(shape: Any, num_shards: int, dim: int = 0) -> ShardLayout:
    """The layout of rows that earlier versions had."""
    row = torch.Size([*shape[:dim], *shape[dim + 1 :]]).numel()
    return ShardLayout((torch.Size(shape).numel(),), num_shards, row)


@contextmanager
def layouts_of_before(rank: int) -> Iterator[None]:
    """Let all ranks, which are threads, have those layouts inside the block."""
    import torch_xla.core.xla_model as xm

    patch = mock.patch.object(shard_layout, "rows_layout", one_row)
    if rank == 0:
        patch.start()
        shard_layout.layout_of.cache_clear()
    xm.rendezvous("layouts of before")
    yield
    xm.rendezvous("all are built")
    if rank == 0:
        patch.stop()
        shard_layout.layout_of.cache_clear()
    xm.rendezvous("layouts of now")


def sharded(way: str) -> tuple[Any, Any]:
    model = make(Net)
    return WAYS[way](model, sgd(model.parameters()))


def train(model: Any, optimizer: Any, x: Tensor, steps: int = STEPS) -> None:
    for _ in range(steps):
        model(x).square().sum(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: Any) -> dict[str, Tensor]:
    from xla_fsdp import full_state_dict

    return {name: each.cpu() for name, each in full_state_dict(model).items()}


# ---------------------------------------------------------------- what runs on ranks


def trained(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import load_checkpoint, save_checkpoint
    from xla_fsdp.fsdp.engine.param import held_shape

    x, found = rows(rank).to(torch_xla.device()), {}
    for way in WAYS:
        model, optimizer = sharded(way)
        shapes = {name: tuple(held_shape(each)) for name, each in model.named_parameters()}
        train(model, optimizer, x)
        found[way] = {"shapes": shapes, "values": values(model)}
    for way in ("rows", "stacked"):
        with layouts_of_before(rank):
            model, optimizer = sharded(way)
        shapes = {name: tuple(held_shape(each)) for name, each in model.named_parameters()}
        found[way]["shapes of before"] = shapes
        train(model, optimizer, x, STEPS - 1)
        save_checkpoint(Path(folder, f"{way} of before"), model, optimizer, step=1)
        model, optimizer = sharded(way)
        load_checkpoint(Path(folder, f"{way} of before"), model, optimizer)
        save_checkpoint(Path(folder, way), model, optimizer, step=1)
        train(model, optimizer, x, 1)
        found[way]["from before"] = values(model)
    return found


def loaded(rank: int, ranks: int, folders: list[str]) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import load_checkpoint

    x, found = rows(rank).to(torch_xla.device()), {}
    for folder in folders:
        for way in ("rows", "fully_shard"):
            model, optimizer = sharded(way)
            load_checkpoint(folder, model, optimizer)
            before = values(model)
            train(model, optimizer, x, 1)
            found[Path(folder).name, way] = before, values(model)
    return found


# ---------------------------------------------------------------- in pytest


@cache
def outcome(ranks: int, folder: Path) -> list[dict[str, Any]]:
    return run_on_ranks(trained, ranks, ranks, str(folder))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiles")


@cache
def plain(ranks: int, steps: int = STEPS) -> dict[str, Tensor]:
    model = make(Net)
    train(
        model,
        sgd(model.parameters()),
        torch.cat(list(map(rows, range(ranks)))),
        steps,
    )
    return dict(model.state_dict())


@pytest.mark.parametrize("ranks", NUM_RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_trains_as_the_plain_model(way: str, ranks: int, base: Path) -> None:
    for each in outcome(ranks, base / str(ranks)):
        assert_close(each[way]["values"], plain(ranks), atol=1e-5)


@pytest.mark.parametrize("ranks", NUM_RANKS)
def test_shards_are_whole_tiles(ranks: int, base: Path) -> None:
    shapes = outcome(ranks, base / str(ranks))[0]["stacked"]["shapes"]
    [up] = [shape for name, shape in shapes.items() if name.endswith("up.weight")]
    assert up == (BLOCKS, -(-INNER // (ROWS * ranks)) * ROWS, WIDTH)


@pytest.mark.parametrize("ranks", NUM_RANKS)
@pytest.mark.parametrize("way", ["rows", "stacked"])
def test_shards_of_single_rows_are_loaded(way: str, ranks: int, base: Path) -> None:
    for each in outcome(ranks, base / str(ranks)):
        shapes = each[way]["shapes of before"].items()
        assert {shape[-2] for name, shape in shapes if name.endswith("up.weight")} == {
            -(-INNER // ranks)
        }
        assert_close(each[way]["from before"], plain(ranks), atol=1e-5)


@pytest.mark.parametrize("way", ["rows", "stacked", "rows of before", "stacked of before"])
def test_files_are_merged_and_cut_for_others(way: str, base: Path) -> None:
    outcome(4, base / "4")
    source = f"{base / '4' / way}"
    merged, _ = consolidate_sharded_model_checkpoints(source, save_model=False)
    expected = plain(4, STEPS - 1)
    assert_close(merged, expected, atol=1e-5)
    target = base / f"{way} of 3"
    command = ["--ckpt_prefix", source, "--to_world_size", "3", "--save_path", str(target)]
    assert main(command) == 0
    folders = [str(base / "4" / way), str(target)]
    for each in run_on_ranks(loaded, 3, 3, folders):
        for before, _ in each.values():
            assert_close(before, merged, atol=0)
        after = [result for _, result in each.values()]
        for other in after[1:]:
            assert_close(other, after[0], atol=1e-6)
