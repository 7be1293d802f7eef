"""What user code writes into parameters and optimizer state: as in a plain torch loop, or an error
where it is done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.engine import ModelError
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.parameters import ParameterWriteError
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.step.program.updates import UpdateError
from tests import levels
from tests.engine.test_parameter_reads import Model, by_call
from tests.seeded_lanes import SeededLanes

PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"working": "host", "device_slots": 1},
    "recomputed": {"working": "host", "activation": "recompute"},
    "state on the device": {"state_on": "device"},
    "speculative": {"update": "speculative", "working": "host"},
    "speculative, clipped": {"update": "speculative", "clip_norm": 1e9},
}
EARLY: dict[str, Any] = {"skip_nonfinite": False}
"""Adam runs inside backward."""
X = [torch.randn(5, 8, generator=torch.Generator().manual_seed(step)) for step in range(5)]


def every(model: Any) -> list[nn.Parameter]:
    return list(model.parameters())


# After step(): (model, optimizer, number of the step).
After = Callable[[Any, Any, int], object]


def clamps_data(model: Any, optimizer: Any, step: int) -> None:
    """The critic of a Wasserstein GAN."""
    for param in every(model):
        param.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def writes_in_place(model: Any, optimizer: Any, step: int) -> None:
    model.head.weight.mul_(0.5).add_(0.1)
    model.layers[1].inner.weight.copy_(torch.full((16, 8), 0.2))
    model.layers[2].outer.weight[1] = 0.3
    torch._foreach_mul_([*model.layers[3].parameters()], 0.5)
    nn.init.constant_(model.scale, 0.1)
    weight = model.layers[0].inner.weight
    torch.add(weight, 0.1, out=weight)
    model.layers[0].outer.weight.detach().copy_(torch.ones(8, 16))


def initializes_anew(model: Any, optimizer: Any, step: int) -> None:
    """By functions that switch gradients off themselves."""
    torch.manual_seed(step)
    model.layers[1].inner.reset_parameters()
    nn.init.constant_(model.layers[2].outer.bias, 0.1)
    nn.init.normal_(model.head.weight)


def writes_views_of_data(model: Any, optimizer: Any, step: int) -> None:
    weight = model.layers[1].inner.weight.data
    weight[0].zero_()
    weight.chunk(4)[1].mul_(0.5)
    weight.add_(0.01)
    model.head.weight.detach().flatten()[:3].fill_(0.2)


def writes_once(model: Any, optimizer: Any, step: int) -> None:
    if step == 1:
        clamps_data(model, optimizer, step)


def swaps_for_an_evaluation(model: Any, optimizer: Any, step: int) -> None:
    backup = [param.data.clone() for param in every(model)]
    for param in every(model):
        param.data.copy_(torch.full_like(param.data, 0.1))
    with torch.no_grad():
        assert by_call(model, X[0]).item() == pytest.approx(model.expected, rel=1e-5)
    for param, values in zip(every(model), backup, strict=True):
        param.data.copy_(values)


def clears_the_state(model: Any, optimizer: Any, step: int) -> None:
    if step == 2:
        optimizer.state.clear()


def deletes_the_state(model: Any, optimizer: Any, step: int) -> None:
    for param in every(model) if step == 2 else ():
        optimizer.state.pop(param, None)


def assigns_moments(model: Any, optimizer: Any, step: int) -> None:
    for param in every(model)[2:5] if step == 2 else ():
        optimizer.state[param]["exp_avg"] = torch.zeros_like(param)
        optimizer.state[param]["exp_avg_sq"] = torch.full_like(param, 0.1)


def resets_the_state(model: Any, optimizer: Any, step: int) -> None:
    if step == 2:
        getattr(optimizer, "reset_state", optimizer.state.clear)()


def resets_a_part(model: Any, optimizer: Any, step: int) -> None:
    if step == 2 and isinstance(optimizer, ot.OffloadOptimizer):
        optimizer.reset_state(model.layers.parameters())
    elif step == 2:
        for param in model.layers.parameters():
            optimizer.state[param]["exp_avg"].zero_()
            optimizer.state[param]["exp_avg_sq"].zero_()


def moves_to_a_group_of_its_own(model: Any, optimizer: Any, step: int) -> None:
    if step == 3:  # the copies of speculative state were swapped an odd number of times
        params = optimizer.param_groups[0]["params"]
        params[:] = [param for param in params if param is not model.head.weight]
        optimizer.add_param_group({"params": [model.head.weight], "lr": 2e-3})


def moves_to_another_group(model: Any, optimizer: Any, step: int) -> None:
    """By the lists alone."""
    if step == 0:
        optimizer.add_param_group({"params": [], "lr": 2e-3})
    elif step == 2:
        params = optimizer.param_groups[0]["params"]
        params[:] = [param for param in params if param is not model.head.weight]
        optimizer.param_groups[1]["params"].append(model.head.weight)


def moves_to_where_it_is(model: Any, optimizer: Any, step: int) -> None:
    model.to("cpu").float()


AFTER: list[After] = [
    clamps_data,
    writes_in_place,
    initializes_anew,
    writes_views_of_data,
    writes_once,
    swaps_for_an_evaluation,
    clears_the_state,
    deletes_the_state,
    assigns_moments,
    resets_the_state,
    resets_a_part,
    moves_to_a_group_of_its_own,
    moves_to_another_group,
    moves_to_where_it_is,
]


def made(options: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return a model and its optimizer, resident where there are no options."""
    torch.manual_seed(0)
    model: Any = Model()
    uniform = copy.deepcopy(model)
    for param in uniform.parameters():
        param.data.fill_(0.1)
    model.expected = by_call(uniform, X[0]).item()
    if options is None:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    rule = ot.AdamW(lr=1e-2, weight_decay=0.0)
    return model, ot.offload(model, rule, device="cpu", precision="fp32", **options)


