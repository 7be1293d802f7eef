"""Muon offloaded: the bits of a resident run under `torch.optim.Muon`, and AdamW for the rest."""

from __future__ import annotations

import copy
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

import offloadtrain as ot
from offloadtrain.engine import ModelError
from offloadtrain.step.layout.block_spec import MatrixSpec
from tests.numerics.comparison import make
from tests.numerics.models import Chain, batches
from tests.numerics.muon import (
    REST,
    RULE,
    SEED,
    NarrowMuonRun,
    assert_same,
    is_hidden,
    pair,
)
from tests.numerics.test_rules import copied_state, follow
from tests.runtime.kernels.test_adam import needs_fma_in_torch

OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.05},
    "early": {"skip_nonfinite": False},
    "summed": {"grad_accum_steps": 2, "clip_norm": 0.5},
    "summed early": {"grad_accum_steps": 2, "skip_nonfinite": False},
    "delayed": {"update": "delayed", "warmup_steps": 1, "clip_norm": 0.5},
    "streamed": {"working": "host", "device_slots": 1, "clip_norm": 0.5},
    "streamed, delayed": {"working": "host", "update": "delayed", "warmup_steps": 1},
    "fp16": {"precision": "fp16", "clip_norm": 0.5},
    "fp32": {"precision": "fp32", "clip_norm": 0.5},
    "fp32, summed": {"precision": "fp32", "grad_accum_steps": 2},
    "on the device": {"state_on": "device", "clip_norm": 0.5},
    "on the device, summed": {"state_on": "device", "grad_accum_steps": 2},
}
RULES = {
    "default": RULE,
    "moonshot": ot.Muon(lr=0.02, adjust_lr_fn="match_rms_adamw", ns_steps=4, rest=REST),
    "plain momentum": ot.Muon(lr=0.02, nesterov=False, ns_steps=0, momentum=0.8, rest=REST),
}


def check(rule: Any, options: dict[str, Any]) -> None:
    run, optimizer, model = pair(rule, **options)
    accum = options.get("grad_accum_steps", 1)
    steps = 8 if options.get("precision") == "fp16" else 4
    follow(run, optimizer, model, batches(steps * accum), accum)
    assert run.skipped < steps
    assert_same(run, optimizer, model)
    optimizer.close()


@needs_fma_in_torch
@pytest.mark.parametrize("options", ["clipped", "streamed", "fp32, summed"])
def test_few_options_have_the_bits_of_torch(options: str) -> None:
    check(RULE, OPTIONS[options])


@needs_fma_in_torch
@pytest.mark.slow
@pytest.mark.parametrize(("rule", "options"), list(zip(cycle(RULES), OPTIONS, strict=False)))
def test_all_options_have_the_bits_of_torch(rule: str, options: str) -> None:
    check(RULES[rule], OPTIONS[options])


@needs_fma_in_torch
@pytest.mark.slow
@pytest.mark.parametrize("options", ["summed", "streamed"])
def test_split16_has_exact_masters_and_rounded_moments(options: str) -> None:
    run, optimizer, model = pair(RULE, NarrowMuonRun, state="split16", **OPTIONS[options])
    accum = OPTIONS[options].get("grad_accum_steps", 1)
    follow(run, optimizer, model, batches(4 * accum), accum)
    masters = dict(optimizer.master_weights())
    for name, state in optimizer.named_state():
        if name in run.buffers:
            assert list(state) == ["weight", "low", "momentum_buffer"]
            assert torch.equal(masters[name], run.master(name)), name
            assert torch.equal(state["momentum_buffer"], run.buffers[name]), name
        else:
            for tensor, expected in zip(state.values(), run.states[name], strict=True):
                assert torch.equal(tensor.reshape(-1), expected), name
    optimizer.close()


@pytest.mark.slow
def test_orthogonalized_in_place_has_the_bits_of_torch() -> None:
    shapes = [(1, 1), (24, 37), (37, 24), (3, 130), (64, 64)]
    for shape, steps in product(shapes, [0, 1, 4, 5]):
        torch.manual_seed(0)
        values, rule = torch.randn(shape), ot.Muon(ns_steps=steps)
        expected = _zeropower_via_newtonschulz(values, rule.ns_coefficients, steps, rule.eps)
        rows, columns = values.bfloat16(), values.bfloat16().T.contiguous().T
        for matrix in (rows, columns):
            workspace = torch.full((MatrixSpec(0, *shape).workspace_numel,), torch.nan).bfloat16()
            rule.orthogonalize(matrix, workspace, group=rule.defaults())
        assert torch.equal(rows, expected)
        # Sums of another order: the products of a transposed operand are other kernels'.
        assert torch.allclose(columns.float(), expected.float(), atol=0.02)


