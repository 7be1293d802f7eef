"""The examples for clusters: their schemas, and the commands that they start."""

from __future__ import annotations

import re
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
