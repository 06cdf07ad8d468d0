"""The command line of consolidation: its doors, what it prints, its exit codes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from test.common.ranks import ROOT, environment, run_python
from test.common.saving import save_step
from test.common.shard_maker import bits, every_kind, snapshot, with_optimizer
from xla_fsdp import consolidate_sharded_ckpts
from xla_fsdp.checkpoint import command
from xla_fsdp.checkpoint.convert import model_files
from xla_fsdp.checkpoint.files import copying, outputs
from xla_fsdp.checkpoint.files.storage import AtomicFiles
from xla_fsdp.checkpoint.format import consistency
from xla_fsdp.consolidate_sharded_ckpts import main

# Any attempt to import torch_xla fails in these children, as on a machine that has none.
WITHOUT_TORCH_XLA = """
import runpy, sys
sys.modules["torch_xla"] = None
sys.argv = sys.argv[1:]
runpy.run_module("xla_fsdp.consolidate_sharded_ckpts", run_name="__main__", alter_sys=True)
"""

WHICH_CHECKOUT = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    assert stop.code == 0, stop.code
print(sys.modules["xla_fsdp"].__file__)
"""


def test_merges_and_says_what_it_found_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every_kind().save(tmp_path, 8)
    prefix = tmp_path / "mnist"
    assert main(["--ckpt_prefix", str(prefix)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == (
        f"found 8 checkpoint files in {prefix}*.pth\n"
        f"saved consolidated model to {prefix}_consolidated.pth "
        f"(10 parameters and buffers, 533 elements)\n"
    )


def test_flags_are_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = every_kind()
    model.save(tmp_path, 2)
    target = tmp_path / "out.pth"
    target.write_bytes(b"older")
    arguments = ["--ckpt_prefix", f"{tmp_path}/mnist", "--ckpt_suffix", "_rank-*.pth"]
    arguments += ["--save_path", str(target)]
    assert main(arguments) == 2
    assert target.read_bytes() == b"older"
    assert main([*arguments, "--overwrite"]) == 0
    assert bits(torch.load(target, weights_only=True)["model"]) == bits(model.expected())
    out, err = capsys.readouterr()
    assert err == (
        f"consolidate_sharded_ckpts: {target}: exists already; remove it, choose another "
        f"save_path, or overwrite it (--overwrite)\n"
    )
    assert out.startswith(f"found 2 checkpoint files in {tmp_path}/mnist_rank-*.pth\n")


def test_problems_are_lines_on_stderr_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = every_kind().save(tmp_path, 3)
    paths[0].write_bytes(paths[0].read_bytes()[:1000])
    before = snapshot(tmp_path)
    assert main(["--ckpt_prefix", f"{tmp_path}/mnist"]) == 2
    assert snapshot(tmp_path) == before
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"consolidate_sharded_ckpts: {paths[0]}: truncated, or not")
    assert lines[1].startswith("consolidate_sharded_ckpts: missing ranks: 0 of 3; ")


def test_no_match_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ckpt_prefix", f"{tmp_path}/mnist"]) == 2
    assert capsys.readouterr().err == (
        f"consolidate_sharded_ckpts: no shard file matches {tmp_path}/mnist*.pth, and there is "
        f"no directory {tmp_path}/mnist\n"
    )
    assert snapshot(tmp_path) == {}


def test_convert_writes_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = every_kind()
    (tmp_path / "run").mkdir()
    model.save_safetensors(tmp_path / "run", 2)
    run = str(tmp_path / "run")
    for target in ("hf", "torch"):
        assert main(["convert", run, "--to", target]) == 0
    assert {each.name for each in tmp_path.iterdir()} == {"run", "run_hf", "run.pth"}
    found = torch.load(tmp_path / "run.pth", weights_only=True)["model"]
    assert bits(found) == bits(model.expected())
    assert "model.safetensors" in {each.name for each in (tmp_path / "run_hf").iterdir()}
    for wrong in ([run], [run, "--to", "hf", "--ckpt_prefix", run]):
        with pytest.raises(SystemExit):
            main(["convert", *wrong])
    assert main(["convert", run, "--to", "hf", "--torchtitan", "--format", "pth"]) == 2
    assert "--torchtitan has a meaning only" in capsys.readouterr().err


def test_every_dtype_is_offered() -> None:
    assert list(model_files.DTYPES) == list(consolidate_sharded_ckpts.DTYPES)


def test_prefix_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "--ckpt_prefix" in capsys.readouterr().err


def test_tool_works_from_elsewhere_and_uses_its_own_checkout(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)
    sources = shutil.ignore_patterns("__pycache__")  # without what other processes write there
    for directory in ("xla_fsdp", "tools"):
        shutil.copytree(ROOT / directory, tmp_path / "checkout" / directory, ignore=sources)
    arguments = ["--ckpt_prefix", f"{tmp_path}/mnist"]
    tool = str(tmp_path / "checkout" / "tools" / "consolidate_ckpts.py")
    done = run_python("-c", WHICH_CHECKOUT, tool, *arguments, cwd=tmp_path)
    # The tests' own checkout is installed; a tool that found that one would work only then.
    assert done.stdout.endswith(f"{tmp_path}/checkout/xla_fsdp/__init__.py\n"), done.stderr
    assert (tmp_path / "mnist_consolidated.pth").exists()
    again = run_python(tool, *arguments, cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.startswith("consolidate_sharded_ckpts: ")


def test_module_works_without_torch_xla(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)
    done = run_python("-c", WITHOUT_TORCH_XLA, "program", "--ckpt_prefix", f"{tmp_path}/mnist")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mnist_consolidated.pth").exists()


def test_help_lists_the_flags_without_importing_torch() -> None:
    watched = (
        "import runpy, sys\n"
        "sys.argv = ['program', '--help']\n"
        "try:\n"
        "    runpy.run_module('xla_fsdp.consolidate_sharded_ckpts', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    print('code', stop.code)\n"
        "print('torch' in sys.modules)\n"
    )
    done = run_python("-c", watched)
    assert done.stdout.endswith("code 0\nFalse\n"), done.stderr
    for flag in ("--ckpt_prefix", "--ckpt_suffix", "--save_path", "--overwrite"):
        assert flag in done.stdout


def test_module_can_be_run_with_m() -> None:
    done = run_python("-m", "xla_fsdp.consolidate_sharded_ckpts", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: consolidate_sharded_ckpts ")


def test_console_script_is_the_same_main() -> None:
    scripts = entry_points(group="console_scripts", name="consolidate_sharded_ckpts")
    assert {script.value for script in scripts} == {"xla_fsdp.consolidate_sharded_ckpts:main"}


def test_version_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as caught:
            main([flag])
        assert caught.value.code == 0
    version, _, usage = capsys.readouterr().out.partition("\n")
    said = r"xla_fsdp \S+; writes shard files of version 5, reads 1, 2, 3, 4, 5"
    assert re.fullmatch(said, version)
    assert "consolidate_sharded_ckpts inspect --ckpt_prefix run --verify" in usage
    assert "gs://bucket/run" in usage


def test_the_step_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    for step in (6, 7):
        assert save_step(run, step, 2) == [None, None]
    first = f"found 2 checkpoint files (.safetensors) in {run}/step_0000000%d, step %d\n"
    assert main(["--ckpt_prefix", str(run)]) == 0
    assert capsys.readouterr().out.startswith(first % (7, 7))
    assert main(["inspect", "--ckpt_prefix", f"{run}/"]) == 0
    assert capsys.readouterr().out.startswith(first % (7, 7))
    assert main(["--ckpt_prefix", f"{run}/step_00000006", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(first % (6, 6))
    assert f"would write {run}_step_00000006_consolidated.pth" in out


SLOW = {  # what is said meanwhile
    (command, "read_shards"): "reading the shard files",
    (command, "plan_merge"): "laying out the files to write",
    (copying, "_write"): r"copying: +\d+%.*",
    (outputs, "_verify"): r"copying: 100%.*B/s\]",
    (AtomicFiles, "commit"): r"copying: 100%.*B/s\]",
    (consistency, "read_crcs"): r"verifying: +\d+%.*",
    (command, "describe_steps"): "reading the shard files",
}


@pytest.mark.parametrize(("where", "said"), SLOW.items(), ids=[name for _, name in SLOW])
def test_what_takes_long_is_told_meanwhile(
    where: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits here for the line about it; lines are single writes, as threads may write others."""
    save_step(tmp_path / "run", 1, 2)
    lines, told, work = [], threading.Event(), getattr(*where)

    def write(text: str) -> None:
        lines.append(text)
        if re.fullmatch(f"consolidate_sharded_ckpts: {said}\n", text):
            told.set()

    def slow(*args: Any, **kwargs: Any) -> Any:
        told.clear()
        assert told.wait(60), lines
        return work(*args, **kwargs)

    stderr = SimpleNamespace(write=write, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(consolidate_sharded_ckpts, "FIRST_LINE", 0.01)
    monkeypatch.setattr(consolidate_sharded_ckpts, "LINE_EVERY", 0.01)
    monkeypatch.setattr(*where, slow)
    command_of = {"read_crcs": "inspect", "describe_steps": "list"}.get(where[1], "merge")
    assert main([command_of, str(tmp_path / "run"), "--verify"]) == 0
    assert told.is_set()
    assert all(line[-1] == "\n" for line in lines)


def test_the_first_line_comes_within_two_seconds_also_while_torch_is_imported(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("import sys\nsys.stdin.read()\n")  # until it ends
    code = "import xla_fsdp.consolidate_sharded_ckpts as it; print(it.FIRST_LINE); it.main(['run'])"
    own = environment({"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], env=own, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        assert child.stderr.readline() == "consolidate_sharded_ckpts: reading the shard files\n"
        out, _ = child.communicate()
        assert float(out) < 2


def test_what_begins_later_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Queue[str] = Queue()
    monkeypatch.setattr(consolidate_sharded_ckpts, "FIRST_LINE", 0.0)
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=lines.put, flush=lambda: None))
    with consolidate_sharded_ckpts.Status() as status:
        assert lines.get() == "consolidate_sharded_ckpts: reading the shard files\n"
        status.doing = "something else"
        assert lines.get() == "consolidate_sharded_ckpts: something else\n"
        status.doing = ""
    assert lines.empty()


def test_what_a_person_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    save_step(run, 1, 2)
    for arguments in (["run"], ["merge", "--ckpt-prefix", "run"], ["--ckpt_prefix", "run/"]):
        assert main(arguments) == 0
        (tmp_path / "run_consolidated.pth").unlink()
    every_kind().save(tmp_path, 2)
    assert main(["mnist", "--ckpt_suffix", "_rank-*.pth", "--dry-run"]) == 0
    (tmp_path / "x-rank0.pth").write_bytes(b"")
    assert main(["--ckpt_prefix", "x", "--ckpt_suffix", "-rank*.pth"]) == 2
    assert "x-rank0.pth: truncated" in capsys.readouterr().err
    for form, name in (
        ("dcp", "run_dcp/.metadata"),
        ("safetensors", "run_consolidated.safetensors"),
    ):
        assert main(["run", "--format", form]) == 0
        assert (tmp_path / name).is_file()
    capsys.readouterr()
    assert main(["run", "--only", "head.", "--save_path", "head\n.safetensors"]) == 0
    saved = capsys.readouterr().out.splitlines()[-1]
    assert saved.endswith(
        r"/head\n.safetensors (1 parameters and buffers, 40 elements, optimizer state of 1)"
    )
    assert main(["run", "--to_world_size", "3"]) == 0
    assert (tmp_path / "run_3_ranks" / "step_00000001" / "complete.json").exists()
    assert list(tmp_path.glob(".pth*")) == []
    assert main(["convert", "run/step_00000001", "--to", "hf"]) == 0
    assert main(["inspect", "--verify", "run_step_00000001_hf"]) == 0
    assert main(["inspect", "--verify", "run"]) == 0
    assert main(["convert", "--to", "torch", "run"]) == 0
    assert (tmp_path / "run.pth").exists()
    capsys.readouterr()
    refused = {
        ("run", "--format", "pth", "--save_path", "x.safetensors"): "name it .pth",
        ("run", "--save_path", "hf"): "Write hf/ for a directory that from_pretrained loads",
        ("run", "--save_path", "run/full.pth"): "is in the directory of the run",
        ("run", "--save_path", "run/step_00000001/hf/"): "is in the directory of the run",
        ("list", "run/step_00000001"): "is one step; list ",
        ("list", "run_3_ranks/step_00000001/"): "is one step; list ",
        ("list", "."): "holds no step that save_checkpoint wrote",
        ("list", "ru\0n"): "has a zero byte, which no path has",
        ("merge", "ru\0n"): "has a zero byte, which no path has",
    }
    before = snapshot(run)
    for arguments, text in refused.items():
        assert main(list(arguments)) == 2
        assert text in capsys.readouterr().err, arguments
    assert snapshot(run) == before
    with pytest.raises(SystemExit):
        main(["inspect", "run", "more"])
    assert (
        "unexpected more; expected one of merge, convert, inspect, list" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main([])
    assert "which files? Give --ckpt_prefix" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    save_step(tmp_path / "run", 1, 2)
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [sys.executable, "-m", "xla_fsdp.consolidate_sharded_ckpts", "inspect", "run"]
    own = environment({"PYTHONPATH": str(ROOT)})
    with os.fdopen(writing) as pipe:
        child = subprocess.run(
            arguments, cwd=tmp_path, env=own, stdout=pipe, stderr=subprocess.PIPE
        )
    assert child.returncode == 128 + signal.SIGPIPE
    assert b"Error" not in child.stderr


def test_a_file_that_a_step_lacks_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_step(tmp_path, 1, 2)
    file = next(tmp_path.glob("step_*/rank-00001*.safetensors"))
    file.unlink()
    assert main(["list", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "lacks files" in out
    assert f"{file.name}: " in err
    assert "but none are here" in err


def test_a_merged_file_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every_kind().save(tmp_path, 2)
    for name in ("full.pth", "full.safetensors"):
        file = tmp_path / name
        assert main(["--ckpt_prefix", f"{tmp_path}/mnist", "--save_path", str(file)]) == 0
        capsys.readouterr()
        assert main(["inspect", str(file), "--verify"]) == 0
        out = capsys.readouterr().out
        assert "whole    embed.weight  float32 [37, 11]" in out
        assert "verified " in out
        assert main([str(file)]) == 2
        assert "holds a whole model of " in capsys.readouterr().err
    assert main([f"{tmp_path}/mnist_rank-00000000-of-00000002.pth"]) == 2
    assert "is one file, and no prefix of shard files; 'inspect" in capsys.readouterr().err


def test_what_is_merged_already_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with_optimizer().save(tmp_path, 2)
    hugging_face = ["--save_path", "hf/", "--max_shard_size", "2KB"]
    assert main(["--ckpt_prefix", f"{tmp_path}/mnist", *hugging_face]) == 0
    Path("one").mkdir()
    assert main(["--ckpt_prefix", f"{tmp_path}/mnist", "--save_path", "one/model.pth"]) == 0
    capsys.readouterr()
    for folder in ("hf", "one"):
        for arguments in ([folder], ["convert", folder, "--to", "dcp"]):
            assert main(arguments) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert f": {folder}: holds a whole model of " in line
            assert f"nothing to merge. 'inspect {folder}' lists them" in line
    save_step(tmp_path / "run", 1, 1)
    (shard,) = Path("run/step_00000001").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["run"]) == 2  # a damaged shard is no whole model
    assert "whole model" not in capsys.readouterr().err


def test_two_merges_are_equal_to_the_byte(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)
    for name in ("a.pth", "b.pth"):
        path = tmp_path / name
        assert main(["--ckpt_prefix", f"{tmp_path}/mnist", "--save_path", str(path)]) == 0
    assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()


def test_a_part_that_a_script_left_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = every_kind()
    for path in model.save(tmp_path, 2):
        content = torch.load(path, weights_only=True)
        del content["model"]["layer.flat_param_0"], content["model"]["scale"]
        torch.save(content, path)
    out = tmp_path / "out.pth"
    arguments = ["--ckpt_prefix", f"{tmp_path}/mnist", "--save_path", str(out)]
    assert main([*arguments, "--strict"]) == 2
    assert "scale is in no shard, though shard_metadata lists it" in capsys.readouterr().err
    assert main(arguments) == 0
    assert "not merged, as no shard has it: scale, layer.weight" in capsys.readouterr().out
    gone = ("scale", "layer.weight", "layer.bias", "layer.gain", "copy.weight")
    expected = {name: value for name, value in model.expected().items() if name not in gone}
    assert bits(torch.load(out, weights_only=True)["model"]) == bits(expected)
