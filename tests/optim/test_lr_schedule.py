"""The learning rate at the points that define it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offloadtrain as ot
from offloadtrain.config.offload import OptionError
from offloadtrain.optim.loss_scaler import LARGEST, SMALLEST, LossScaleError, LossScaler
from offloadtrain.optim.lr_schedule import Schedule, learning_rate
from tests.numerics.models import Chain, batches, loss_of


def rates(schedule: Schedule, total: int, warmup: int, floor: float = 0.1) -> list[float]:
    return [
        learning_rate(
            step,
            peak=2.0,
            schedule=schedule,
            total_steps=total,
            warmup_steps=warmup,
            min_ratio=floor,
        )
        for step in range(total + 5)
    ]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates("constant", 10, 4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_ends_at_its_floor_in_the_last_step() -> None:
    assert rates("linear", 5, 1, floor=0.0)[:5] == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert rates("linear", 9, 0)[8] == pytest.approx(0.2)


def test_cosine_is_half_way_in_the_middle() -> None:
    cosine = rates("cosine", 11, 0, floor=0.0)
    assert (cosine[0], cosine[5], cosine[10]) == pytest.approx((2.0, 1.0, 0.0))
    assert cosine[2] > 2.0 * (1 - 2 / 10), "above the straight line at first"


@given(
    st.sampled_from(["cosine", "linear", "constant"]),
    st.integers(1, 60),
    st.integers(0, 60),
    st.floats(0, 1),
)
def test_up_to_the_peak_then_never_up_again(
    schedule: Schedule, total: int, warmup: int, floor: float
) -> None:
    result = rates(schedule, total, min(warmup, total), floor)
    assert all(0.0 <= rate <= 2.0 for rate in result) and max(result) == 2.0
    top = result.index(2.0)
    assert result[:top] == sorted(result[:top])
    assert result[top:] == sorted(result[top:], reverse=True)
    assert result[-1] == (2.0 if schedule == "constant" else pytest.approx(result[total - 1]))


# The loss scale, against its specification: a table of what each step does.


Scale = tuple[float, int, int]
"""The scale, good steps in a row, overflows tolerated since it last grew."""


def specified(now: Scale, overflow: bool, interval: int, hysteresis: int) -> Scale | None:
    """What follows; None: the run ends. The first line that applies:

    step      condition                        scale            good      tolerated
    overflow  tolerated < hysteresis - 1       as it is         0         one more
    overflow  scale at the floor               the run ends
    overflow  otherwise                        half of it       0         as it is
    good      it completes the interval        double, capped   0         0
    good      otherwise                        as it is         one more  as it is
    """
    scale, good, tolerated = now
    if overflow and tolerated < hysteresis - 1:
        return scale, 0, tolerated + 1
    if overflow:
        return None if scale <= SMALLEST else (scale / 2, 0, tolerated)
    if good + 1 == interval:
        return min(2 * scale, LARGEST), 0, 0
    return scale, good + 1, tolerated


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_sequences(count: int) -> None:
    draw = random.Random(5)
    ended = 0
    for _ in range(count):
        interval, hysteresis = draw.randint(1, 6), draw.randint(1, 4)
        share = draw.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        scaler = LossScaler(2.0 ** draw.randint(-14, 24), interval, hysteresis=hysteresis)
        expected: Scale | None = (scaler.scale, 0, 0)
        for _ in range(40):
            overflow = draw.random() < share
            assert expected is not None
            expected = specified(expected, overflow, interval, hysteresis)
            if expected is None:
                with pytest.raises(LossScaleError):
                    scaler.update(overflow=overflow)
                ended += 1
                break
            scaler.update(overflow=overflow)
            assert (scaler.scale, scaler.good_steps, scaler.tolerated) == expected
            if draw.random() < 0.1:
                other = LossScaler(hysteresis=hysteresis)
                other.load_state_dict(scaler.state_dict())
                scaler = other
    assert ended > count / 100


def test_a_late_scale_follows_a_step_later_and_once() -> None:
    """Of two steps that overflow at one scale the first one halves it; what waits is saved."""
    scaler, scales = LossScaler(64.0, growth_interval=2), []
    for overflow in (True, True, False, False, None, False, False, True, False):
        scales.append(scaler.scale)
        scaler.ended(overflow, scaler.scale, late=True)
        other = LossScaler()
        other.load_state_dict(scaler.state_dict())
        scaler = other
    assert scales == [64, 64, 32, 32, 32, 64, 64, 64, 128]
    scaler.catch_up()
    assert scaler.scale == 128


def test_the_default_is_torch_s_grad_scaler() -> None:
    """Between floor and cap, which torch's has not."""
    draw = random.Random(3)
    for _ in range(50):
        interval = draw.randint(1, 5)
        scaler = LossScaler(growth_interval=interval)
        scale, growth = torch.tensor([2.0**16]), torch.tensor([0], dtype=torch.int32)
        for _ in range(40):
            overflow = draw.random() < 0.3
            result = torch.tensor([float(overflow)])
            torch._amp_update_scale_(scale, growth, result, 2.0, 0.5, interval)
            if not SMALLEST < scale.item() <= LARGEST:
                break
            scaler.update(overflow=overflow)
            assert (scaler.scale, scaler.good_steps) == (scale.item(), growth.item())


@pytest.mark.slow
def test_hysteresis_is_an_option_whose_state_is_saved() -> None:
    def optimizer_of(model: Chain) -> ot.OffloadOptimizer:
        return ot.offload(model, device="cpu", precision="fp16", loss_scale_hysteresis=2)

    model, other = Chain(), Chain()
    first, second = optimizer_of(model), optimizer_of(other)

    def overflow(optimizer: ot.OffloadOptimizer, net: Chain) -> float:
        optimizer.backward(loss_of(net, batches(1)[0]) * float("inf"))
        optimizer.step()
        return optimizer.loss_scale

    assert overflow(first, model) == 2.0**16
    second.load_state_dict(first.state_dict())
    assert overflow(first, model) == overflow(second, other) == 2.0**15
    with pytest.raises(OptionError, match="only fp16 losses are scaled"):
        ot.offload(Chain(), device="cpu", loss_scale_hysteresis=2)
    for optimizer in (first, second):
        optimizer.close()
