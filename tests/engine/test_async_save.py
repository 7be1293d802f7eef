"""State that is written while later steps run is that of its own step, and changes none of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.engine import EngineError
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout.step_spec import SPILL_BLOCK
from offloadtrain.step.program import updates
from offloadtrain.step.program.operations import Written
from offloadtrain.step.proof.prove import prove
from tests.engine.test_proof import CASES, MODES, PLACEMENTS, options_of
from tests.harsh_lanes import PausingLanes
from tests.numerics.models import MODELS, batches, loss_of
from tests.recording_lanes import RecordingLanes
from tests.seeded_lanes import SeededLanes

STEPS, SAVED = 5, (1, 3)


class Copies:
    """A writer that takes its time, as a disk does."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[Written, Tensor]] = {}
        self.finished = False

    def write(self, bucket: str, parts: Sequence[tuple[Written, Tensor]]) -> None:
        time.sleep(0.001)
        for part, values in parts:
            copied = values[: part.hi - part.lo].to("cpu", copy=True)
            self.parts.setdefault(bucket, {})[part] = copied

    @property
    def buffers(self) -> dict[str, list[Tensor]]:
        """Bucket → its buffers; each value was written once."""
        return {bucket: _joined(parts) for bucket, parts in sorted(self.parts.items())}

    def finish(self) -> None:
        self.finished = True


def _joined(parts: dict[Written, Tensor]) -> list[Tensor]:
    buffers: list[list[Tensor]] = []
    for part in sorted(parts):
        if part.lo == 0:
            buffers.append([])
        assert part.buffer == len(buffers) - 1
        assert part.lo == sum(values.numel() for values in buffers[-1])
        buffers[-1].append(parts[part])
    return [torch.cat(values) for values in buffers]


def trained(lanes: Lanes, name: str, state: str, precision: str, **options: Any) -> Any:
    """Return what each save has written, the state beside it, and the weights at the end."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.SpeculationPolicy, "should_speculate", lambda policy: True)
        with on_lanes(lanes):
            optimizer = ot.offload(
                model,
                ot.AdamW(lr=1e-2),
                device="cpu",
                precision=precision,
                state=state,
                **{"clip_norm": 0.5, **options},
            )
        writers = []
        for step, tokens in enumerate(batches(STEPS), 1):
            optimizer.backward(loss_of(model, tokens))
            optimizer.step()
            if step in SAVED:
                writers.append(Copies())
                optimizer.write_state(writers[-1])
        optimizer.finish_writing()
        optimizer.synchronize()
        assert all(writer.finished for writer in writers)
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    layout = optimizer.flat_states()
    for writer in writers:
        assert [flat.numel for flat in layout] == [
            field.numel()
            for name in dict.fromkeys(f.bucket for f in layout)
            for field in writer.buffers[name]
        ]
    optimizer.close()
    return [writer.buffers for writer in writers], weights


def same(actual: Any, expected: Any) -> None:
    for buffers, other in zip(actual[0], expected[0], strict=True):
        assert buffers.keys() == other.keys()
        for bucket, fields in other.items():
            for field, value in zip(buffers[bucket], fields, strict=True):
                assert torch.equal(field, value), bucket
    for key, value in expected[1].items():
        assert torch.equal(actual[1][key], value), key


SPILLS = (14 * SPILL_BLOCK, 0, 1 << 20, 5 * SPILL_BLOCK)
"""Bytes: buckets and a part of a field, none, more than all state, and a bucket and a half."""


def spill_of(number: int, placement: str) -> int:
    """Only what is on the host can be copied there."""
    on_device = PLACEMENTS[placement].get("state_on") == "device"
    return 0 if on_device else SPILLS[number % len(SPILLS)]


EACH = pytest.mark.parametrize(
    ("mode", "placement", "state", "precision", "spill"),
    [
        (mode, placement, *CASES[number % len(CASES)], spill_of(number, placement))
        for number, (mode, placement) in enumerate(product(MODES, PLACEMENTS))
        if number % 2 == 0
    ],
)
"""Every second pair of mode and placement, formats and spills in turn."""


@pytest.mark.slow
@pytest.mark.cover(0, 1)
@EACH
def test_what_is_written_is_the_state_of_its_step(
    mode: str, placement: str, state: str, precision: str, spill: int
) -> None:
    """Whatever a save copies, it writes the same as one that copies nothing, without a race."""
    name = min(MODELS)
    options = options_of(mode, precision) | PLACEMENTS[placement]
    expected = trained(SequentialLanes(), name, state, precision, **options)
    options["checkpoint_spill"] = spill
    recorder = RecordingLanes(SequentialLanes())
    late = SeededLanes(7, late=True) if spill else PausingLanes(1.0)
    for lanes in (recorder, late):
        same(trained(lanes, name, state, precision, **options), expected)
    assert prove(recorder.program) == []


@pytest.mark.slow
def test_frozen_weights_of_streamed_blocks_are_written() -> None:
    same(
        trained(ThreadLanes(), "frozen", "fp32", "bf16", working="host"),
        trained(SequentialLanes(), "frozen", "fp32", "bf16", working="host"),
    )


def test_state_is_not_written_inside_a_step() -> None:
    model: nn.Module = MODELS[min(MODELS)]()
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu")
    optimizer.backward(loss_of(model, batches(1)[0]))
    with pytest.raises(EngineError, match="between backward and step"):
        optimizer.write_state(Copies())
    optimizer.close()
