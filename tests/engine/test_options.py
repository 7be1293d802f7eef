"""The options of `offload`: declared once, the same spelled out and as one object, checked once."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offloadtrain as ot
from offloadtrain.config.offload import (
    OPTIONS,
    OffloadConfig,
    OffloadOptions,
    OptionError,
    OptionGroup,
    StateOptions,
    WeightOptions,
)
from offloadtrain.engine.api import OffloadArguments
from tests.numerics.muon import RULE as MUON


def test_type_checkers_know_the_options_and_groups_that_fields_declare() -> None:
    """`OffloadOptions` is the copy for type checkers, which read no fields."""
    in_calls = {tuple[str, ...]: Sequence[str]}
    declared = {name: in_calls.get(o.kind, o.kind) for name, o in OPTIONS.items()}
    for field in fields(OffloadConfig):
        if isinstance(field.default, OptionGroup):
            declared[field.name] = type(field.default)
    declared["state"] = str | StateOptions
    assert get_type_hints(OffloadOptions) == declared


def test_help_has_the_docs_of_every_option() -> None:
    text = inspect.getdoc(ot.offload) or ""  # without the indent, which Python 3.13 drops itself
    words = " ".join(text.split())
    for name, option in OPTIONS.items():
        assert f" {name}: {option.doc} Default: {option.default!r}." in words
        assert len(option.doc) > 20
    of_config = OffloadOptions.__annotations__
    documented = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    arguments = [*inspect.signature(ot.offload).parameters]
    keywords = [name for name in OffloadArguments.__annotations__ if name not in of_config]
    assert documented[: len(arguments) + len(keywords)] == [*arguments, *keywords]
    assert [name for name in documented if name in OPTIONS] == [*OPTIONS]


def test_configs_with_shares_have_a_hash_and_copies_of_them() -> None:
    shares = {"device": 0.3, "disk": 0.2}
    config = OffloadConfig(state_on=shares, sums_on={"device": 0.5}, keep_fp32=["*norm*"])
    same = OffloadConfig(sums_on={"device": 0.5}, keep_fp32=["*norm*"]).replace(
        state=StateOptions(tier={"disk": 0.2, "device": 0.3})
    )
    assert config == same and hash(config) == hash(same) and config in {same}
    assert config.replace(state_on={"device": 0.3}) not in {config}
    assert hash(pickle.loads(pickle.dumps(config))) == hash(config)
    before = dict(shares)
    shares["device"] = 0.9
    assert config.state.tier == before and repr(before) in repr(config)


@given(st.data())
def test_flat_names_and_groups_make_the_same_config(data: st.DataObject) -> None:
    values = {
        name: data.draw(st.sampled_from([option.default, f"{name}!"]))
        for name, option in OPTIONS.items()
        if not isinstance(option.default, tuple)
    }
    flat = OffloadConfig(**values)  # type: ignore[arg-type]
    groups: dict[str, dict[str, Any]] = {}
    top = {}
    for name, value in values.items():
        *group, key = OPTIONS[name].path
        (groups.setdefault(group[0], {}) if group else top)[key] = value
    kinds = {f.name: type(f.default) for f in fields(OffloadConfig)}
    nested = OffloadConfig(**top, **{key: kinds[key](**keys) for key, keys in groups.items()})
    assert flat == nested == OffloadConfig().replace(**values)  # type: ignore[arg-type]
    assert nested.options() == {name: option.default for name, option in OPTIONS.items()} | values
    assert OffloadConfig(**nested.options(changed=True)) == nested  # type: ignore[arg-type]


def test_a_flat_name_next_to_groups_is_refused() -> None:
    """`dataclasses.replace` passes all groups: `state` would be a new group, on another tier."""
    config = OffloadConfig(state="int8", state_on="device")
    with pytest.raises(ValueError, match=r"state = 'fp32' and .* set state\.format in its group"):
        replace(config, state="fp32")
    with pytest.raises(ValueError, match=r"config\.replace\(working='host'\)"):
        ot.offload(net(), weights=WeightOptions(device_slots=1), working="host")
    assert replace(config, update="delayed") == config.replace(update="delayed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_onn": "host"}, "unknown option 'state_onn'; did you mean state_on?"),
        ({"gradients_on": "host"}, "unknown option 'gradients_on'; did you mean grad_on?"),
        ({"weights": "host"}, "weights = 'host' must be a WeightOptions"),
        ({"config": {"state": "int8"}}, "config is a dict: give an OffloadConfig"),
    ],
)
def test_what_is_no_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        ot.offload(net(), **options)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def test_an_option_beside_the_object_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config and state = 'int8' are both given: put it into"):
        ot.offload(net(), config=ot.OffloadConfig(clip_norm=1.0), state="int8")


CONTRADICTIONS = [
    ({"loss_scale_hysteresis": 2}, "loss_scale_hysteresis = 2 and precision = 'bf16': only fp16"),
    ({"sums_down": "working"}, "sums_down = 'working' and sums_on = 'host': every microbatch"),
    (
        {"sums_down": "working", "sums_on": {"host": 1.0}},
        "sums_down = 'working' and sums_on = {'host': 1.0}: every microbatch",
    ),
    ({"sums_on": {"disk": 0.5}}, "sums_on has a share on 'disk', which is not one of 'device', '"),
    ({"sums_on": {"device": -0.1}}, "sums_on = {'device': -0.1}: every share is from 0 to 1"),
    ({"sums_on": {"device": 0.6, "host": 0.6}}, "sums_on = {'device': 0.6, 'host': 0.6}: the sh"),
    ({"sums_on": "disk"}, "sums_on = 'disk' is not one of 'auto', 'device', 'host', nor a table"),
    ({"recompute_blocks": 1}, "recompute_blocks = 1 and activation = 'keep': it counts the layers"),
    ({"offload_saved_above": 1}, "offload_saved_above = 1 and activation = 'keep': only"),
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


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS)
def test_a_contradiction_begins_with_an_option(options: dict[str, Any], message: str) -> None:
    (problem,) = ot.OffloadConfig(**options).problems()
    assert problem.startswith(message)
    assert problem.split(" ", 1)[0] in OPTIONS
    with pytest.raises(OptionError, match=re.escape(message)):
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
    assert config.streams_among(ranks) == (stage == 3 or config.weights.tier == "host")
    with pytest.raises(OptionError, match="with 2 ranks each host holds a shard of the weights"):
        config.replace(working="host", zero_stage=1).zero_stage_among(2)


DISK: dict[str, Any] = {"state_on": "disk", "scratch_dir": ".", "scratch_in_memory": True}
ON_HOST = DISK | {"state_on": "host"}
SELECTIVE: dict[str, Any] = {"activation": "selective"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"precision": "int8"}, "precision = 'int8' is not one of"),
    ({"state": "fp8"}, "state = 'fp8' is not one of"),
    ({"update": "eager"}, "update = 'eager' is not one of"),
    ({"clip_norm": 0.0}, "clip_norm = 0.0 is not positive"),
    ({"grad_accum_steps": 0}, "grad_accum_steps = 0 is not positive"),
    ({"device": "meta"}, "works for 'cuda' and 'cpu'"),
    ({"keep_whole": ["head"]}, "keep_whole .* only with zero_stage = 3"),
    (DISK | {"update": "speculative"}, "a second copy of the state in host memory"),
    (DISK | {"checkpoint_spill": 1 << 20}, "none is there"),
    (DISK | {"scratch_dir": None}, "without scratch_dir"),
    (DISK | {"scratch_dir": None, "state_on": {"disk": 0.5}}, "without scratch_dir"),
    (ON_HOST, "is for state on the disk"),
    (ON_HOST | {"working": "disk", "update": "speculative"}, "working = 'disk'"),
    (ON_HOST | {"working": "disk", "scratch_dir": None}, "without scratch_dir"),
    (ON_HOST | {"working": "disk", "grad_on": "disk"}, "where its state is"),
    (DISK | {"grad_on": "disk", "update": "delayed"}, "grad_on = 'host'"),
    (DISK | {"grad_on": "dist"}, "did you mean disk"),
    (DISK | {"state_on": "device", "working": "disk"}, "updated on the host"),
    ({"state_on": {"device": 0.9}, "working": "host"}, "asks for 0.9 of the state"),
    (SELECTIVE | {"activation_policy": "mm"}, "activation_policy = 'mm' is no function"),
    ({"activation_policy": print}, "activation_policy = .* and activation = 'keep'"),
    (
        SELECTIVE | {"compile_blocks": True, "activation_policy": print},
        "activation_policy and compile_blocks = True: .* set activation_budget",
    ),
    (
        SELECTIVE | {"activation_budget": 0.3},
        "activation_budget = 0.3 and compile_blocks = False",
    ),
    (
        {"compile_blocks": True, "activation_budget": 0.3},
        "activation_budget = 0.3 and activation = 'keep'",
    ),
    (
        SELECTIVE | {"compile_blocks": True, "activation_budget": 1.5},
        "activation_budget = 1.5 is more than 1",
    ),
    (
        {"rule": MUON, "state": "int8"},
        "state = 'int8' and Muon: .* Use state = 'fp32' or 'split16'",
    ),
    (
        {"rule": MUON, "update": "speculative"},
        "update = 'speculative' and Muon: .* 'exact' or 'delayed'",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ot.offload(net(), **{"device": "cpu", **options})
