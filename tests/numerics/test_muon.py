"""Muon offloaded: which matrices are its own, their products, and their bytes. The bits of a
resident run under `torch.optim.Muon`, and AdamW for the rest, are in `test_rules.py`."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

import offloadtrain as ot
from offloadtrain.engine import ModelError
from offloadtrain.step.layout.block_spec import MatrixSpec
from tests.numerics.comparison import make
from tests.numerics.models import batches
from tests.numerics.muon import REST, RULE, is_hidden
from tests.numerics.test_rules import OPTIONS, follow, pair
from tests.runtime.kernels.test_adam import needs_fma_in_torch


@needs_fma_in_torch
@pytest.mark.slow
@pytest.mark.parametrize("options", ["speculative", "streamed"])
def test_split16_has_exact_masters_and_rounded_moments(options: str) -> None:
    run, optimizer, model = pair(RULE, state="split16", **OPTIONS[options])
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
