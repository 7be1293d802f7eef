"""An offloaded run has the bits of a resident one: losses, weights, masters, moments, norms."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from tests import levels
from tests.numerics.models import MODELS, Chain, MixedReentrant, batches, loss_of
from tests.numerics.reference import ResidentRun

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def pair(
    model: nn.Module,
    precision: str = "bf16",
    *,
    accum: int = 1,
    clip: float | None = None,
    **options: Any,
) -> tuple[ResidentRun, ot.OffloadOptimizer, nn.Module]:
    """The same weights twice: resident, and offloaded with further options of `offload`."""
    twin = copy.deepcopy(model)
    if options.get("activation") == "offload_saved":  # the models are small
        options.setdefault("offload_saved_above", 0)
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        device="cpu",
        precision=precision,
        clip_norm=clip,
        grad_accum_steps=accum,
        **options,
    )
    resident = ResidentRun(twin, DTYPES[precision], clip_norm=clip, scale=optimizer.loss_scale)
    return resident, optimizer, model


def train(
    optimizer: ot.OffloadOptimizer,
    model: nn.Module,
    micro: list[torch.Tensor],
    *,
    explicit: bool = True,
    clips: Sequence[float] = (),
) -> list[float]:
    losses = []
    for tokens in micro:
        loss = loss_of(model, tokens)
        losses.append(loss.item())
        if explicit:
            optimizer.backward(loss)
        else:
            (loss / len(micro) if len(micro) > 1 else loss).backward()
    for max_norm in clips:
        optimizer.clip_grad_norm_(max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def assert_same(resident: ResidentRun, optimizer: ot.OffloadOptimizer, model: nn.Module) -> None:
    optimizer.synchronize()
    for name, param in model.named_parameters():
        assert torch.equal(param, resident.params[name]), name
    for name, state in optimizer.named_state():
        assert torch.equal(state["master"], resident.master(name)), name
        assert torch.equal(state["exp_avg"], resident.moment(name, "exp_avg")), name
        # torch's own scalar tail cannot be avoided for exp_avg_sq; padding to 16 removes it.
        assert torch.equal(state["exp_avg_sq"], resident.moment(name, "exp_avg_sq")), name


def compare(
    name: str,
    precision: str,
    *,
    accum: int = 1,
    clip: float | None = None,
    steps: int = 4,
    explicit: bool = True,
    clips: Sequence[float] = (),
    **options: Any,
) -> None:
    resident, optimizer, model = pair(make(name), precision, accum=accum, clip=clip, **options)
    resident.clips = clips
    stream = batches(steps * accum)
    for step in range(steps):
        micro = stream[step * accum : (step + 1) * accum]
        expected = resident.step(micro, loss_of)
        assert train(optimizer, model, micro, explicit=explicit, clips=clips) == expected
        assert optimizer.grad_norm == resident.norms[-1]
    assert resident.skipped < steps
    assert_same(resident, optimizer, model)
    optimizer.close()


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_as_resident(name: str, precision: str) -> None:
    compare(name, precision, clip=0.5, steps=10 if precision == "fp16" else 4)


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("clip", [None, 0.1, 1e9])
@pytest.mark.parametrize("accum", [2, 3])
@pytest.mark.parametrize("precision", DTYPES)
def test_same_bits_with_accumulation(precision: str, accum: int, clip: float | None) -> None:
    compare("tied", precision, accum=accum, clip=clip, steps=8)


def test_plain_backward_is_the_same() -> None:
    compare("chain", "bf16", accum=2, clip=0.5, explicit=False)
    compare("unusual", "bf16", accum=1, clip=0.5, explicit=False)


@pytest.mark.parametrize("working", ["device", "host"])
def test_plain_backward_of_a_loss_past_the_models_call(working: str) -> None:
    """`model.loss(batch)`: each microbatch is a micro-step, summed in fp32 and not in bf16."""
    compare("experts", "bf16", accum=3, explicit=False, working=working)


@pytest.mark.parametrize("name", ["chain", "tied"])
def test_backwards_without_a_forward_in_between(name: str) -> None:
    """As the stages of a pipeline run them: each is a micro-step, summed in fp32."""
    resident, optimizer, model = pair(make(name), "bf16", accum=2, clip=0.5)
    for step in range(3):
        micro = batches(2, seed=step)
        expected = resident.step(micro, loss_of)
        losses = [loss_of(model, tokens) for tokens in micro]
        assert [loss.item() for loss in losses] == expected
        for loss in losses:
            (loss / 2).backward()
            optimizer.end_micro_step()
        optimizer.end_micro_step()  # nothing has begun
        optimizer.step()
        assert optimizer.last_step is not None and optimizer.last_step.micro_steps == 2
    assert_same(resident, optimizer, model)


@pytest.mark.parametrize("precision", DTYPES)
def test_a_loss_that_is_divided_already(precision: str) -> None:
    resident, optimizer, model = pair(make("chain"), precision, accum=2)
    for step in range(10 if precision == "fp16" else 3):
        micro = batches(2, seed=step)
        expected = resident.step(micro, loss_of)
        for tokens, value in zip(micro, expected, strict=True):
            loss = loss_of(model, tokens)
            assert loss.item() == value
            optimizer.backward(loss / 2, divide=False)
        optimizer.step()
    assert resident.skipped < len(resident.norms)
    assert_same(resident, optimizer, model)


@levels.examples(25)
@given(
    name=st.sampled_from(sorted(MODELS)),
    precision=st.sampled_from(sorted(DTYPES)),
    accum=st.integers(1, 4),
    clip=st.sampled_from([None, 0.05, 1.0]),
    explicit=st.booleans(),
)
def test_same_bits_drawn(
    name: str, precision: str, accum: int, clip: float | None, explicit: bool
) -> None:
    compare(
        name,
        precision,
        accum=accum,
        clip=clip,
        steps=10 if precision == "fp16" else 2,
        explicit=explicit or precision == "fp16",
    )


def test_a_second_delivery_in_one_backward_is_added() -> None:
    torch.manual_seed(0)
    resident, optimizer, model = pair(MixedReentrant(), "bf16")
    for tokens in batches(4):
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    assert_same(resident, optimizer, model)


def test_groups_have_their_own_hyperparameters() -> None:
    def of(name: str) -> dict[str, float]:
        return {"lr": 3e-2, "weight_decay": 0.0} if name.endswith(("bias", "norm.weight")) else {}

    model = make("chain")
    twin = copy.deepcopy(model)
    resident = ResidentRun(twin, torch.bfloat16, groups=of)
    plain = [p for n, p in model.named_parameters() if not of(n)]
    other = [p for n, p in model.named_parameters() if of(n)]
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
        params=[{"params": plain}, {"params": other, "lr": 3e-2, "weight_decay": 0.0}],
        device="cpu",
    )
    for tokens in batches(3):
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    assert_same(resident, optimizer, model)


def test_a_scheduler_of_torch_drives_the_learning_rate() -> None:
    resident, optimizer, model = pair(make("chain"))
    mine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(resident.adam, 5)
    for tokens in batches(4):
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
        mine.step()
        theirs.step()
    assert_same(resident, optimizer, model)


def test_fp16_overflow_changes_nothing_but_the_scale() -> None:
    resident, optimizer, model = pair(make("chain"), "fp16")
    stream = batches(6)
    for tokens in stream[:2]:
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    before = {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.named_state()}
    scale = optimizer.loss_scale
    optimizer.backward(loss_of(model, stream[2]) * 1e6)
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.skipped
    assert optimizer.last_step.step == 2
    assert optimizer.loss_scale == scale / 2
    for name, state in optimizer.named_state():
        assert all(torch.equal(state[key], before[name][key]) for key in state), name
    resident.scale = optimizer.loss_scale
    for tokens in stream[3:]:
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    assert_same(resident, optimizer, model)


def test_bf16_with_a_nan_gradient_skips() -> None:
    _, optimizer, model = pair(make("chain"))
    train(optimizer, model, batches(1))
    before = {n: s["master"].clone() for n, s in optimizer.named_state()}
    optimizer.backward(loss_of(model, batches(1)[0]) * float("nan"))
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.skipped
    assert all(torch.equal(s["master"], before[n]) for n, s in optimizer.named_state())


def test_an_infinite_gradient_skips() -> None:
    """Its norm is infinite and not NaN."""
    _, optimizer, model = pair(make("chain"))
    before = {n: s["master"].clone() for n, s in optimizer.named_state()}
    hooked = next(iter(model.parameters()))
    hooked.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    optimizer.backward(loss_of(model, batches(1)[0]))
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.grad_norm == float("inf")
    assert optimizer.last_step.skipped
    assert all(torch.equal(s["master"], before[n]) for n, s in optimizer.named_state())


def test_an_early_step_applies_what_was_accumulated() -> None:
    resident, optimizer, model = pair(make("chain"), accum=4)
    micro = batches(2)
    for tokens in micro:
        optimizer.backward(loss_of(model, tokens))
    optimizer.step()
    sums: dict[str, torch.Tensor] = {}
    for tokens in micro:
        (loss_of(resident.model, tokens) / 4).backward()
        for name, param in resident.trained.items():
            assert param.grad is not None
            sums[name] = sums.get(name, torch.zeros(())) + param.grad.float()
            param.grad = None
    resident.apply(sums)
    assert_same(resident, optimizer, model)


def test_masters_keep_the_precision_of_fp32_weights() -> None:
    model = make("chain")
    given_weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = ot.offload(model, device="cpu")
    for name, state in optimizer.named_state():
        assert torch.equal(state["master"], given_weights[name])
    for name, param in model.named_parameters():
        assert torch.equal(param, given_weights[name].bfloat16())


def test_resume_from_state_dict_has_the_same_bits() -> None:
    stream = batches(6)
    _, straight, model = pair(make("tied"), "fp16", clip=0.5)
    for tokens in stream:
        train(straight, model, [tokens])
    _, first, first_model = pair(make("tied"), "fp16", clip=0.5)
    for tokens in stream[:3]:
        train(first, first_model, [tokens])
    saved = copy.deepcopy(first.state_dict())
    _, second, second_model = pair(make("tied", seed=1), "fp16", clip=0.5)
    second.load_state_dict(saved)
    for tokens in stream[3:]:
        train(second, second_model, [tokens])
    for (name, a), (_, b) in zip(straight.named_state(), second.named_state(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a), name


def test_poisoned_staging_changes_no_bit() -> None:
    with on_lanes(poisoned()):
        compare("unusual", "bf16", accum=2, clip=0.5)


def poisoned() -> SequentialLanes:
    lanes = SequentialLanes()
    lanes.poison = True
    return lanes


def test_depth_zero_weights_survive_close() -> None:
    _, optimizer, model = pair(Chain())
    train(optimizer, model, batches(1))
    before = loss_of(model, batches(1)[0]).item()
    optimizer.close()
    optimizer.close()
    assert loss_of(model, batches(1)[0]).item() == before
