"""What documented commands start where tests let a shell run them, in a directory like a clone.

``python -m test.common.documented NAME ARGUMENTS`` stands for the program NAME of the shell.
Python runs, with the options of ``SHORT`` behind; what Google Cloud would run on a host
(``--command``) runs here. Each call leaves a line in ``$DOCUMENTED_LOG``: exit code and command.
With ``$DOCUMENTED_RUN`` empty nothing runs; a command that is not known has exit code 1.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*python (?:-m [^`\s]+\s|(?!-m))[^`]+)`")
VARIABLES = (
    "NAME=n ZONE=z BUCKET=bucket IP=127.0.0.1 CLUSTER=c IMAGE=i POD=p PROJECT=p REPOSITORY=r"
)

MODEL = "--width=32 --blocks=2 --heads=4 --kv_heads=2 --ffn=64"
TRAINED = "--steps=4 --length=32 --batch_size=2 --generate=5"
LLAMA = "--set vocabulary=512 --set length=64"
PICTURES = "--fake_data --fake_pictures=64 --model=resnet18 --img_size=32 --batch_size=4"
FAKE = f"{PICTURES} --num_epochs=1 --max_steps=3 --num_workers=0 --num_ranks=2"
DIGITS = "--fake_data --num_epochs=1 --max_steps=12 --compare_steps=0 --num_ranks=2"

# What makes a command short, by its beginning; the longest that fits is taken.
SHORT = {
    "-c": "",
    "-m xla_fsdp.consolidate_sharded_ckpts": "",
    "-m xla_fsdp.launch": "",
    "-m xla_fsdp.preflight train:build_step": "",
    "-m xla_fsdp.preflight train:build_step --topology v5e:8x8 --tune": "--budget 60s",
    "-m xla_fsdp.preflight examples.mnist.rehearse:build_step": "",
    "-m xla_fsdp.preflight examples.llm.rehearse:build_step": "--set width=32 --set blocks=2",
    "-m xla_fsdp.preflight examples.llm.llama:step": f"--set width=128 --set ffn=256 --set heads=4 "
    f"--set kv_heads=2 --set blocks=2 {LLAMA}",
    "-m xla_fsdp.preflight examples.llm.llama:step --topology v5e:4x4 --tune": "--budget 60s "
    f"--set width=128 --set ffn=256 --set heads=4 --set kv_heads=2 --set blocks=8 {LLAMA}",
    "-m xla_fsdp.preflight examples.imagenet.vit_10b:step": "--set width=64 --set depth=2 "
    "--set heads=4",
    "-m test.common.model_table": "",
    "benchmarks/program_digests.py": "--only=1",
    "benchmarks/replay.py": "--width=64 --blocks=2 --steps=3",
    "benchmarks/tpu_compile.py": "--models=64x1 --topology=v5e:2x2 --only=ours --rounds=1",
    "examples/imagenet/cifar10.py": "--per_class=8",
    "examples/imagenet/train.py": FAKE,
    "examples/imagenet/train.py --datadir data/small": "--num_epochs=1 --max_steps=2 --num_ranks=2 "
    "--test_set_batch_size=4 --batch_size=4 --num_workers=0",
    "examples/imagenet/vit_10b.py": "--width=64 --depth=2 --heads=4",
    "examples/llm/generate.py": "--generate=5",
    "examples/llm/llama.py": f"{MODEL} --vocabulary=512",
    "examples/llm/train.py": f"{MODEL} {TRAINED} --num_ranks=2",
    "examples/llm/train.py --mesh": f"{MODEL} {TRAINED}",
    "examples/llm/train.py --attention xla_fsdp --context": f"{MODEL} {TRAINED} --num_ranks=4",
    "examples/llm/train.py --config": f"{TRAINED} --warmup_steps=1 --eval_steps=2 --num_ranks=2",
    "examples/llm/train.py --config=examples/llm/small.yaml --mesh=replica=2,shard=16": ""
    f"{TRAINED} --warmup_steps=1 --eval_steps=2 --num_ranks=2 --mesh=replica=2,shard=1",
    "examples/llm/train.py --profile": f"{MODEL} {TRAINED} --steps=16 --num_ranks=2",
    "examples/mnist/train.py": DIGITS,
    "examples/mnist/train.py --profile": f"{DIGITS} --max_steps=20",
    "examples/mnist/train.py --help": "",
    "first.py": "",
    "tools/consolidate_ckpts.py": "--help",
    "train.py": "",
}

SMOKE = "tpu_smoke.sh"
LINKED = ("examples", "benchmarks", "docs", "Makefile", "pyproject.toml", "LICENSE")
UNKNOWN = 'command_not_found_handle() { echo "127 $*" >> "$DOCUMENTED_LOG"; return 127; }'

# What would change a machine or ask a cloud: the beginnings that are known.
CLOUD = {
    "gcloud": (
        "auth application-default login",
        "compute tpus tpu-vm",
        "compute tpus queued-resources",
    ),
    "xpk": ("workload create", "workload delete", "workload list", "cluster create"),
    "kubectl": ("apply -f", "logs", "exec", "get", "delete"),
    "docker": ("build", "push"),
    "git": ("clone",),
    "py-spy": ("dump",),
    "sudo": ("py-spy dump",),
}
PROGRAMS = ("python", "consolidate_sharded_ckpts", "pip", "make", "tensorboard", *CLOUD)


def page_names() -> list[str]:
    """The pages whose commands are run."""
    paths = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    return sorted(str(path.relative_to(ROOT)) for path in paths if script_of(path))


def script_of(path: Path) -> str:
    """Return the commands of a page as a script of a shell: every line of a fence that names no
    language, and commands of Python in the text."""
    text = path.read_text()
    found = [match[2] for match in FENCE.finditer(text) if not match[1]]
    outside = FENCE.sub("", text)
    found += [" ".join(each.split()) + "\n" for each in INLINE.findall(outside)]
    return "".join(found)


def run_script(
    script: str, folder: Path, *, run: bool, seconds: float = 1800
) -> tuple[int, list[str], str]:
    """Run a script in a directory like a clone; return its exit code, the lines of the log, and
    what was printed."""
    make_clone(folder)
    from test.common.ranks import FAST_COMPILE  # not in every program

    log = folder / "log"
    log.touch()
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "DOCUMENTED_LOG": str(log),
        "DOCUMENTED_RUN": "1" if run else "",
        "XLA_FLAGS": FAST_COMPILE,
        "PJRT_DEVICE": "CPU",
    }
    done = subprocess.run(
        ["bash", "-c", f"{UNKNOWN}\n{VARIABLES}\n{script}"],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        timeout=seconds,
        capture_output=True,
        text=True,
    )
    return done.returncode, log.read_text().splitlines(), done.stdout + done.stderr


def make_clone(folder: Path) -> None:
    """Give a directory what a clone has, and programs that stand for others, in ``bin``."""
    for place, names in (("bin", PROGRAMS), ("tools", [SMOKE])):
        (folder / place).mkdir()
        for name in names:
            shim = folder / place / name
            shim.write_text(
                f'#!/bin/sh\nexec {sys.executable} -S -m test.common.documented {name} "$@"\n'
            )
            shim.chmod(0o755)
    for path in (*ROOT.glob("tools/*.py"), *map(ROOT.joinpath, LINKED)):
        (folder / path.relative_to(ROOT)).symlink_to(path)
    (folder / "xla_fsdp").symlink_to(folder)  # what git clone makes


def shortened(arguments: Sequence[str]) -> list[str] | None:
    """Return the arguments of Python with what makes them short; None if they are not known."""
    words = shlex.join(arguments) + " "
    fitting = [each for each in SHORT if words.startswith(f"{each} ")]
    if not fitting:
        return None
    return [*arguments, *SHORT[max(fitting, key=len)].split(), *place_of(arguments)]


def place_of(arguments: Sequence[str]) -> list[str]:
    """Return a place for checkpoints where an example would choose one in the tree."""
    own = arguments[0].startswith(("examples/imagenet/train", "examples/mnist/train"))
    if not own or {"--ckpt_dir", "--help"} & {*arguments}:
        return []
    number = len(Path(os.environ["DOCUMENTED_LOG"]).read_text().splitlines())
    return [f"--ckpt_dir=runs/{'resumed' if '--resume' in arguments else number}"]


def main(name: str, arguments: list[str]) -> int:
    """Do what a program does here, and note it; return the exit code."""
    code = call(name, arguments)
    with Path(os.environ["DOCUMENTED_LOG"]).open("a") as log:
        log.write(f"{code} {shlex.join([name, *arguments])}\n")
    return code


def call(name: str, arguments: list[str]) -> int:
    """Run a program, or look up whether it is known."""
    run = bool(os.environ["DOCUMENTED_RUN"])
    if name == "python":
        words = shortened(arguments)
        command = words and [sys.executable, *words]
    elif name == "consolidate_sharded_ckpts":
        command = [sys.executable, "-m", f"xla_fsdp.{name}", *arguments]
    elif name == SMOKE:
        os.environ["PYTHON"] = sys.executable
        command = [str(ROOT / "tools" / SMOKE), "versions", *arguments]
    elif name == "tensorboard":  # else it serves
        command = [sys.executable, "-m", "tensorboard.main", "--inspect", *arguments]
    elif name == "make":
        return subprocess.call(["/usr/bin/make", "--silent", "-n", *arguments], cwd=ROOT, stdout=-3)
    elif name == "pip":
        return int(not installs(arguments))
    else:
        return cloud(name, arguments)
    if not command:
        return 1
    return subprocess.call(command) if run else 0


def installs(arguments: Sequence[str]) -> bool:
    """Whether the extras that pip is asked for are there."""
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    asked = re.fullmatch(r"install (?:-e )?\.(?:\[([\w,]+)\])?", " ".join(arguments))
    return asked is not None and {*(asked[1] or "").split(",")} - {""} <= {*extras}


def cloud(name: str, arguments: Sequence[str]) -> int:
    """Run what a host would be told to, once; return whether the call is known."""
    words = " ".join(arguments)
    if not words.startswith(CLOUD[name]):
        return 1
    return max((subprocess.call(["bash", "-c", each]) for each in told(arguments)), default=0)


def told(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the commands for a host."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--command":
            yield following
        elif word.startswith("--command="):
            yield word.removeprefix("--command=")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
