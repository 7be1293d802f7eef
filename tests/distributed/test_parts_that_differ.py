"""Parts of one model that would drift apart, silently: each is told by name, on all of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import parallelize_module

import offloadtrain as ot
from offloadtrain.engine.local_part import local
from offloadtrain.runtime.process_group import Ranks
from tests.distributed.conftest import Run
from tests.distributed.test_pipeline_misuse import told
from tests.distributed.test_tensor_parallel import (
    HEAD,
    VOCABULARY,
    WIDTH,
    Attention,
    Llama,
    of_sequences,
    outside_of_layers,
    plan,
)


class WithHeadNorm(Attention):
    """Norms its queries head by head; of each part's heads only."""

    def __init__(self) -> None:
        super().__init__()
        self.head_norm = nn.RMSNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        q, k, v = (
            project(x).view(rows, length, -1, HEAD).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(self.head_norm(q), k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(rows, length, -1))


class WithDropout(Llama):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * F.dropout(torch.ones(VOCABULARY), 0.5)


def parts(model: nn.Module | None = None, axis: str = "tp", replicas: int = 1) -> Any:
    """A model in two parts, by the mesh's axis, and the mesh."""
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "tp"))
    if model is None:
        torch.manual_seed(0)
        model = Llama()
    for layer in model.layers:
        parallelize_module(layer, mesh[axis], plan())
    return model, mesh


def offloaded(model: nn.Module, mesh: Any, **options: Any) -> ot.OffloadOptimizer:
    chosen: dict[str, Any] = {"precision": "fp32"} | options
    return ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", mesh=mesh, **chosen)


def step(model: nn.Module, optimizer: ot.OffloadOptimizer, seed: int = 7) -> float:
    tokens = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(seed))
    loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


def stepped(model: nn.Module, mesh: Any, seed: int = 7, **options: Any) -> str:
    optimizer = offloaded(model, mesh, **options)
    said = told(lambda: step(model, optimizer, seed))
    optimizer.close()
    return said


def gradients_that_differ() -> dict[str, str]:
    rank, said = dist.get_rank(), {}
    said["batches"] = stepped(*parts(), seed=rank)
    torch.manual_seed(0)
    model, mesh = parts(WithDropout())
    torch.manual_seed(rank)
    said["dropout"] = stepped(model, mesh)
    torch.manual_seed(0)
    model = Llama()
    for layer in model.layers:
        layer.attention = WithHeadNorm()
    said["heads"] = stepped(*parts(model))
    torch.manual_seed(0)
    model = Llama()
    styles = of_sequences()
    del styles["norm"]
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], styles)
    parallelize_module(model, mesh["tp"], outside_of_layers())
    said["sequence"] = stepped(model, mesh)
    model, mesh = parts()
    optimizer = offloaded(model, mesh)
    if rank:
        with torch.no_grad():
            model.norm.weight.mul_(1.5)
        optimizer.adopt_written_weights()
    said["written"] = told(lambda: step(model, optimizer))
    optimizer.close()
    return said


@pytest.mark.slow
def test_gradients_of_what_all_parts_hold_must_be_the_same(ranks: Run) -> None:
    of_ranks = ranks(2, gradients_that_differ)
    assert of_ranks[0] == of_ranks[1]
    for case, name in (
        ("batches", ""),
        ("dropout", "embedding.weight"),
        ("heads", "layers.0.attention.head_norm.weight"),
        ("sequence", "layers.0.norm.weight"),
        ("written", ""),
    ):
        said = of_ranks[0][case]
        assert f"RankError: parts disagree in step 1: the gradient of '{name}" in said, (case, said)
        assert "which all 2 ranks of 'tp' hold whole" in said and "SequenceParallel()" in said


def starts_that_differ() -> dict[str, str]:
    rank, said = dist.get_rank(), {}
    torch.manual_seed(rank)
    model, mesh = parts(Llama())
    said["seed"] = told(lambda: offloaded(model, mesh))
    model, mesh = parts()
    model.norm.weight.requires_grad_(rank == 0)
    said["frozen"] = told(lambda: offloaded(model, mesh))
    model, mesh = parts()
    model.more = nn.Linear(1, 1 + rank)
    said["shapes"] = told(lambda: offloaded(model, mesh))
    model, mesh = parts()
    several = list(model.parameters())
    groups = [{"params": several[: 5 + rank], "weight_decay": 0.0}, {"params": several[5 + rank :]}]
    said["groups"] = told(lambda: offloaded(model, mesh, params=groups))
    said["whole"] = told(lambda: offloaded(Llama(), mesh))
    model, mesh = parts()
    model.norm.weight = nn.Parameter(DTensor.from_local(torch.ones(WIDTH), mesh["tp"], [Partial()]))
    said["partial"] = told(lambda: offloaded(model, mesh))
    model, mesh = parts()
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend="eager")
    said["compiled"] = told(lambda: offloaded(model, mesh))
    model, mesh = parts()
    optimizer = offloaded(model, mesh)
    said["skip"] = told(lambda: skipped_behind_clipping(model, optimizer))
    optimizer.close()
    return said


def skipped_behind_clipping(model: nn.Module, optimizer: ot.OffloadOptimizer) -> None:
    optimizer.backward(model(torch.zeros(1, 4, dtype=torch.long)).square().mean())
    optimizer.clip_grad_norm_(1.0)
    optimizer.step(skip=dist.get_rank() == 1)