def trained(
    after: After, options: dict[str, Any] | None, *, before: After = lambda *_: None
) -> list[Any]:
    """Train five steps; return the losses and the last weights, of forward and of the state."""
    model, optimizer = made(options)
    results: list[Any] = []
    for step, x in enumerate(X):
        loss = by_call(model, x)
        loss.backward()
        before(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        after(model, optimizer, step)
        results.append(loss.detach())
    weights = dict(model.named_parameters())
    masters = weights if options is None else dict(optimizer.master_weights())
    results += [weights[name].detach().clone() for name in weights]
    results += [masters[name].detach().clone() for name in weights]
    if options is not None:
        optimizer.close()
    return results


@pytest.mark.parametrize(
    ("after", "placement", "late"), levels.array(AFTER, [*PLACEMENTS], [True, False])
)
def test_writes_after_a_step_are_those_of_a_plain_loop(
    after: After, placement: str, late: bool
) -> None:
    """A write that is lost, or done twice, differs by a hundredth."""
    with on_lanes(SeededLanes(0, late=True)) if late else nullcontext():
        ours = trained(after, PLACEMENTS[placement])
    torch.testing.assert_close(ours, trained(after, None), rtol=1e-5, atol=2e-6)


class Casting(nn.Linear):
    """Casts its weights in each forward, as the routers of Switch Transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super(Casting, self.to(x.dtype)).forward(x)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_moving_a_model_to_where_it_is_changes_nothing(placement: str) -> None:
    """Right after `offload()`, in forwards, and after what shows the host's weights. Nor does it
    count as a write, for which a step would wait until all lanes are idle."""

    def losses(options: dict[str, Any] | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(Casting(8, 8), nn.Tanh()) for _ in range(3)))
        run: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
        if options is not None:
            rule = ot.AdamW(lr=1e-2, weight_decay=0.0)
            run = ot.offload(model, rule, device="cpu", precision="fp32", **options)
        model.to("cpu")
        results = []
        for x in X:
            results.append(model(x).square().mean())
            results[-1].backward()
            run.step()
            run.zero_grad()
            if options is not None:
                run.synchronize()
                with torch.no_grad():
                    model[1][0]._apply(torch.Tensor.clone)  # as `.to()` from the host does
            versions = [param._version for param in model.parameters()]
            model.to("cpu", torch.float32)
            assert [param._version for param in model.parameters()] == versions
        return [x.item() for x in results]

    with on_lanes(SeededLanes(0, late=True)):
        ours = losses(PLACEMENTS[placement])
    assert ours == losses(None)


def loads_weights(model: Any, optimizer: Any, step: int) -> None:
    if step == 2:
        model.load_state_dict({name: 0.9 * x for name, x in model.state_dict().items()})


def perturbs_a_microbatch(model: Any, optimizer: Any, step: int) -> None:
    """Sharpness-aware minimization: the second gradient is taken at other weights."""
    with torch.no_grad():
        torch._foreach_add_(every(model), 0.05)
    by_call(model, X[0]).backward()
    with torch.no_grad():
        torch._foreach_sub_(every(model), 0.05)


BEFORE: list[After] = [clamps_data, writes_in_place, clears_the_state, loads_weights]


@pytest.mark.parametrize(
    ("before", "placement", "late"),
    levels.array([*BEFORE, perturbs_a_microbatch], [*PLACEMENTS], [True, False]),
)
def test_writes_between_backward_and_step_are_those_of_a_plain_loop(
    before: After, placement: str, late: bool
) -> None:
    options = PLACEMENTS[placement]
    if before is perturbs_a_microbatch:
        options = {**options, "grad_accum_steps": 2}
    with on_lanes(SeededLanes(0, late=True)) if late else nullcontext():
        ours = trained(lambda *_: None, options, before=before)
    expected = trained(lambda *_: None, None, before=before)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)


def sets_data(model: Any, optimizer: Any, step: int) -> None:
    for param in every(model):
        param.data = param.data * 0.9


def swaps_data(model: Any, optimizer: Any, step: int) -> None:
    """An average takes the parameters' place for an evaluation, and gives it back."""
    backup = [param.data for param in every(model)]
    for param in every(model):
        param.data = torch.full_like(param, 0.1)
    with torch.no_grad():
        assert by_call(model, X[0]).item() == pytest.approx(model.expected, rel=1e-5)
    for param, values in zip(every(model), backup, strict=True):
        param.data = values


@pytest.mark.parametrize("update", ["exact", "speculative"])
@pytest.mark.parametrize("after", [sets_data, swaps_data])
def test_data_may_be_set_to_other_memory(after: After, update: str) -> None:
    with on_lanes(SeededLanes(0, late=True)):
        ours = trained(after, {"update": update})
    torch.testing.assert_close(ours, trained(after, None), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", [EARLY, {"update": "delayed"}], ids=["early", "delayed"])
@pytest.mark.parametrize(
    "after", [clamps_data, writes_in_place, resets_the_state, clears_the_state]
)
def test_an_update_may_wait_or_run_inside_backward(after: After, options: dict[str, Any]) -> None:
    """Ending the delay after each step makes "delayed" exact."""

    def waits(model: Any, optimizer: Any, step: int) -> None:
        if isinstance(optimizer, ot.OffloadOptimizer):
            optimizer.synchronize()
        after(model, optimizer, step)

    with on_lanes(SeededLanes(0, late=True)):
        ours = trained(waits, options)
    torch.testing.assert_close(ours, trained(after, None), rtol=1e-5, atol=2e-6)


@pytest.mark.cover(3)
@pytest.mark.parametrize("options", [{}, {"update": "speculative", "clip_norm": 1e9}, EARLY])
@pytest.mark.parametrize("working", ["device", "host"])
@pytest.mark.parametrize("state", ["fp32", "split16", "int8"])
def test_masters_of_values_that_are_as_before_keep_their_bits(
    state: str, working: str, options: dict[str, Any]
) -> None:
    """A clamp, and an average that was swapped in, cost no precision of 16-bit weights; elements of
    another value have no bit of their old master, and forward reads them. Narrow state may be where
    streamed weights are, or have a snapshot of them elsewhere."""
    torch.manual_seed(0)
    model = Model()
    optimizer = ot.offload(
        model, ot.AdamW(lr=1e-3), device="cpu", state=state, working=working, **options
    )
    for x in X:
        by_call(model, x).backward()
        optimizer.step()
    before, used = dict(optimizer.master_weights()), dict(optimizer.full_weights())
    assert any((x != x.bfloat16()).any() for x in before.values())
    bound = 0.125
    for param in every(model):
        backup = param.data.clone()
        param.data.zero_()
        param.data.copy_(backup).clamp_(-bound, bound)
    for name, master in optimizer.master_weights():
        weights = used[name].float()
        expected = torch.where(weights.abs() > bound, weights.clamp(-bound, bound), before[name])
        torch.testing.assert_close(master, expected, rtol=0 if state != "int8" else 2**-15, atol=0)
    for name, weights in optimizer.full_weights():
        torch.testing.assert_close(weights, used[name].clamp(-bound, bound), rtol=0, atol=0)
    optimizer.close()


def written_in_its_forward(model: Any, optimizer: Any) -> None:
    inner = model.layers[1].inner
    inner.register_forward_hook(lambda *_: inner.bias.data.zero_())
    model(X[0])


def set_to_another_shape(model: Any, optimizer: Any) -> None:
    model.head.weight.data = torch.zeros(8, 8)


def moved_to_another_dtype(model: Any, optimizer: Any) -> None:
    model.head.double()


def set_while_streamed(model: Any, optimizer: Any) -> None:
    weight = model.layers[1].inner.weight
    weight.data = torch.zeros_like(weight)


def written_through_an_old_view(model: Any, optimizer: Any) -> None:
    view = model.layers[1].inner.weight.data
    by_call(model, X[0]).backward()
    optimizer.step()
    view.zero_()


def written_while_an_update_waits(model: Any, optimizer: Any) -> None:
    model.head.weight.data.clamp_(-0.1, 0.1)
    by_call(model, X[0])


def saved_while_an_update_waits(model: Any, optimizer: Any) -> None:
    model.head.weight.data.clamp_(-0.1, 0.1)
    optimizer.state_dict()


def written_too_late(model: Any, optimizer: Any) -> None:
    by_call(model, X[0]).backward()
    model.head.weight.data.clamp_(-0.1, 0.1)
    optimizer.step()


def cleared_too_late(model: Any, optimizer: Any) -> None:
    by_call(model, X[0]).backward()
    optimizer.state.clear()
    optimizer.step()


def deleted_in_part(model: Any, optimizer: Any) -> None:
    del optimizer.state[model.scale]
    optimizer.synchronize()
    optimizer.state_dict()


def assigned_a_master(model: Any, optimizer: Any) -> None:
    optimizer.state[model.scale]["master"] = torch.ones(())
    optimizer.state_dict()


def assigned_another_shape(model: Any, optimizer: Any) -> None:
    optimizer.state[model.scale]["exp_avg"] = torch.ones(2)
    optimizer.state_dict()


def reset_of_a_stranger(model: Any, optimizer: Any) -> None:
    optimizer.reset_state([nn.Parameter(torch.zeros(3))])


def loaded_by_assignment(model: Any, optimizer: Any) -> None:
    model.load_state_dict({k: x.clone() for k, x in model.state_dict().items()}, assign=True)


def replaced(model: Any, optimizer: Any) -> None:
    """All of them: none receives a gradient."""
    for module in model.modules():
        for name, param in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(param.detach().clone()))
    by_call(model, X[0]).backward()
    optimizer.step()


def left_out_of_the_groups(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].remove(model.scale)
    by_call(model, X[0])


def added_to_the_list_of_groups(model: Any, optimizer: Any) -> None:
    left_out = optimizer.param_groups[0]["params"].pop(0)
    optimizer.param_groups.append({"params": [left_out], "lr": 1e-3})
    by_call(model, X[0])


def set_to_memory_of_the_user(model: Any, optimizer: Any) -> None:
    """That has the same values now, and others later."""
    optimizer.synchronize()
    flat = model.layers[1].inner.weight.detach().flatten().clone()
    model.layers[1].inner.weight.data = flat.view(16, 8)


STREAMED = {"working": "host", "device_slots": 1}
REFUSED: list[tuple[Callable[[Any, Any], object], dict[str, Any], type[Exception], str]] = [
    (
        written_in_its_forward,
        STREAMED,
        ModelError,
        "'layers.1.inner.bias' was written in the forward",
    ),
    (set_to_another_shape, {}, ParameterWriteError, r"'head.weight'.data is set .*\(8, 8\)"),
    (moved_to_another_dtype, {}, ParameterWriteError, r"'head.weight'.data is set .*float64"),
    (moved_to_another_dtype, STREAMED, ParameterWriteError, r"'head.weight'.data is set"),
    (set_while_streamed, STREAMED, ParameterWriteError, r"param.data.copy_"),
    (written_through_an_old_view, STREAMED, ParameterWriteError, "older than its weights"),
    *(
        (write, {"update": "delayed"}, ModelError, r"'head.weight' was written, .*synchronize\(\)")
        for write in (written_while_an_update_waits, saved_while_an_update_waits, written_too_late)
    ),
    (written_too_late, EARLY, UpdateError, "skip_nonfinite = True"),
    (cleared_too_late, EARLY, UpdateError, r"reset_state\(\)"),
    (deleted_in_part, {}, EngineError, r"state\['scale'\] was deleted.*reset_state"),
    (deleted_in_part, {"update": "speculative"}, EngineError, r"state\['scale'\] was deleted"),
    (assigned_a_master, {}, EngineError, r"\['master'\] was assigned"),
    (assigned_another_shape, {}, EngineError, r"\['exp_avg'\] was assigned"),
    (reset_of_a_stranger, {}, EngineError, "does not train"),
    (loaded_by_assignment, STREAMED, ModelError, r"assign=True.*leave assign out"),
    (replaced, {}, ModelError, "was replaced by another object"),
    (left_out_of_the_groups, {}, ModelError, "'scale' is in no group"),
    (added_to_the_list_of_groups, {}, ModelError, r"param_groups\[1\] has no 'betas'"),
    (set_to_memory_of_the_user, STREAMED, ParameterWriteError, r"param.data.copy_"),
]


@pytest.mark.parametrize(("write", "options", "error", "message"), REFUSED)
def test_what_would_be_lost_is_refused_where_it_is_done(
    write: Callable[[Any, Any], object],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    model, optimizer = made(options)
    for x in X[:2]:
        by_call(model, x).backward()
        optimizer.step()
    with pytest.raises(error, match=message):
        write(model, optimizer)
    optimizer.close()
