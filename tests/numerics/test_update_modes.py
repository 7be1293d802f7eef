"""Update modes: `exact` and `speculative` have the bits of a resident run whatever was guessed,
`delayed` those of a ten-line loop with the same delay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import offloadtrain as ot
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.step.program import updates
from offloadtrain.step.proof.prove import prove
from offloadtrain.step.proof.recording import Launched
from tests.harsh_lanes import poisoned
from tests.numerics.comparison import (
    DTYPES,
    assert_equal,
    assert_same,
    contents,
    follow,
    make,
    pair,
    train,
)
from tests.numerics.models import batches, loss_of
from tests.numerics.reference import ResidentRun
from tests.recording_lanes import RecordingLanes
from tests.seeded_lanes import SeededLanes

EARLY = {"skip_nonfinite": False}
SPECULATIVE = {"update": "speculative"}


def report(optimizer: ot.OffloadOptimizer) -> ot.StepReport:
    assert optimizer.last_step is not None
    return optimizer.last_step


# ---- exact, with Adam inside backward ---------------------------------------------------------


def test_it_runs_inside_backward() -> None:
    _, optimizer, model = pair(make("chain"), **EARLY)
    buckets = sum(len(block.buckets) for block in optimizer._blocks)
    early = []
    for tokens in batches(3):
        train(optimizer, model, [tokens])
        early.append(report(optimizer).early_buckets)
    assert early == [0, buckets, buckets]  # the first step learns


def test_hyperparameters_that_change_before_step_are_told() -> None:
    _, optimizer, model = pair(make("chain"), **EARLY)
    first, second = batches(2)
    train(optimizer, model, [first])
    optimizer.backward(loss_of(model, second))
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(updates.UpdateError, match="between backward and step"):
        optimizer.step()
    assert report(optimizer).step == 2
    train(optimizer, model, [first])
    assert report(optimizer).step == 3


def test_a_second_gradient_after_its_update_is_told() -> None:
    _, optimizer, model = pair(make("chain"), **EARLY)
    tokens = batches(1)[0]
    train(optimizer, model, [tokens])
    loss = loss_of(model, tokens)
    loss.backward(retain_graph=True)
    with pytest.raises(updates.UpdateError, match="exactly grad_accum_steps backward passes"):
        loss.backward()
    with pytest.raises(updates.UpdateError, match="between two steps"):
        optimizer.step()


def test_a_loaded_checkpoint_ends_the_trouble() -> None:
    resident, optimizer, model = pair(make("chain"), **EARLY)
    first, lost, second = batches(3)
    assert train(optimizer, model, [first]) == resident.step([first], loss_of)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.backward(loss_of(model, lost))
    optimizer.zero_grad()
    with pytest.raises(updates.UpdateError, match="Load a checkpoint"):
        train(optimizer, model, [second])
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    assert train(optimizer, model, [second]) == resident.step([second], loss_of)
    assert_same(resident, optimizer, model)


# ---- speculative ------------------------------------------------------------------------------


def wrong_at(pattern: str, steps: int) -> list[bool]:
    return {
        "never": [False] * steps,
        "always": [True] * steps,
        "alternating": [step % 2 == 0 for step in range(steps)],
        "first": [step == 1 for step in range(steps)],  # the first that guesses
        "last": [step == steps - 1 for step in range(steps)],
    }[pattern]


def launches_of(update: str, clip: float) -> list[list[Any]]:
    """What each of 12 steps launches."""
    recorder, steps = RecordingLanes(SequentialLanes()), []
    with on_lanes(recorder):
        _, optimizer, model = pair(make("chain"), clip=clip, update=update)
    for tokens in batches(12):
        before = len(recorder.program)
        train(optimizer, model, [tokens])
        optimizer.synchronize()
        steps.append([e for e in recorder.program[before:] if isinstance(e, Launched)])
    optimizer.close()
    return [[(entry.lane, entry.name) for entry in step] for step in steps]


def test_clipped_in_most_steps_it_is_said_once_and_costs_what_exact_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first step has shown it: each step launches the operations of an exact one."""
    exact, guessing = (launches_of(update, 0.01) for update in ("exact", "speculative"))
    assert guessing == exact
    (record,) = caplog.records
    assert record.message.startswith("update = 'speculative': most of the last steps were clipped")
    caplog.clear()
    assert launches_of("speculative", 1e9)[1:] != exact[1:] and caplog.records == []


