"""The examples for clusters: their schemas, and the commands that they start. Ray and SkyPilot are
tested where they are installed: docs/dependencies.md."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from offloadtrain.cli.main import app

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_the_objects_of_kubernetes_follow_its_schema(version: str) -> None:
    for item in OBJECTS:
        assert kubernetes_validate.validate(item, version, strict=True) == version
    with pytest.raises(kubernetes_validate.ValidationError):
        wrong = OBJECTS[1] | {"spec": OBJECTS[1]["spec"] | {"complections": 2}}
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_commands_that_clusters_start_are_ours() -> None:
    """The service of Kubernetes has the address that its job connects to."""
    service, job = OBJECTS
    (container,) = job["spec"]["template"]["spec"]["containers"]
    address = re.search(r"--master-addr=(\S+)", " ".join(container["args"]))
    name = service["metadata"]["name"]
    assert address and address[1] == f"{job['metadata']['name']}-0.{name}"
    assert job["spec"]["template"]["spec"]["subdomain"] == name
    kubernetes = " ".join(container["args"])
    skypilot = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())["run"]
    slurm = (EXAMPLES / "slurm.sbatch").read_text().replace('"${folder[@]}"', "").replace("&", "")
    for text in (kubernetes, skypilot, slurm):
        started = re.findall(r"offloadtrain (train .*)", text.replace("\\\n", " "))
        assert started
        for arguments in started:
            app.parse_args(shlex.split(arguments), print_error=False, exit_on_error=False)


def outside(command: list[object], home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that writes into the home folder, with another home and no GPU."""
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
    # Each line once: Ray passes what workers print on to both streams.
    expected, losses = (
        list(dict.fromkeys(re.findall(r"step +\d+  loss \S+", done.stdout + done.stderr)))
        for done in (torchrun, ray)
    )
    assert len(expected) == 5 and losses == expected


@pytest.mark.skipif(find_spec("sky") is None, reason="no SkyPilot: pip install skypilot")
def test_skypilot_accepts_its_file(tmp_path: Path) -> None:
    text = (EXAMPLES / "skypilot.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace("disk_size", "disc_size"))
    load = "import sys, sky; print(sky.Task.from_yaml(sys.argv[1]).num_nodes)"
    right = outside(["-c", load, EXAMPLES / "skypilot.yaml"], tmp_path)
    assert right.stdout.split() == ["1"], right.stderr
    assert "disc_size" in outside(["-c", load, tmp_path / "wrong.yaml"], tmp_path).stderr