@pytest.mark.slow
def test_a_run_resumes_and_a_skipped_step_changes_nothing() -> None:
    run, optimizer, model = pair(clip_norm=0.5)
    stream = batches(4)
    follow(run, optimizer, model, stream[:2], 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    other = make("chain", seed=1)
    again = ot.offload(other, RULE, device="cpu", seed=SEED, clip_norm=0.5)
    again.load_state_dict(saved)
    before = copied_state(again)
    again.backward(other(stream[0]).float().sum() * torch.inf)
    again.step()
    assert again.last_step is not None and again.last_step.skipped
    assert all(torch.equal(value, before[key]) for key, value in copied_state(again).items())
    follow(run, again, other, stream[2:], 1)
    assert_same(run, again, other)
    again.close()


# ---- which parameters are its own


def names(optimizer: ot.OffloadOptimizer, model: nn.Module, *, matrices: bool) -> list[str]:
    of = {param: name for name, param in model.named_parameters()}
    groups = [group for group in optimizer.param_groups if group["use_muon"] is matrices]
    return sorted(of[param] for group in groups for param in group["params"])


def test_hidden_matrices_are_its_own() -> None:
    model = make("chain")
    model.layers[0].table = nn.Embedding(3, 4)
    model.layers[0].kernel = nn.Parameter(torch.zeros(2, 3, 4))
    expected = [f"layers.{i}.{name}.weight" for i in range(3) for name in ("down", "up")]
    optimizer = ot.offload(model, RULE, device="cpu")
    assert names(optimizer, model, matrices=True) == expected
    everything = [name for name, _ in model.named_parameters()]
    assert names(optimizer, model, matrices=False) == sorted(set(everything) - set(expected))
    optimizer.close()


@pytest.mark.slow
def test_a_matrix_tied_to_one_outside_of_the_layers_is_not() -> None:
    model = make("chain")
    model.layers[2].up.weight = model.embed.weight
    optimizer = ot.offload(model, RULE, device="cpu")
    assert "embed.weight" in names(optimizer, model, matrices=False)
    assert "layers.1.up.weight" in names(optimizer, model, matrices=True)
    optimizer.close()


def test_a_group_says_whose_it_is_and_with_which_hyperparameters() -> None:
    model = make("chain")
    layers = [model.layers[0].up.weight]
    rest = [p for p in model.parameters() if p is not layers[0] and p is not model.head.weight]
    groups = [
        {"params": [model.head.weight], "use_muon": True, "ns_steps": 3},
        {"params": layers, "use_muon": False, "betas": (0.5, 0.5)},
        {"params": rest, "lr": 0.5, "momentum": 0.7, "eps": 1e-5},
    ]
    optimizer = ot.offload(model, RULE, device="cpu", params=groups)
    head, first, matrices, rest_of_model = optimizer.param_groups
    assert (head["ns_steps"], head["lr"], "betas" in head) == (3, 0.02, False)
    assert (first["betas"], first["lr"], "ns_steps" in first) == ((0.5, 0.5), 1e-2, False)
    assert (matrices["momentum"], matrices["lr"], matrices["use_muon"]) == (0.7, 0.5, True)
    assert (rest_of_model["lr"], rest_of_model["eps"], "momentum" in rest_of_model) == (
        0.5,
        1e-5,
        False,
    )
    assert len(matrices["params"]) == 5
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"use_muon": True}], "'embed.weight' of shape .37, 24. is|'layers.0.norm.weight' of"),
        ([{"use_muon": False}], "found no hidden matrix, a 2-D parameter in a list of layers"),
        ([{"ns_step": 3}], r"unknown keys in a parameter group: \['ns_step'\]"),
        ([{"use_muon": False, "momentum": 0.5}], "found no hidden matrix"),
        ([{"momentum": 1.5}], r"momentum = 1.5 is not in \[0, 1\]"),
        ([{"ns_steps": 100}], r"ns_steps = 100 is not in \[0, 100\)"),
        ([{"adjust_lr_fn": "spectral"}], "'spectral' is not one of None, 'original', 'match_rms"),
        ([{"ns_coefficients": (1.0, 2.0)}], "are not three numbers"),
        ([{"betas": (1.0, 0.9)}], "are not two numbers"),
    ],
)
def test_wrong_groups_are_refused(groups: list[dict[str, Any]], message: str) -> None:
    model = make("chain")
    complete = [{"params": list(model.parameters()), **group} for group in groups]
    with pytest.raises((ModelError, ValueError), match=message):
        ot.offload(model, RULE, device="cpu", params=complete)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": "int8"}, "state = 'int8' and Muon: .* Use state = 'fp32' or 'split16'"),
        ({"update": "speculative"}, "update = 'speculative' and Muon: .* 'exact' or 'delayed'"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ot.offload(make("chain"), RULE, device="cpu", **options)


def test_a_rest_that_is_no_rule_of_buckets_is_refused() -> None:
    for wrong in (ot.Muon(), object(), ot.AdamW):
        with pytest.raises(TypeError, match=r"rest is .*, not the update rule of all"):
            ot.Muon(rest=wrong)


# ---- its bytes


@pytest.mark.slow
@pytest.mark.parametrize("state_on", ["host", "device"])
def test_matrices_cross_the_bus_once_each_way(state_on: str) -> None:
    """In bf16, beside gradients and weights; only where the state is on the host."""
    model = make("chain")
    matrices = sum(p.numel() for n, p in model.named_parameters() if is_hidden(n, p))
    moved = {}
    for rule in (RULE, REST):
        optimizer = ot.offload(copy.deepcopy(model), rule, device="cpu", state_on=state_on)
        run = optimizer.model
        for tokens in batches(2):
            optimizer.backward(run(tokens).float().square().mean())
            optimizer.step()
        optimizer.synchronize()
        report = optimizer.last_step
        moved[rule] = (report.d2h_bytes, report.h2d_bytes)
        optimizer.close()
    (down, up), (down_of_rest, up_of_rest) = moved[RULE], moved[REST]
    if state_on == "host":
        padding = down - down_of_rest - 2 * matrices
        assert padding == up - up_of_rest - 2 * matrices
        assert abs(padding) < 3 * 4 * 128 * 2  # of three layers, each with one bucket more
    else:
        assert (down, up) == (0, 0)


def test_the_ledger_counts_momentum_and_workspace() -> None:
    model = Chain(3)
    optimizer = ot.offload(model, RULE, device="cpu")
    rows = {row.owner: row.bytes for row in optimizer.ledger.rows()}
    assert rows["momentum_buffer"] == 3 * 2 * 896 * 4  # 24 x 37, in steps of 128
    assert rows["matrix workspace"] == (24 * 37 * 2 + 2 * 24 * 24) * 2
    optimizer.close()
