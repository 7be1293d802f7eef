"""`working_weights()`: the newest weights of a plain loop, in every placement, on any lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import on_lanes
from tests.numerics.comparison import assert_same, make, pair, train
from tests.numerics.configurations import DISK_PLACEMENTS, PLACEMENTS, UPDATES
from tests.numerics.models import batches, loss_of
from tests.seeded_lanes import SeededLanes

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "resident": ("tied", {}),
    "1 slot": ("frozen", PLACEMENTS["1 slot"]),
    "partly streamed": ("tied", PLACEMENTS["partly streamed"] | UPDATES["early"]),
    "speculative": ("chain", UPDATES["speculative"] | {"clip": 0.01, "working": "host"}),
    "delayed": ("chain", UPDATES["delayed"]),
    "delayed, streamed": ("tied", UPDATES["delayed"] | PLACEMENTS["1 slot"]),
    "state on the device": ("unusual", PLACEMENTS["state on the device"]),
    "all on the disk": ("frozen", DISK_PLACEMENTS["all on the disk"]),
    "narrow": ("chain", {"state": "split16", "working": "host"}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_step_can_be_sent_elsewhere(case: str, tmp_path: Path) -> None:
    """After each step but the first, to another model, without an effect on the run."""
    name, options = CASES[case]
    options = dict(options)
    if "disk" in str(options):
        options |= {"scratch_dir": str(tmp_path), "scratch_in_memory": True}
    run, optimizer, model = pair(make(name), **options)
    names = [name for name, _ in model.named_parameters()]
    for step, tokens in enumerate(batches(4)):
        expected = run.step([tokens], loss_of)
        assert train(optimizer, model, [tokens]) == expected
        if step == 0:
            continue
        if options.get("update") == "delayed":
            run.flush()
        sent = {name: weights.clone() for name, weights in optimizer.working_weights()}
        assert sorted(sent) == sorted(names)
        for name, weights in sent.items():
            assert weights.dtype is torch.bfloat16 and torch.equal(weights, run.params[name]), name
    assert_same(run, optimizer, model)
    optimizer.close()
    assert {name for name, _ in optimizer.working_weights()} == set(names)


def test_a_streamed_block_is_on_the_device_one_at_a_time() -> None:
    """An item's memory is given to another block; the rest of the update runs meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with on_lanes(SeededLanes(0, late=True)):
        optimizer = ot.offload(model, device="cpu", working="host", device_slots=1)
    optimizer.backward(model(torch.ones(2, 8).bfloat16()).float().square().mean())
    optimizer.step()
    items = optimizer.working_weights()
    places, first = set(), next(items)[1].clone()
    held = {name: (weights.data_ptr(), weights.clone()) for name, weights in items}
    places = {place for place, _ in held.values()}
    assert len(places) <= 2  # of a weight and a bias
    masters = dict(optimizer.master_weights())
    assert torch.equal(first, masters["0.weight"].bfloat16())
    for name, (_, values) in held.items():
        assert torch.equal(values, masters[name].bfloat16()), name
    optimizer.close()
