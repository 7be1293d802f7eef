"""Update rules and state formats over shards of several ranks: the bits of a plain loop on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offloadtrain.optim import register_state_format
from tests.distributed.conftest import Run
from tests.engine.test_extending import CodecRun, Scaled, signum
from tests.numerics import muon
from tests.numerics.comparison import assert_same
from tests.numerics.models import batches
from tests.numerics.test_rules import ELEMENTWISE, RULES, follow, pair
from tests.runtime.kernels.test_adam import needs_fma_in_torch

pytestmark = needs_fma_in_torch
Options = dict[str, Any]
CLIP: Options = {"clip_norm": 0.5}
SUMMED: Options = {"grad_accum_steps": 2, "zero_stage": 2} | CLIP
EARLY: Options = {"skip_nonfinite": False, "reduction": "fp32", "zero_stage": 2}
ZERO_3: Options = {"zero_stage": 3} | CLIP
DELAYED: Options = {"working": "host", "update": "delayed", "warmup_steps": 1}
DEVICE: Options = {"state_on": "device", "zero_stage": 2}


def case(rule: str, state: str, options: Options, *, quick: bool = False) -> Any:
    name = "-".join([rule, state, *map(str, options.values())])
    return pytest.param(rule, state, options, id=name, marks=() if quick else pytest.mark.slow)


def compare(rule: str, state: str, options: Options) -> list[str]:
    """Compare what this rank's shards hold; returns the names of its tensors. All ranks see the
    same batches: their sum, divided by their number, is exact."""
    accum = options.get("grad_accum_steps", 1)
    with register_state_format(Scaled()):
        made, loop = (signum(), CodecRun) if rule == "signum" else (RULES[rule], None)
        run, optimizer, model = pair(made, loop, state=state, **options)
        follow(run, optimizer, model, batches(4 * accum), accum)
        assert_same(run, optimizer, model)
        extents, names = optimizer.extents(), []
        for name, extent in extents.items():
            names += [name] * (extent.lo < extent.hi)
            if rule == "capped lamb":  # the norms of a tensor are those of all of it
                assert extent.hi - extent.lo in (0, run.params[name].numel()), name
        if state == "fp32":
            for name, master in optimizer.master_weights():
                assert torch.equal(master, run.master(name)), name
        optimizer.close()
    return names


@pytest.mark.parametrize(
    ("rule", "state", "options"),
    [
        case("lion", "fp32", {"zero_stage": 2}, quick=True),
        case("nesterov", "split16", ZERO_3, quick=True),
        case("signum", "scaled", {"zero_stage": 2}, quick=True),
        case("capped lamb", "fp32", {"zero_stage": 2} | CLIP, quick=True),
        case("lion", "int8", ZERO_3),
        *(case(rule, "fp32", ZERO_3) for rule in ELEMENTWISE),
        case("signum", "split16", {"zero_stage": 1}),
        case("signum", "scaled", {"zero_stage": 3}),
        *(
            case("capped lamb", "fp32", options)
            for options in (SUMMED, EARLY, ZERO_3, DELAYED, DEVICE)
        ),
        case("capped lamb", "fp32", {"update": "speculative", "zero_stage": 1} | CLIP),
        case("capped lamb", "split16", CLIP),
        case("capped lamb", "int8", CLIP),
    ],
)
def test_shards_have_the_bits_of_one_rank(
    ranks: Run, rule: str, state: str, options: Options
) -> None:
    first, second = ranks(2, compare, rule, state, options)
    assert first and second
    if rule == "capped lamb":
        assert not set(first) & set(second)


def compare_muon(options: Options) -> list[str]:
    """Return the matrices of this rank, each of which is on one rank."""
    narrow = options.get("state") == "split16"
    run, optimizer, model = pair(muon.RULE, **options)
    accum = options.get("grad_accum_steps", 1)
    follow(run, optimizer, model, batches(4 * accum), accum)
    matrices = []
    for name, extent in optimizer.extents().items():
        if muon.is_hidden(name, run.params[name]):
            assert extent.hi - extent.lo in (0, run.params[name].numel()), name
            matrices += [name] * (extent.hi > extent.lo)
    if narrow:
        for name, master in optimizer.master_weights():
            assert name not in run.buffers or torch.equal(master, run.master(name)), name
        for name, shards in optimizer.named_state():
            if name in run.buffers and shards["momentum_buffer"].numel():
                assert torch.equal(shards["momentum_buffer"], run.buffers[name]), name
    else:
        assert_same(run, optimizer, model)
    optimizer.close()
    return matrices


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"zero_stage": 1} | CLIP, SUMMED, EARLY, ZERO_3, DELAYED, DEVICE, {"state": "split16"}],
)
def test_muon_has_the_bits_of_one_rank(ranks: Run, options: Options) -> None:
    first, second = ranks(2, compare_muon, options)
    assert len(first) == len(second) == 3
    assert sorted(first + second) == [
        f"layers.{i}.{name}.weight" for i in range(3) for name in ("down", "up")
    ]


@pytest.mark.slow
def test_a_rank_of_muon_may_have_no_matrix(ranks: Run) -> None:
    """Two matrices in each layer, on four ranks: two have padding only."""
    assert [len(names) for names in ranks(4, compare_muon, CLIP)].count(0) == 2
