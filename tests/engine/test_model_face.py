"""The offloaded model as a module: state dicts, copies, inputs, ties, frozen parameters."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.runtime.lanes.sequential import SequentialLanes
from tests.numerics.models import MODELS, Chain, Frozen, batches, loss_of


def offloaded(net: nn.Module, **options: object) -> ot.OffloadOptimizer:
    return ot.offload(net, device="cpu", **options)  # type: ignore[arg-type]


def test_a_model_state_dict_is_a_copy_and_loads_back() -> None:
    net = Chain(tied=True)
    optimizer = offloaded(net)
    saved = net.state_dict()
    assert saved["head.weight"] is saved["embed.weight"] or torch.equal(
        saved["head.weight"], saved["embed.weight"]
    )
    before = {k: v.clone() for k, v in saved.items()}
    optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.step()
    assert all(torch.equal(saved[k], before[k]) for k in saved)
    net.load_state_dict(saved)
    for name, state in optimizer.named_state():
        assert torch.equal(state["master"], before[name].float()), name
    optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.step()  # the seal was renewed


def test_safetensors_saves_a_tied_model(tmp_path: Path) -> None:
    net = Chain(tied=True)
    optimizer = offloaded(net)
    save_model(net, str(tmp_path / "model.safetensors"))
    loaded = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["embed.weight"], net.embed.weight)
    optimizer.close()


def test_a_deep_copy_is_an_ordinary_model() -> None:
    net = Chain()
    optimizer = offloaded(net)
    twin = copy.deepcopy(net)
    loss_of(twin, batches(1)[0]).backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert optimizer.phase is type(optimizer.phase).FORWARD
    torch.save(net, io.BytesIO())


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    # A view of a flat buffer would be saved with all of it.
    assert file.tell() < 4096 + 1.5 * sum(4096 + p.nbytes for p in module.parameters())
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "save": saved,
}


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"working": "host", "precision": "fp32"},
        {"working": "host", "state": "int8", "activation": "recompute"},
        {"update": "delayed", "working": "host"},
        {"update": "speculative"},
        {"state_on": "device"},
    ],
)
def test_a_copy_holds_the_newest_weights(
    options: dict[str, object], how: str, steps: int, late: bool
) -> None:
    """Also where nothing has waited for the update or the upload, as on a GPU that is behind."""
    with on_lanes(SeededLanes(0, late=True) if late else SequentialLanes()):
        net = Frozen()
        optimizer = offloaded(net, **options)
    for tokens in batches(steps):
        optimizer.backward(loss_of(net, tokens))
        optimizer.step()
    part, twin = COPIES[how](net.layers[1]), COPIES[how](net)
    assert all(type(param) is nn.Parameter for param in twin.parameters())
    expected = net.state_dict()
    for name, value in twin.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for name, value in part.state_dict().items():
        assert torch.equal(value, expected[f"layers.1.{name}"]), name
    loss_of(twin, batches(1)[0]).backward()
    assert [p.grad is not None for p in twin.parameters()] == [
        p.requires_grad for p in net.parameters()
    ]
    optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.step()


def test_ties_frozen_parameters_and_buffers() -> None:
    tied = Chain(tied=True)
    offloaded(tied)
    assert tied.head.weight is tied.embed.weight
    frozen = Frozen()
    frozen.register_buffer("table", torch.arange(5.0))
    before = frozen.layers[0].up.weight.detach().clone()
    optimizer = offloaded(frozen)
    for tokens in batches(2):
        optimizer.backward(loss_of(frozen, tokens))
        optimizer.step()
    optimizer.synchronize()
    assert torch.equal(frozen.layers[0].up.weight, before.bfloat16())
    assert frozen.table.dtype is torch.float32
    names = {name for name, _ in optimizer.named_state()}
    assert "layers.0.up.weight" not in names and "layers.2.up.bias" not in names


def test_floating_inputs_are_cast_at_the_root() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = offloaded(net)
    out = net(torch.ones(2, 4))
    assert out.dtype is torch.bfloat16
    optimizer.backward(out.float().mean())
    optimizer.step()


def test_batch_norm_keeps_fp32_parameters() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    optimizer = offloaded(net)
    optimizer.backward(net(torch.randn(3, 1, 4, 4)).float().square().mean())
    optimizer.step()
    optimizer.synchronize()
    assert net[1].weight.dtype is torch.float32
    assert net[0].weight.dtype is torch.bfloat16


def test_channels_last_weights_keep_their_strides() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    net = net.to(memory_format=torch.channels_last)
    strides = [p.stride() for p in net.parameters()]
    weights = [p.detach().clone() for p in net.parameters()]
    optimizer = offloaded(net, precision="fp32")
    assert [p.stride() for p in net.parameters()] == strides
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))
    optimizer.backward(net(torch.randn(1, 3, 6, 6)).square().mean())
    optimizer.step()


@pytest.mark.parametrize("name", MODELS)
def test_blocks_cover_every_trainable_parameter_once(name: str) -> None:
    net = MODELS[name]()
    optimizer = offloaded(net)
    slots = [s for block in optimizer._blocks for b in block.buckets for s in b.slots]
    expected = [n for n, p in net.named_parameters() if p.requires_grad and p.numel()]
    assert sorted(slot.name for slot in slots) == sorted(expected)
    for block in optimizer._blocks:
        for bucket in block.buckets:
            assert all(slot.offset % 128 == 0 for slot in bucket.slots)


def test_every_byte_has_an_owner() -> None:
    net = Chain()
    optimizer = offloaded(net, grad_accum_steps=2)
    numel = sum(b.numel for block in optimizer._blocks for b in block.buckets)
    largest = max(b.numel for block in optimizer._blocks for b in block.buckets)
    rows = {(row.owner, row.tier): row.bytes for row in optimizer.ledger.rows()}
    assert rows["master weights", "host"] == 4 * numel
    assert rows["exp_avg", "host"] == rows["exp_avg_sq", "host"] == 4 * numel
    assert rows["gradient sums", "host"] == 4 * numel
    assert rows["working weights", "device"] == 2 * numel
    assert rows["host staging", "host"] == rows["gradient staging", "device"] == 2 * 2 * largest
    optimizer.close()
    assert not any(row.bytes for row in optimizer.ledger.rows() if row.tier == "host")


def test_bytes_moved_are_the_minimum() -> None:
    net = Chain()
    optimizer = offloaded(net)
    numel = sum(b.numel for block in optimizer._blocks for b in block.buckets)
    for tokens in batches(2):
        optimizer.backward(loss_of(net, tokens))
        optimizer.step()
    report = optimizer.last_step
    assert report is not None
    assert report.d2h_bytes == 2 * numel
    assert report.h2d_bytes == 2 * numel


def test_many_steps_leave_nothing_behind() -> None:
    net = Chain(1)
    optimizer = offloaded(net)
    tokens = batches(1)[0]

    def alive() -> int:
        import gc

        gc.collect()
        return sum(1 for o in gc.get_objects() if issubclass(type(o), torch.Tensor))

    for _ in range(20):
        optimizer.backward(loss_of(net, tokens))
        optimizer.step()
    before = alive()
    for _ in range(60):
        optimizer.backward(loss_of(net, tokens))
        optimizer.step()
        optimizer.zero_grad()
    assert alive() <= before + 2
    assert not any(block.graphs.hold_weights for block in optimizer._blocks)


def test_the_sampled_timeline_names_every_lane() -> None:
    net = Chain()
    optimizer = offloaded(net)
    optimizer.sample_timeline()
    optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.step()
    assert optimizer.last_step is not None
    timeline = optimizer.last_step.timeline
    assert {interval.lane for interval in timeline} == {"compute", "wait", "d2h", "host", "h2d"}
    names = {interval.name for interval in timeline}
    assert {"forward layers.0", "backward layers.0", "adam layers.0", "h2d head"} <= names
    optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.step()
    assert optimizer.last_step.timeline == ()
