"""The doors of docs/extending.md: an optimizer and a state format of one's own, by its own code.

Each trains to the bits of a plain loop that knows neither, in every mode and placement.
"""

from __future__ import annotations

import copy
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
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.train.dry_run import check
from tests.numerics.models import Chain, batches, loss_of
from tests.numerics.reference import ResidentRun
from tests.plan.test_plan import planned, small
from tests.runtime.fake_cuda import installed
from tests.runtime.test_cuda_lanes import Case, compare

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
OPTIMIZER, _, FORMAT, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LR, BETA, BETAS, DECAY, SEED = 1e-2, 0.9, (0.9, 0.95), 0.1, 7
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
class SignumRun(ResidentRun):
    """Signum in place; `narrow`: moments are kept in bf16, rounded to nearest."""

    narrow: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exp_avg = {name: torch.zeros_like(x.data) for name, x in self.masters.items()}

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        for name, param in self.trained.items():
            master, moment = self.master(name), self.moment(name, "exp_avg")
            grad = sums[name] * factor
            new = moment * BETA + (1 - BETA) * grad
            master.copy_(master * (1 - LR * DECAY) - LR * new.sign())
            moment.copy_(rounded(new, self.narrow))
            param.data.copy_(master)

    def moment(self, name: str, key: str) -> Tensor:
        param = self.trained[name]
        return self.exp_avg[name][: param.numel()].view(param.shape)


@dataclass
class AdamRun(ResidentRun):
    """AdamW in place; `narrow` as above."""

    narrow: bool = False

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        super().update(sums, factor)
        for state in self.adam.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(rounded(state[key], self.narrow))


def rounded(values: Tensor, narrow: bool) -> Tensor:
    return values.bfloat16().float() if narrow else values


def adamw() -> ot.AdamW:
    return ot.AdamW(lr=LR, betas=BETAS, eps=1e-8, weight_decay=DECAY)


RULES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "signum": (signum, SignumRun, ("exp_avg",)),
    "adamw": (adamw, AdamRun, ("exp_avg", "exp_avg_sq")),
}


def pair(
    rule: str, state: str, precision: str = "bf16", **options: Any
) -> tuple[Any, ot.OffloadOptimizer, nn.Module]:
    """The same weights twice: in a plain loop, and offloaded."""
    torch.manual_seed(0)
    model = Chain()
    plain_model = copy.deepcopy(model)
    made, resident, _ = RULES[rule]
    chosen = {"device": "cpu", "precision": precision, "state": state, "seed": SEED, **options}
    optimizer = ot.offload(model, made(), **chosen)
    loop = resident(
        plain_model,
        DTYPES[precision],
        lr=LR,
        weight_decay=DECAY,
        betas=BETAS,
        clip_norm=options.get("clip_norm"),
        scale=optimizer.loss_scale,
        narrow=state == TOY,
    )
    return loop, optimizer, model


def train(
    loop: Any, optimizer: Any, model: nn.Module, stream: Sequence[Tensor], accum: int
) -> None:
    for start in range(0, len(stream), accum):
        micro = stream[start : start + accum]
        expected = loop.step(micro, loss_of) if loop else None
        results = []
        for tokens in micro:
            loss = loss_of(model, tokens)
            results.append(loss.item())
            optimizer.backward(loss)
        optimizer.step()
        assert expected is None or results == expected


def assert_same(rule: str, loop: Any, optimizer: ot.OffloadOptimizer) -> None:
    for name, state in optimizer.named_state():
        assert list(state) == ["master", *RULES[rule][2]]
        assert torch.equal(state["master"], loop.master(name)), name
        for key in RULES[rule][2]:
            assert torch.equal(state[key].float(), loop.moment(name, key)), (name, key)


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
    options = OPTIONS[name]
    loop, optimizer, model = pair(rule, state, **options)
    accum = options.get("grad_accum_steps", 1)
    train(loop, optimizer, model, batches(4 * accum), accum)
    assert_same(rule, loop, optimizer)


