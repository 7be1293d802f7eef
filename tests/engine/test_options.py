"""The options of `offload`: declared once, the same spelled out and as one object, checked once."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.config.offload import OptionError

BESIDES = (
    *("model", "rule", "params", "device", "config"),
    *("process_group", "mesh", "param_init_fn"),
)
"""Arguments of `offload` that are no options."""


def test_offload_spells_out_every_option_with_its_default() -> None:
    arguments = inspect.signature(ot.offload).parameters
    spelled = {key: one.default for key, one in arguments.items() if key not in BESIDES}
    options = ot.OffloadConfig()
    assert spelled == {option.name: getattr(options, option.name) for option in fields(options)}
    assert list(spelled) == [key for key in arguments if key not in BESIDES]


def test_offload_documents_every_option() -> None:
    text = inspect.getdoc(ot.offload) or ""  # without the indent, which Python 3.13 drops itself
    documented = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    wanted = [key for key in inspect.signature(ot.offload).parameters]
    assert [key for key in documented if key in wanted] == wanted


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def trained(**arguments: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    model = net()
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", **arguments)
    for _ in range(3):
        optimizer.backward(model(torch.ones(2, 16)).square().mean())
        optimizer.step()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    rows = optimizer.ledger.rows()
    optimizer.close()
    return found, rows


@pytest.mark.parametrize(
    "options",
    [
        {"update": "speculative", "clip_norm": 0.1, "precision": "fp32"},
        {"state": "int8", "working": "host", "resident_blocks": 1, "seed": 3},
        {"state_on": "device", "keep_fp32": ("0.*",)},
    ],
)
def test_one_object_does_what_the_options_do(options: dict[str, Any]) -> None:
    spelled, rows = trained(**options)
    as_one, rows_of_one = trained(config=ot.OffloadConfig(**options))
    assert rows == rows_of_one
    assert all(torch.equal(spelled[name], as_one[name]) for name in spelled)


def test_an_option_beside_the_object_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config and state = 'int8' are both given: put it into"):
        ot.offload(net(), config=ot.OffloadConfig(clip_norm=1.0), state="int8")


CONTRADICTIONS = [
    ({"precision": "fp16", "skip_nonfinite": False}, "skip_nonfinite = False and precision"),
    ({"precision": "fp32", "state": "split16"}, "state = 'split16' stores the upper half"),
    ({"precision": "fp16", "state": "split16"}, "state = 'split16' cannot store fp16 weights"),
    ({"warmup_steps": 3}, "warmup_steps = 3 and update = 'exact'"),
    ({"resident_blocks": 2}, "resident_blocks = 2 applies only with working"),
    ({"state_on": "device", "checkpoint_spill": 1}, "checkpoint_spill = 1 is host memory"),
    ({"state_on": "device", "working": "host"}, "working = 'host' and state_on = 'device'"),
    ({"state_on": {"tape": 0.5}}, "state_on has a share on 'tape', which is not one of 'device'"),
    ({"state_on": {"device": 1.5}}, "state_on = {'device': 1.5}: every share is from 0 to 1"),
    ({"state_on": {"device": "half"}}, "state_on = {'device': 'half'}: every share is from"),
    (
        {"state_on": {"device": 0.6, "host": 0.6}},
        "state_on = {'device': 0.6, 'host': 0.6}: the",
    ),
    (
        {"state_on": "tape"},
        "state_on = 'tape' is not one of 'auto', 'device', 'host', 'disk', nor a table",
    ),
]


@pytest.mark.parametrize(("options", "said"), CONTRADICTIONS)
def test_a_contradiction_begins_with_an_option(options: dict[str, Any], said: str) -> None:
    (problem,) = ot.OffloadConfig(**options).problems()
    assert problem.startswith(said)
    assert problem.split(" ", 1)[0] in {option.name for option in fields(ot.OffloadConfig)}
    with pytest.raises(OptionError, match=re.escape(said)):
        ot.offload(net(), device="cpu", **options)


def test_every_problem_is_told_at_once() -> None:
    wrong = ot.OffloadConfig(update="eager", device_slots=0, zero_stage=7)  # type: ignore[arg-type]
    with pytest.raises(OptionError) as caught:
        wrong.checked()
    assert len(caught.value.problems) == 3
    assert str(caught.value).count("\n") == 2


@pytest.mark.parametrize("value", [None, "two", True])
@pytest.mark.parametrize("key", ["device_slots", "grad_accum_steps", "warmup_steps"])
def test_what_is_no_number_is_told(key: str, value: Any) -> None:
    (problem,) = ot.OffloadConfig(**{key: value}).problems()
    assert problem == f"{key} = {value!r} is not a number"


def test_a_number_that_is_none_by_default_may_be_none() -> None:
    assert not list(ot.OffloadConfig(clip_norm=None, host_memory_limit=None).problems())


class Colliding(nn.Module):
    """Two parameter groups make two buckets of "a"; the second is called like another module."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a", nn.Linear(4, 4))
        self.add_module("a/1", nn.Linear(4, 4))


def test_a_module_called_like_a_bucket_is_refused() -> None:
    model = Colliding()
    bias = model.get_submodule("a").bias
    rest = [param for param in model.parameters() if param is not bias]
    groups = [{"params": rest}, {"params": [bias], "weight_decay": 0.0}]
    with pytest.raises(ot.engine.ModelError, match=r"two modules .* would both be called 'a/1'"):
        ot.offload(model, params=groups, device="cpu")


def test_auto_precision_is_a_jobs() -> None:
    assert not list(ot.OffloadConfig(precision="auto", state="split16").problems())
    with pytest.raises(ValueError, match="precision = 'auto' is not one of 'bf16', 'fp16', 'fp32'"):
        ot.offload(net(), device="cpu", precision="auto")


@pytest.mark.parametrize(
    ("options", "ranks", "stage"),
    [
        ({}, 1, 0),
        ({"zero_stage": 3}, 1, 0),
        ({}, 4, 2),
        ({"zero_stage": 1}, 4, 1),
        ({"working": "host"}, 4, 3),
        ({"working": "host", "zero_stage": 2}, 1, 0),
    ],
)
def test_the_stage_among_ranks(options: dict[str, Any], ranks: int, stage: int) -> None:
    config = ot.OffloadConfig(**options)
    assert config.zero_stage_among(ranks) == stage
    assert config.streams_among(ranks) == (stage == 3 or config.working == "host")
    with pytest.raises(OptionError, match="with 2 ranks each host holds a shard of the weights"):
        replace(config, working="host", zero_stage=1).zero_stage_among(2)