@pytest.mark.slow
def test_parts_begin_alike(ranks: Run) -> None:
    for said in ranks(2, starts_that_differ):
        assert (
            "parts 1 and 0 of the model differ in the values of 'embedding.weight'" in said["seed"]
        )
        assert "part 1 and part 0 differ in model: ['norm.weight'" in said["frozen"]
        assert "part 1 and part 0 differ in model: ['more.weight'" in said["shapes"]
        assert "part 1 and part 0 differ in groups" in said["groups"]
        assert "'tp' of 2 ranks, and no parameter of the model is divided" in said["whole"]
        assert "'norm.weight' is a DTensor whose values are still to be summed" in said["partial"]
        assert "'layers.0' is compiled, and parameter" in said["compiled"]
        assert "the skips asked for of part 1 are not those of part 0" in said["skip"]


def on_other_ranks() -> list[str]:
    model, mesh = parts(axis="dp", replicas=2)
    some = dist.new_group([0])
    outside = told(lambda: ot.offload(nn.Linear(2, 2), device="cpu", process_group=some).close())
    return [told(lambda: offloaded(model, mesh)), outside]


@pytest.mark.slow
def test_ranks_of_another_axis_are_refused(ranks: Run) -> None:
    """The axis of replicas has as many ranks: they would add gradients of different parts."""
    of_ranks = ranks(4, on_other_ranks)
    for said, _ in of_ranks:
        assert "is a DTensor on the ranks [" in said and "mesh['tp'] of the mesh that" in said
    assert of_ranks[0][1] == "nothing"
    assert all("is not one of the ranks of process_group" in said for _, said in of_ranks[1:])


def rate_of_the_last() -> str:
    model, mesh = parts(replicas=2)
    optimizer = offloaded(model, mesh)
    if dist.get_rank() == 3:
        optimizer.param_groups[0]["lr"] = 0.5
    said = told(lambda: step(model, optimizer))
    optimizer.close()
    return said


@pytest.mark.slow
def test_what_one_replica_of_a_part_does_is_told_to_all(ranks: Run) -> None:
    first, other, replica, last = ranks(4, rate_of_the_last)
    assert "the agreement among the ranks of part 1 are not those of part 0" in first
    assert "hyperparameters of part 1 are not those of part 0" in replica
    assert "hyperparameters of rank 1 are not those of rank 0" in other
    assert other == last


def overflow_of_one() -> tuple[list[Any], bool]:
    """The gradient of a weight that both hold whole overflows on one of them."""
    model, mesh = parts()
    optimizer = offloaded(model, mesh, precision="fp16")
    step(model, optimizer)
    factor = float("inf") if dist.get_rank() else 1.0
    handle = model.norm.weight.register_hook(lambda grad: grad * factor)
    step(model, optimizer)
    report = optimizer.last_step
    assert report is not None
    handle.remove()
    after = step(model, optimizer)
    finite = all(bool(masters.isfinite().all()) for _, masters in optimizer.master_weights())
    optimizer.close()
    return [report.skipped, report.loss_scale, after], finite


@pytest.mark.slow
def test_all_parts_skip_the_overflow_of_one(ranks: Run) -> None:
    (one, finite), (other, also) = ranks(2, overflow_of_one)
    assert one == other and one[0] and finite and also


def loaded(precision: str) -> bool:
    """A state dict has each layer's own part, and DTensors come back in full precision."""
    model, mesh = parts()
    optimizer = offloaded(model, mesh, precision=precision)
    own = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(local(value), local(own[name])), name
    other, _ = parts(Llama())
    given = {name: value.clone() for name, value in other.state_dict().items()}
    model.load_state_dict(given)
    masters = dict(optimizer.master_weights())
    optimizer.close()
    return all(torch.equal(masters[name], local(value)) for name, value in given.items())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_state_dicts_of_parts(ranks: Run, precision: str) -> None:
    assert ranks(2, loaded, precision) == [True, True]


def written(working: str, *, adopt: bool) -> tuple[str, bool]:
    """Each part writes into what it has of one matrix."""
    model, mesh = parts()
    optimizer = offloaded(model, mesh, working=working)
    step(model, optimizer)
    optimizer.synchronize()
    name = "layers.1.attention.q.weight"
    part: Any = model.layers[1].attention.q.weight
    with torch.no_grad():
        part.to_local().fill_(0.5)
    if adopt:
        optimizer.adopt_written_weights()
    adopted = bool((dict(optimizer.master_weights())[name] == 0.5).all())
    said = told(lambda: step(model, optimizer))
    optimizer.close()
    return said, adopted


@pytest.mark.slow
@pytest.mark.parametrize("working", ["device", "host"])
def test_a_part_that_is_written_is_noticed(ranks: Run, working: str) -> None:
    assert ranks(2, written, working, adopt=True) == [("nothing", True)] * 2
    for said, _ in ranks(2, written, working, adopt=False):
        assert "'layers.1.attention.q.weight' was written in place" in said


def timeouts() -> tuple[timedelta, set[timedelta]]:
    device = torch.device("cpu")
    world, own = dist.distributed_c10d._get_default_group(), Ranks.of(None, device)
    given, *made = (
        group._get_backend(device).options._timeout  # type: ignore[attr-defined]
        for group in (world, *own._groups)
    )
    own.close()
    return given, set(made)


@pytest.mark.slow
def test_waits_end_with_the_timeout_of_the_user(ranks: Run) -> None:
    for given, made in ranks(2, timeouts):
        assert made == {given} and given != timedelta(minutes=30)
