"""The offloaded model as a module: state dicts, copies, inputs, ties, frozen parameters."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.config.errors import ModelError
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from tests import levels
from tests.numerics.models import Chain, Frozen, batches, loss_of
from tests.seeded_lanes import SeededLanes


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


PLACEMENTS: list[dict[str, object]] = [
    {},
    {"working": "host", "precision": "fp32"},
    {"working": "host", "state": "int8", "activation": "recompute"},
    {"update": "delayed", "working": "host"},
    {"update": "speculative"},
    {"state_on": "device"},
]


@pytest.mark.parametrize(
    ("options", "how", "steps", "late"),
    levels.array(PLACEMENTS, [*COPIES], [0, 1, 4], [False, True]),
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
    part, copied = COPIES[how](net.layers[1]), COPIES[how](net)
    view = copy.deepcopy(net.layers[1].up.weight.data)
    assert type(view) is torch.Tensor and torch.equal(view, net.layers[1].up.weight)
    assert all(type(param) is nn.Parameter for param in copied.parameters())
    expected = net.state_dict()
    for name, value in copied.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for name, value in part.state_dict().items():
        assert torch.equal(value, expected[f"layers.1.{name}"]), name
    loss_of(copied, batches(1)[0]).backward()
    assert [p.grad is not None for p in copied.parameters()] == [
        p.requires_grad for p in net.parameters()
    ]
    optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.step()


def test_a_shallow_copy_is_refused_in_one_line_and_the_model_goes_on() -> None:
    net = Chain()
    optimizer = offloaded(net, working="host")
    for module in (net, net.layers[1]):
        with pytest.raises(ModelError, match=r"is a shallow copy \(copy.copy\)"):
            copy.copy(module)(batches(1)[0])
    optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.step()
    assert optimizer.last_step.step == 1
    optimizer.close()
    copy.copy(net)(batches(1)[0])


def test_batch_norm_keeps_fp32_parameters() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    optimizer = offloaded(net, state="int8")
    optimizer.backward(net(torch.randn(3, 1, 4, 4)).float().square().mean())
    optimizer.step()
    optimizer.synchronize()
    fields = {name: set(state) for name, state in optimizer.named_state()}
    assert fields["1.weight"] == {"master", "exp_avg", "exp_avg_sq"}
    assert "correction" in fields["0.weight"]
    assert net[1].weight.dtype is torch.float32
    assert net[0].weight.dtype is torch.bfloat16