def test_a_rule_of_ones_own_on_the_device() -> None:
    loop, optimizer, model = pair("signum", "fp32", state_on="device", clip_norm=0.5)
    train(loop, optimizer, model, batches(4), 1)
    assert_same("signum", loop, optimizer)


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

    state: str = ""
    steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.format = formats.FORMATS[self.state]
        self.ids = {name: index for index, name in enumerate(self.params)}
        self.states = {n: self._zeros(p.numel()) for n, p in self.trained.items()}
        for name, param in self.trained.items():
            first = self.master(name).reshape(-1)
            kernels.set_master_by_codec(self.format, self.states[name], first)
            param.data.copy_(self.states[name][0].view_as(param))

    def _zeros(self, numel: int) -> tuple[Tensor, ...]:
        fields_of_state = self.format.fields(("exp_avg",))
        return tuple(
            torch.zeros(f.numel(numel), dtype=getattr(torch, f.dtype or "bfloat16"))
            for f in fields_of_state
        )

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        self.steps += 1
        codec = kernels.formats.CODECS[self.state]
        for name, param in self.trained.items():
            master, moment = codec.load(self.states[name])
            self.masters[name].data[: param.numel()] = master
            self.exp_avg[name][: param.numel()] = moment
        super().update(sums, factor)
        for name, param in self.trained.items():
            values = [x.reshape(-1) for x in (self.master(name), self.moment(name, "exp_avg"))]
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
        torch.manual_seed(0)
        model = Chain()
        plain_model = copy.deepcopy(model)
        optimizer = ot.offload(model, signum(), device="cpu", state=state, seed=SEED, **options)
        clip = options.get("clip_norm")
        loop = CodecRun(plain_model, torch.bfloat16, clip_norm=clip, state=state)
        accum = options.get("grad_accum_steps", 1)
        train(loop, optimizer, model, batches(4 * accum), accum)
        for name, state_fields in optimizer.named_state():
            for (field, actual), expected in zip(
                state_fields.items(), loop.states[name], strict=True
            ):
                assert torch.equal(actual.reshape(-1), expected), (name, field)
        optimizer.close()


# ---- saved state -------------------------------------------------------------------------------


def saved(optimizer: ot.OffloadOptimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


ADAMS_ONLY = [("int8", TOY), (TOY, "int8")]
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
    _, optimizer, model = pair(rule, source)
    train(None, optimizer, model, batches(3), 1)
    _, other, _ = pair(rule, target)
    other.load_state_dict(saved(optimizer))
    moments = RULES[rule][2]
    wide = {n: _wide(source, moments, state_fields) for n, state_fields in optimizer.named_state()}
    for name, state_fields in other.named_state():
        actual = _wide(target, moments, state_fields)
        expected = _stored(target, wide[name])
        for value, wanted in zip(actual, expected, strict=True):
            assert torch.equal(value, wanted), name


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("state", ["fp32", TOY])
def test_state_of_other_dtypes_is_rounded_to_the_formats(state: str) -> None:
    _, optimizer, model = pair("adamw", state)
    train(None, optimizer, model, batches(3), 1)
    wide_state = optimizer.state_dict()
    wide_state["state"] = {
        index: {key: value.double() for key, value in state_fields.items()}
        for index, state_fields in wide_state["state"].items()
    }
    _, other, _ = pair("adamw", state)
    other.load_state_dict(wide_state)
    for (name, state_fields), (_, result) in zip(
        optimizer.named_state(), other.named_state(), strict=True
    ):
        assert all(torch.equal(state_fields[key], result[key]) for key in state_fields), name


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
    moments = ("exp_avg", "exp_avg_sq")[: len(values) - 1]
    fields = tuple(
        torch.zeros(f.numel(values[0].numel()), dtype=getattr(torch, f.dtype or "bfloat16"))
        for f in format.fields(moments)
    )
    codec.store(fields, values, None)
    return codec.load(fields)


# ---- bytes -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("state", "each"), [("fp32", 4), (TOY, 2)])
def test_the_ledger_counts_what_is_declared(state: str, each: int, rule: str) -> None:
    _, optimizer, _ = pair(rule, state)
    rows = {r.owner: r.bytes for r in optimizer.ledger.rows() if r.tier == Tier.HOST}
    masters = rows["master weights"]
    result = {owner: size for owner, size in rows.items() if owner.startswith("exp_avg")}
    assert result == dict.fromkeys(RULES[rule][2], masters // 4 * each)


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
        pair("adamw", TOY)
    registered = run(FORMAT)["registered"]
    pair("adamw", TOY)[1].close()
    with pytest.raises(ValueError, match=f"there is a state format '{TOY}': fp32, .*{TOY}"):
        run(FORMAT)
    registered.remove()
    registered.remove()
    with pytest.raises(ValueError, match=unknown):
        pair("adamw", TOY)
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
        pair("signum", "scaled", "fp16")


def test_a_rule_that_lacks_something_is_told_what() -> None:
    class Half:
        moments = ("exp_avg",)
        update = update_fp32 = None

        def __call__(self) -> None: ...

    half: Any = Half()
    half.update = print
    with pytest.raises(TypeError, match="lacks calls_only_kernels, defaults, check, set_master, "):
        ot.offload(Chain(), half, device="cpu")