@pytest.mark.parametrize(
    ("state", "pattern", "accum"),
    [
        ("fp32", "always", 1),
        ("split16", "alternating", 2),
        ("int8", "first", 1),
        ("int8", "last", 2),
        pytest.param("split16", "never", 1, marks=pytest.mark.slow),
    ],
)
def test_wrong_guesses_change_no_bit(
    state: str, pattern: str, accum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong where the loss is made large; every step guesses, whatever the odds."""
    monkeypatch.setattr(updates.SpeculationPolicy, "should_speculate", lambda policy: True)
    steps = 6
    wrong = wrong_at(pattern, steps)
    results = {}
    for update in ("exact", "speculative"):
        _, optimizer, model = pair(
            make("unusual"), accum=accum, clip=1e4, state=state, update=update
        )
        stream = batches(steps * accum)
        guesses = []
        for step in range(steps):
            for tokens in stream[step * accum : (step + 1) * accum]:
                optimizer.backward(loss_of(model, tokens) * (1e6 if wrong[step] else 1.0))
            optimizer.step()
            guesses.append(report(optimizer).speculation_hit)
        results[update] = contents(optimizer, model)
        if update == "speculative":
            assert guesses == [None, *(not bad for bad in wrong[1:])]
        optimizer.close()
    assert_equal(results["speculative"], results["exact"])


@pytest.mark.parametrize(("state", "working"), [("fp32", "device"), ("int8", "host")])
@pytest.mark.parametrize("late", [False, True], ids=["drawn", "late"])
def test_guesses_are_switched_between_steps(state: str, working: str, late: bool) -> None:
    """Off and on again, in any order of the lanes: the bits of a resident run, and no race."""
    recorder = RecordingLanes(poisoned(SeededLanes(3, late=late)))
    with on_lanes(recorder):
        options = {"state": state, "working": working, "clip": 1e9} | SPECULATIVE
        resident, optimizer, model = pair(make("chain"), **options)
    guesses, stream = [], batches(12)
    for number, tokens in enumerate(stream):
        optimizer.speculate(enabled=number // 3 % 2 == 0)
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
        guesses.append(report(optimizer).early_buckets > 0)
    assert guesses == [False, True, True, *[False] * 3, *[True] * 3, *[False] * 3]
    assert_same(resident, optimizer, model)
    optimizer.close()
    assert prove(recorder.program) == []


def test_overflow_undoes_the_guess() -> None:
    resident, optimizer, model = pair(make("chain"), "fp16", **SPECULATIVE)
    scaler = optimizer._engine.counter.scaler
    assert scaler is not None
    resident.scale = scaler.scale = 2.0**21
    stream = batches(16)
    for tokens in stream:
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    assert 0 < resident.skipped < len(stream)
    assert_same(resident, optimizer, model)


def test_lr_set_before_step_counts() -> None:
    resident, optimizer, model = pair(make("chain"), **SPECULATIVE)
    for number, tokens in enumerate(batches(4)):
        expected = resident_losses_with_lr(resident, tokens, 1e-2 / (number + 1))
        loss = loss_of(model, tokens)
        assert loss.item() == expected
        optimizer.backward(loss)
        optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
        optimizer.step()
        assert report(optimizer).speculation_hit is (None if number == 0 else False)
    assert_same(resident, optimizer, model)


def resident_losses_with_lr(resident: ResidentRun, tokens: Tensor, lr: float) -> float:
    for group in resident.adam.param_groups:
        group["lr"] = lr
    return resident.step([tokens], loss_of)[0]


# ---- delayed ----------------------------------------------------------------------------------


def test_delayed_weights_go_up_inside_backward() -> None:
    _, optimizer, model = pair(make("chain"), update="delayed")
    follow_two = batches(2)
    train(optimizer, model, [follow_two[0]])
    before = optimizer._engine.lanes.totals.h2d_bytes
    optimizer.backward(loss_of(model, follow_two[1]))
    inside = optimizer._engine.lanes.totals.h2d_bytes - before
    optimizer.step()
    total = optimizer._engine.lanes.totals.h2d_bytes - before
    assert total * 0.5 < inside <= total


def test_synchronize_ends_the_delay() -> None:
    run, optimizer, model = pair(make("chain"), update="delayed")
    stream = batches(7)
    follow(run, optimizer, model, stream[:3])
    optimizer.synchronize()
    run.flush()
    follow(run, optimizer, model, stream[3:5])
    model.state_dict()
    run.flush()
    follow(run, optimizer, model, stream[5:])
    run.flush()
    assert_same(run, optimizer, model)


def test_a_backward_that_fails_ends_the_delay() -> None:
    run, optimizer, model = pair(make("chain"), update="delayed")
    stream = batches(6)
    follow(run, optimizer, model, stream[:3])
    loss = loss_of(model, stream[3])
    middle = next(p for n, p in model.named_parameters() if n.startswith("layers.1"))

    def fail(_: Tensor) -> Tensor:
        raise RuntimeError("planted")

    hook = middle.register_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        optimizer.backward(loss)
    hook.remove()
    del loss
    run.flush()
    follow(run, optimizer, model, stream[4:])
    run.flush()
    assert_same(run, optimizer, model)


# ---- all of them ------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["exact", "speculative", "delayed"])
@pytest.mark.parametrize("accum", [1, 3])
def test_the_bytes_that_move(update: str, accum: int) -> None:
    """2 bytes per parameter and microbatch down, 2 per step up; nothing twice."""
    _, optimizer, model = pair(
        make("chain"), update=update, accum=accum, clip=1e9 if update == "speculative" else 0.1
    )
    padded = sum(b.numel for block in optimizer._blocks for b in block.buckets)
    stream = batches(5 * accum)
    for step in range(5):
        train(optimizer, model, stream[step * accum : (step + 1) * accum])
        if step >= 2:
            assert report(optimizer).d2h_bytes == 2 * padded * accum
            assert report(optimizer).h2d_bytes == 2 * padded


# Clipped by `clip_grad_norm_`, an offloaded run has the bits of a resident one that multiplies
# its gradients by the same coefficients, in every update mode.


@pytest.mark.parametrize("precision", DTYPES)
def test_it_returns_the_norm_that_the_clipping_before_has_left(precision: str) -> None:
    resident, optimizer, model = pair(make("chain"), precision)
    resident.clips = (0.5, 0.2, float("inf"))
    for tokens in batches(10 if precision == "fp16" else 2):
        resident.clipped.clear()
        resident.step([tokens], loss_of)
        optimizer.backward(loss_of(model, tokens))
        returned = [optimizer.clip_grad_norm_(max_norm).item() for max_norm in resident.clips]
        optimizer.step()
        if resident.clipped:
            assert returned == resident.clipped
        else:  # overflow: torch's loops get a norm that is not finite, too
            assert not torch.tensor(returned).isfinite().any() and report(optimizer).skipped


def test_a_wrong_guess_is_undone_and_a_right_one_kept() -> None:
    _, optimizer, model = pair(make("chain"), update="speculative")
    guesses = []
    for number, tokens in enumerate(batches(5)):
        train(optimizer, model, [tokens], clips=(0.1 if number == 3 else 1e9,))
        guesses.append(report(optimizer).speculation_hit)
    assert guesses == [None, True, True, False, True]


@pytest.mark.parametrize("how", ["optimizer", "torch"])
@pytest.mark.parametrize("reads", [False, True])
def test_a_step_that_the_loop_has_clipped_is_not_clipped_again(how: str, reads: bool) -> None:
    """By the option `clip_norm`, which is no smaller; also where code has read the gradients."""

    def trained(clip: float | None) -> list[torch.Tensor]:
        _, optimizer, model = pair(make("chain"), clip=clip)
        for tokens in batches(3):
            optimizer.backward(loss_of(model, tokens))
            if how == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                optimizer.clip_grad_norm_(0.1)
            if reads:
                assert all(float(param.grad.norm()) < 0.1 for param in model.parameters())
            optimizer.step()
        return [masters.clone() for _, masters in optimizer.master_weights()]

    expected = trained(None)
    for clip in (0.1, 0.2):
        assert all(map(torch.equal, trained(clip), expected))
    assert not all(map(torch.equal, trained(0.01), expected))
