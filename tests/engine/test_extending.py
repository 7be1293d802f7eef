"""The doors of docs/extending.md: an optimizer and a state format of one's own, by its own code.

Each trains to the bits of a plain loop that knows neither, in every mode and placement.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.optim import Draw, ElementwiseRule, Field, StateFormat, register_state_format
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels.scalars import random_key
from offloadtrain.step.layout import formats
from offloadtrain.train.dry_run import check
from tests.numerics.comparison import train
from tests.numerics.models import Chain, batches
from tests.numerics.reference import SEED, RuleRun
from tests.numerics.test_rules import check as check_bits
from tests.numerics.test_rules import pair
from tests.plan.test_plan import planned, small
from tests.runtime.fake_cuda import installed
from tests.runtime.test_cuda_lanes import Case, compare

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
OPTIMIZER, _, FORMAT, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LR, BETA, DECAY = 1e-2, 0.9, 0.1
TOY = "bf16-moments"


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(code, "docs/extending.md", "exec", dont_inherit=True), names)
    return names


Signum: type[ElementwiseRule] = run(OPTIMIZER)["Signum"]


def signum(**keys: Any) -> Any:
    return Signum(**{"lr": LR, "beta": BETA, "weight_decay": DECAY, **keys})


@pytest.fixture
def toy() -> Iterator[None]:
    with run(FORMAT)["registered"]:
        yield


# ---- plain loops -------------------------------------------------------------------------------


@dataclass
class SignumRun(RuleRun):
    """Signum in place; in the page's format moments are kept in bf16, rounded to nearest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exp_avg = {name: torch.zeros(param.shape) for name, param in self.trained.items()}

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups)  # which takes no step

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        for name, param in self.trained.items():
            master, moment = self.master(name), self.exp_avg[name]
            new = moment * BETA + (1 - BETA) * (sums[name] * factor)
            master.copy_(master * (1 - LR * DECAY) - LR * new.sign())
            moment.copy_(new.bfloat16() if self.state == TOY else new)
            param.data.copy_(master)

    def moment(self, name: str, key: str) -> Tensor:
        return self.exp_avg[name].bfloat16() if self.state == TOY else self.exp_avg[name]


class AdamRun(RuleRun):
    """AdamW in place, whose moments are kept in bf16."""

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        super().update(sums, factor)
        for state in self.adam.state.values():
            for key in self.rule.moments:
                state[key].copy_(state[key].bfloat16())

    def moment(self, name: str, key: str) -> Tensor:
        return super().moment(name, key).bfloat16()


RULES: dict[str, tuple[Any, type[RuleRun]]] = {
    "signum": (signum(), SignumRun),
    "adamw": (ot.AdamW(lr=LR, betas=(0.9, 0.95), weight_decay=DECAY), AdamRun),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "clipped": {"clip_norm": 0.05},
    "accumulated": {"grad_accum_steps": 3, "clip_norm": 0.5},
    "early": {"skip_nonfinite": False},
    "speculative": {"update": "speculative", "grad_accum_steps": 2},
    "streamed": {"working": "host", "device_slots": 1, "clip_norm": 0.5},
    "streamed speculative": {"working": "host", "update": "speculative", "clip_norm": 0.5},
    "recomputed": {"activation": "offload"},
    "fp16": {"precision": "fp16", "clip_norm": 0.5},
    "fp32": {"precision": "fp32", "clip_norm": 0.5},
}
BOTH = [("signum", "fp32"), ("signum", TOY), ("adamw", TOY)]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("rule", "state", "name"),
    [
        pytest.param(*BOTH[(number + shift) % 3], name, marks=pytest.mark.slow if shift else ())
        for shift in (0, 1)
        for number, name in enumerate(OPTIONS)
    ],
)
def test_a_plain_loop_has_the_same_bits(rule: str, state: str, name: str) -> None:
    made, loop = RULES[rule]
    check_bits(made, loop, state=state, **OPTIONS[name])


def test_a_rule_of_ones_own_on_the_device() -> None:
    check_bits(signum(), SignumRun, state_on="device", clip_norm=0.5)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("options", [{}, {"grad_accum_steps": 2, "update": "speculative"}])
def test_over_the_lanes_of_cuda(options: dict[str, Any]) -> None:
    """Where Adam has a kernel the host lane is a queue of native calls; here it runs torch."""
    with installed() as gpu:
        compare(gpu, Case({"state": TOY, **options}, poison=True))


# ---- formats that round at random, and scale ---------------------------------------------------


