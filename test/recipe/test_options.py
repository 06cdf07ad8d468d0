"""``Recipe``: its values, its file, and what it asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

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
        ("[1]", "is no recipe: it holds a list"),
        ('{"version": 2}', "is a recipe of version 2; this reads 1"),
        ('{"scna": true}', "is no recipe: it has scna; there are name, units, remat, scan"),
        ('{"name": "best"}', "name is 'best'; give 'lean', 'fast', 'plain'"),
        ('{"mesh": 8}', "mesh is 8; give sizes by name of the axis"),
        ('{"mesh": {"tensor": 2}}', "mesh has an axis tensor alone; give shard=1 before it"),
        ('{"mesh": {"shard": 0}}', "mesh has shard=0; sizes are whole numbers from 1"),
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
        ({"compute_dtype": "bf16"}, "compute_dtype is 'bf16', which is no dtype of torch"),
    ],
)
def test_values_that_a_field_cannot_have(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


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


def test_a_recipe_is_hashable_and_equal_by_its_fields() -> None:
    assert len({FULL, dataclasses.replace(FULL), Recipe()}) == 2
