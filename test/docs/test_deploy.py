"""The image and the JobSet are what Kubernetes takes, and ask for what is there."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from test.common.ranks import ROOT
from xla_fsdp.preflight.topologies import find_topology

DOCKERFILE = (ROOT / "examples" / "deploy" / "Dockerfile").read_text()
ACCELERATORS = {"tpu-v5-lite-podslice": "v5e"}


def jobset() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="comes with the extra docs")
    found: dict[str, Any] = yaml.safe_load(
        (ROOT / "examples" / "deploy" / "jobset.yaml").read_text()
    )
    return found


def slices() -> dict[str, Any]:
    [found] = jobset()["spec"]["replicatedJobs"]
    return found


def pod() -> dict[str, Any]:
    found: dict[str, Any] = slices()["template"]["spec"]["template"]["spec"]
    return found


def test_kubernetes_takes_the_job_of_a_slice() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="comes with the extra dev")
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": jobset()["metadata"],
        "spec": slices()["template"]["spec"],
    }
    validate.validate(job, validate.latest_version(), strict=True)
    wrong = {**job, "spec": {**job["spec"], "paralelism": 4}}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, validate.latest_version(), strict=True)


def test_xpk_is_asked_for_the_same_job() -> None:
    script = (ROOT / "examples" / "deploy" / "xpk.sh").read_text()
    command = script[script.index("xpk workload") :]
    assert command in (ROOT / "docs" / "cluster.md").read_text()
    words = shlex.split(command.replace("\\\n", " "))
    asked = dict(each.split("=", 1) for each in words if each.startswith("--") and "=" in each)
    topology = find_topology(asked["--tpu-type"])
    assert topology.num_ranks == find_topology("v5e:4x4").num_ranks
    assert asked["--num-slices"] == str(slices()["replicas"])
    grace = pod()["terminationGracePeriodSeconds"]
    assert asked["--termination-grace-period-seconds"] == str(grace)
    [container] = pod()["containers"]
    job = words[words.index("--command") + 1].replace("$", "").split()
    assert job == ["python", *container["args"]]


def test_hosts_have_the_chips_of_the_topology() -> None:
    selector = pod()["nodeSelector"]
    chips = ACCELERATORS[selector["cloud.google.com/gke-tpu-accelerator"]]
    topology = find_topology(f"{chips}:{selector['cloud.google.com/gke-tpu-topology']}")
    spec = slices()["template"]["spec"]
    [container] = pod()["containers"]
    on_a_host = container["resources"]["limits"]["google.com/tpu"]
    assert spec["parallelism"] == spec["completions"] == topology.num_ranks / on_a_host
    mesh = f"--mesh=replica={slices()['replicas']},shard={topology.num_ranks}"
    assert mesh in container["args"]


def test_one_failure_ends_all_and_all_begin_again() -> None:
    assert slices()["template"]["spec"]["backoffLimit"] == 0
    assert pod()["restartPolicy"] == "Never"
    assert jobset()["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert pod()["terminationGracePeriodSeconds"] >= 300


def test_the_image_has_what_the_job_runs() -> None:
    [container] = pod()["containers"]
    script = container["args"][0]
    copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)
    for path in " ".join(copied).split():
        assert (ROOT / path).exists()
    assert any(script.startswith(path) for path in " ".join(copied).split())
    extras = re.search(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert extras is not None
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {*extras[1].split(",")} <= {*known}
    assert 'ENTRYPOINT ["python"]' in DOCKERFILE  # the first process, to which signals go