class Scaled:
    """The working weight and what it lacks of its master, in bf16; moments of 8 bits with a scale
    per 32 elements, rounded at random."""

    format = StateFormat(
        "scaled",
        master=(Field("weight", None), Field("rest", "bfloat16")),
        moment=(Field("", "int8"), Field("_scale", "float32", per=32)),
        precisions=("bf16",),
    )

    def load(self, fields: tuple[Tensor, ...]) -> Sequence[Tensor]:
        weight, rest, *moments = fields
        codes, scales = moments[: len(moments) // 2], moments[len(moments) // 2 :]
        wide = (scale.repeat_interleave(32)[: weight.numel()] for scale in scales)
        return [weight.float() + rest.float(), *(c * s for c, s in zip(codes, wide, strict=True))]

    def store(
        self, fields: tuple[Tensor, ...], values: Sequence[Tensor], draw: Draw | None
    ) -> None:
        weight, rest, *moments = fields
        weight.copy_(values[0])
        rest.copy_(values[0] - weight.float())
        codes, scales = moments[: len(moments) // 2], moments[len(moments) // 2 :]
        for code, scale, value in zip(codes, scales, values[1:], strict=True):
            padded = nn.functional.pad(value, (0, -value.numel() % 32)).view(-1, 32)
            scale.copy_(padded.abs().amax(1) / 127)
            steps = value / scale.clamp(min=1e-30).repeat_interleave(32)[: value.numel()]
            dither = 0.5 if draw is None else draw().double() / 2**32
            code.copy_((steps + dither).floor().clamp(-127, 127))


@dataclass
class CodecRun(SignumRun):
    """Signum, each parameter's state for itself in a format's own tensors."""

    steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.format = formats.FORMATS[self.state]
        self.ids = {name: index for index, name in enumerate(self.params)}
        self.states = {n: zeros(self.format, p.numel(), 1) for n, p in self.trained.items()}
        for name, param in self.trained.items():
            first = self.master(name).reshape(-1)
            kernels.set_master_by_codec(self.format, self.states[name], first)
            param.data.copy_(self.states[name][0].view_as(param))

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        self.steps += 1
        codec = kernels.formats.CODECS[self.state]
        for name, param in self.trained.items():
            master, moment = codec.load(self.states[name])
            self.masters[name].data[: param.numel()] = master
            self.exp_avg[name] = moment.view(param.shape)
        super().update(sums, factor)
        for name, param in self.trained.items():
            values = [x.reshape(-1) for x in (self.master(name), self.exp_avg[name])]
            codec.store(self.states[name], values, lambda name=name: self._draw(name))
            param.data.copy_(self.states[name][0].view_as(param))

    def _draw(self, name: str) -> Tensor:
        key = random_key(SEED, self.steps, self.ids[name], 0)
        return kernels.codec.random_bits(key, torch.arange(self.trained[name].numel()))


ROUNDED: dict[str, dict[str, Any]] = {
    key: OPTIONS[key] for key in ("clipped", "accumulated", "speculative", "streamed")
}


@pytest.mark.parametrize("options", ROUNDED.values(), ids=ROUNDED.keys())
@pytest.mark.parametrize("state", ["split16", "scaled"])
def test_formats_that_hold_the_weight_and_round_at_random(
    state: str, options: dict[str, Any]
) -> None:
    with register_state_format(Scaled()):
        check_bits(signum(), CodecRun, state=state, **options)


# ---- saved state -------------------------------------------------------------------------------


def trained(rule: str, state: str, steps: int = 0) -> ot.OffloadOptimizer:
    _, optimizer, model = pair(*RULES[rule], state=state)
    for tokens in batches(steps):
        train(optimizer, model, [tokens])
    return optimizer


def saved(optimizer: ot.OffloadOptimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


ADAMS_ONLY = [("int8", TOY), (TOY, "int8"), ("fp32", "int8"), ("fp32", "split16")]
ADAMS_ONLY += [(target, source) for source, target in ADAMS_ONLY[2:]]
CONVERTED = [("fp32", TOY), (TOY, "fp32"), (TOY, "split16"), ("split16", TOY)]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [
        *(("signum", *both) for both in CONVERTED),
        *(("adamw", *both) for both in CONVERTED + ADAMS_ONLY),
    ],
)
def test_state_of_one_format_is_loaded_into_another(source: str, target: str, rule: str) -> None:
    optimizer, other = trained(rule, source, 3), trained(rule, target)
    other.load_state_dict(saved(optimizer))
    moments = RULES[rule][0].moments
    wide = {n: _wide(source, moments, state_fields) for n, state_fields in optimizer.named_state()}
    for name, state_fields in other.named_state():
        actual = _wide(target, moments, state_fields)
        expected = _stored(target, wide[name])
        for value, wanted in zip(actual, expected, strict=True):
            assert torch.equal(value, wanted), name


def _wide(
    state: str, moments: tuple[str, ...], state_fields: Mapping[str, Tensor]
) -> Sequence[Tensor]:
    """(master, *moments) in fp32."""
    assert list(state_fields) == [field.name for field in formats.FORMATS[state].fields(moments)]
    flat = tuple(value.reshape(-1) for value in state_fields.values())
    return kernels.formats.CODECS[state].load(flat)


def _stored(state: str, values: Sequence[Tensor]) -> Sequence[Tensor]:
    """As they come back from the format, rounded to nearest."""
    format, codec = formats.FORMATS[state], kernels.formats.CODECS[state]
    fields = zeros(format, values[0].numel(), len(values) - 1)
    codec.store(fields, values, None)
    return codec.load(fields)


def zeros(format: StateFormat, numel: int, moments: int) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(field.numel(numel), dtype=getattr(torch, field.dtype or "bfloat16"))
        for field in format.fields(("exp_avg", "exp_avg_sq")[:moments])
    )


# ---- bytes -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_plan_counts_what_the_engine_lays_out(ranks: int) -> None:
    job = small(train__micro_batch=16)
    toy_job = replace(job, offload=job.offload.replace(state=TOY))
    plan = planned(toy_job, ranks=ranks)
    assert "as planned" in check(plan)
    wide, narrow = planned(job, ranks=ranks).placed.host(), plan.placed.host()
    assert {owner: wide[owner] / size for owner, size in narrow.items() if owner in OWNERS} == {
        "master weights": 1.0,
        "exp_avg": 2.0,
        "exp_avg_sq": 2.0,
    }


OWNERS = ("master weights", "exp_avg", "exp_avg_sq")


# ---- what is refused ---------------------------------------------------------------------------


def test_a_format_is_known_while_it_is_registered() -> None:
    unknown = f"state = '{TOY}' is not one of 'fp32', 'split16', 'int8'$"
    with pytest.raises(ValueError, match=unknown):
        trained("adamw", TOY)
    registered = run(FORMAT)["registered"]
    trained("adamw", TOY).close()
    with pytest.raises(ValueError, match=f"there is a state format '{TOY}': fp32, .*{TOY}"):
        run(FORMAT)
    registered.remove()
    registered.remove()
    with pytest.raises(ValueError, match=unknown):
        trained("adamw", TOY)
    assert list(formats.FORMATS) == list(kernels.formats.CODECS) == ["fp32", "split16", "int8"]


class Broken(Scaled):
    """With another format, or other values of zeros."""

    def __init__(self, format: StateFormat, add: float = 0.0, cut: int = 0) -> None:
        self.format = format
        self._add, self._cut = add, cut

    def load(self, fields: tuple[Tensor, ...]) -> Sequence[Tensor]:
        return [value[self._cut :] + self._add for value in super().load(fields)]


GOOD = Scaled.format
WRONG: dict[str, tuple[Any, str]] = {
    "no format": (object(), "has no `format` that is a StateFormat"),
    "zeros": (lambda: Broken(GOOD, add=1.0), "memory of zeros, which a run starts with, is"),
    "shape": (lambda: Broken(GOOD, cut=1), r"of shape \(200,\), and gives .*\(199,\)"),
    "nothing": (lambda: Broken(replace(GOOD, moment=())), "lacks master, moment or precisions"),
    "narrow master": (
        lambda: Broken(replace(GOOD, master=(Field("weight", "bfloat16"),))),
        "the first field of master is the fp32 master weight or the working weight",
    ),
    "one name": (
        lambda: Broken(replace(GOOD, master=(Field("weight", None), Field("weight", "int8")))),
        "has fields of one name: weight, weight",
    ),
    "dtype": (lambda: Field("a", "float8"), "field 'a': dtype = 'float8' is not one of float64, "),
    "per": (lambda: Field("a", "int8", per=3), "field 'a': per = 3 does not divide 128"),
}


@pytest.mark.parametrize(("made", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_format_is_refused_and_leaves_nothing(made: Any, message: str) -> None:
    before = dict(formats.FORMATS)
    with pytest.raises((TypeError, ValueError), match=message):
        register_state_format(made() if callable(made) else made)
    assert before == formats.FORMATS


@pytest.mark.usefixtures("toy")
def test_precisions_and_moments_that_a_format_cannot_keep() -> None:
    with pytest.raises(ValueError, match="'int8' cannot keep sum of Adagrad: use 'fp32' or"):
        ot.offload(Chain(), ot.Adagrad(), device="cpu", state="int8")
    with (
        register_state_format(Scaled()),
        pytest.raises(ValueError, match="'scaled' does not keep fp16 weights: use precision"),
    ):
        pair(*RULES["signum"], state="scaled", precision="fp16")


def test_a_rule_that_lacks_something_is_told_what() -> None:
    class Half:
        moments = ("exp_avg",)
        update = update_fp32 = None

        def __call__(self) -> None: ...

    half: Any = Half()
    half.update = print
    with pytest.raises(TypeError, match="lacks calls_only_kernels, defaults, check, set_master, "):
        ot.offload(Chain(), half, device="cpu")
