"""``Recipe``: its values, its file, and what it asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from xla_fsdp import Recipe
from xla_fsdp.recipe.options import NAMES

FULL = Recipe(
    "fast",
    units=("Block",),
    remat=("attention",),
    scan=True,
    stacked=False,
    compute_dtype="bfloat16",
    mesh={"replica": 2, "shard": 4},
)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("plain"), FULL])
def test_a_saved_recipe_is_read_again(recipe: Recipe, tmp_path: Path) -> None:
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == recipe
    assert Recipe.of(str(tmp_path / "recipe.json")) == recipe


def test_a_file_holds_what_is_set_and_nothing_else(tmp_path: Path) -> None:
    Recipe("lean", scan=False).save(tmp_path / "recipe.json")
    text = (tmp_path / "recipe.json").read_text()
    assert text == '{\n  "version": 1,\n  "name": "lean",\n  "scan": false\n}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no recipe: it is not JSON"),
        ("[" * 100_000, "is no recipe: it is not JSON"),
        ("[1]", "is no recipe: it holds a list"),
        ("{}", 'is no recipe: it has no "version"; write it by Recipe.save, or add "version": 1'),
        ('{"name": "lean"}', 'is no recipe: it has no "version"'),
        ('{"version": 2}', "is a recipe of version 2; this xla_fsdp reads 1"),
        ('{"version": "1"}', "is a recipe of version '1'; this xla_fsdp reads 1"),
        ('{"version": true}', "is a recipe of version True; this xla_fsdp reads 1"),
        (
            '{"version": 1, "scna": true}',
            "is no recipe: it has scna; there are name, units, remat, scan",
        ),
        (
            '{"version": 1, "name": "best"}',
            "recipe.json: Recipe: name is 'best'; give 'lean', 'fast', 'plain'",
        ),
        ('{"version": 1, "mesh": 8}', "mesh is 8; give whole sizes from 1 by name of the axis"),
        (
            '{"version": 1, "mesh": {"tensor": 2}}',
            "mesh has an axis tensor alone; give shard=1 before it",
        ),
        (
            '{"version": 1, "mesh": {"replica": 2}}',
            "mesh has an axis replica alone; give shard=1 after it",
        ),
        (
            '{"version": 1, "mesh": {"shard": 0}}',
            r"mesh is \(\('shard', 0\),\); give whole sizes from 1",
        ),
    ],
)
def test_a_file_that_holds_something_else(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Recipe.load(tmp_path / "recipe.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "leen"}, "name is 'leen'; give 'lean', 'fast', 'plain'"),
        ({"scan": "yes"}, "scan is 'yes'; give True, False or None"),
        ({"units": "Block"}, "units is 'Block'; give a tuple of names of classes"),
        ({"remat": "some"}, "remat is 'some'; give 'full', 'none' or a tuple of names"),
        ({"units": (int,)}, "units is .*int.*; give a tuple of names of classes"),
        ({"remat": 3}, "remat is 3; give 'full', 'none' or a tuple of names"),
        ({"remat": ()}, r"remat is \(\); give 'full', 'none' or a tuple of names"),
        ({"remat": [1]}, r"remat is \(1,\); give 'full', 'none' or a tuple of names"),
        ({"compute_dtype": "bf16"}, "compute_dtype is 'bf16', which is no floating-point dtype"),
        ({"compute_dtype": "int32"}, "compute_dtype is 'int32', which is no floating-point dtype"),
        ({"compute_dtype": "float64"}, "give 'float32', 'bfloat16', 'float16'"),
        ({"compute_dtype": 16}, "compute_dtype is 16, which is no floating-point dtype"),
        ({"mesh": {}}, r"mesh is \(\); give whole sizes from 1 by name of the axis"),
        ({"mesh": (2, 4)}, r"mesh is \(2, 4\); give whole sizes from 1 by name of the axis"),
        ({"mesh": {"shard": True}}, r"mesh is \(\('shard', True\),\); give whole sizes from 1"),
        ({"mesh": {1: 2}}, r"mesh is \(\(1, 2\),\); give whole sizes from 1 by name"),
        ({"mesh": (("shard", 2),) * 2}, "mesh is .*; give whole sizes from 1 by name of the axis"),
    ],
)
def test_values_that_a_field_cannot_have(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


@pytest.mark.parametrize("name", ["lean", "plain"])
def test_what_is_no_step_cannot_be_compiled(name: str) -> None:
    with pytest.raises(TypeError, match="compile got 3, which cannot be called; give it"):
        Recipe(name).compile(3)  # type: ignore[arg-type]


def test_names_and_other_things() -> None:
    assert [Recipe.of(name).name for name in NAMES] == list(NAMES)
    assert Recipe.of({"name": "fast", "mesh": {"shard": 2}}) == Recipe("fast", mesh={"shard": 2})
    with pytest.raises(ValueError, match="there is no recipe 'leanest': give 'lean', 'fast'"):
        Recipe.of("leanest")
    with pytest.raises(TypeError, match="a recipe is a Recipe, a name, a file or a dict, not 3"):
        Recipe.of(3)


def test_what_is_set_goes_before_the_name() -> None:
    assert Recipe("lean").wants("step_in_backward")
    assert not Recipe("fast").wants("step_in_backward")
    assert Recipe("fast").wants("stacked")
    assert not Recipe("plain").wants("compile_step")
    assert Recipe("plain", scan=True).wants("scan")
    assert not dataclasses.replace(Recipe(), scan=False).wants("scan")


def test_explain_before_a_model_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    Recipe("fast", scan=False).explain()
    shown = capsys.readouterr().out
    assert shown.startswith("recipe 'fast', not applied to a model yet\n")
    assert "  scan: False\n  stacked: if the model allows\n" in shown
    assert "  offload_activations: False\n" in shown


def test_a_dtype_is_kept_by_its_name() -> None:
    assert Recipe(compute_dtype=torch.bfloat16) == Recipe(compute_dtype="bfloat16")


def test_a_saved_recipe_is_readable_as_other_files_are(tmp_path: Path) -> None:
    Recipe().save(tmp_path / "recipe.json")
    (tmp_path / "other").touch()
    assert (tmp_path / "recipe.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_recipe_that_cannot_be_saved_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        Recipe().save(tmp_path / "folder")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_a_recipe_that_cannot_be_saved_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "recipe.json"
    with pytest.raises(FileNotFoundError, match=f"{path}'$"):
        Recipe().save(path)


def test_a_recipe_is_hashable_and_equal_by_its_fields() -> None:
    assert len({FULL, dataclasses.replace(FULL), Recipe()}) == 2


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no recipe"):
        Recipe.load(tmp_path)
