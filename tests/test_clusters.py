"""The examples for clusters: their schemas, and the commands that they start. Ray and SkyPilot are
tested where they are installed: docs/dependencies.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.test_pages import commands, of_command_line, problem

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
VERSIONS = ("1.28", "1.34")
"""Of Kubernetes: Indexed Jobs are in all that are maintained."""

OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_of_kubernetes_follow_its_schema(version: str) -> None:
    for one in OBJECTS:
        assert kubernetes_validate.validate(one, version, strict=True) == version
    with pytest.raises(kubernetes_validate.ValidationError):
        wrong = OBJECTS[1] | {"spec": OBJECTS[1]["spec"] | {"complections": 2}}
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_commands_that_clusters_start_are_ours() -> None:
    (container,) = OBJECTS[1]["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    assert of_command_line(arguments[arguments.index("offloadtrain") + 1 :]) == ""
    slurm = (EXAMPLES / "slurm.sbatch").read_text()
    for text in (
        yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())["run"],
        slurm.replace("srun ", "").replace('"${folder[@]}" &', ""),
    ):
        found = [words for words in commands(text) if "train" in words]
        assert found and [problem(words) for words in found] == [""] * len(found), found


def test_the_service_of_kubernetes_is_the_address_of_its_job() -> None:
    service, job = OBJECTS
    name = service["metadata"]["name"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    address = re.search(r"--master-addr=(\S+)", " ".join(container["args"]))
    assert address and address[1] == f"{job['metadata']['name']}-0.{name}"
    assert job["spec"]["template"]["spec"]["subdomain"] == name


def outside(command: list[object], home: Path) -> subprocess.CompletedProcess[str]:
    """A command of a tool that writes into the home folder, with another home and without a GPU."""
    environment = os.environ | {"HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment | quiet,
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: pip install 'ray[train]'")
def test_workers_of_ray_have_the_losses_of_torchrun(tmp_path: Path) -> None:
    ray = outside([EXAMPLES / "ray_train.py", "--workers", 2, "--storage", tmp_path], tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    torchrun = outside([*launch, EXAMPLES / "two_gpus.py"], tmp_path)
    assert ray.returncode == 0, ray.stderr
    wanted, seen = map(_losses, (torchrun, ray))
    assert len(wanted) == 5 and seen == wanted


def _losses(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Its lines of losses, each once: Ray passes what workers print on to both streams."""
    return list(dict.fromkeys(re.findall(r"step +\d+  loss \S+", done.stdout + done.stderr)))


@pytest.mark.skipif(find_spec("sky") is None, reason="no SkyPilot: pip install skypilot")
def test_skypilot_takes_its_file(tmp_path: Path) -> None:
    """Its own loader, which reads the file against its schemas, finds nothing to refuse."""
    text = (EXAMPLES / "skypilot.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace("disk_size", "disc_size"))
    load = "import sys, sky; print(sky.Task.from_yaml(sys.argv[1]).num_nodes)"
    right = outside(["-c", load, EXAMPLES / "skypilot.yaml"], tmp_path)
    assert right.stdout.split() == ["1"], right.stderr
    assert "disc_size" in outside(["-c", load, tmp_path / "wrong.yaml"], tmp_path).stderr
