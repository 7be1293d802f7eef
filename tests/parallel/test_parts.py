"""Ranks that hold parts of one model: what differs among them is named on all of them, and state
dicts and written weights are those of each part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import parallelize_module

import offloadtrain as ot
from offloadtrain.config.offload import OptionError
from offloadtrain.runtime.tensor_parts import kept_by_columns, local
from offloadtrain.step.program.operations import Kind as Op
from offloadtrain.step.program.operations import Launch
from offloadtrain.step.program.program import Program
from tests.distributed.conftest import Run
from tests.parallel.mesh_runs import run_on
from tests.parallel.messages import assert_messages, message_of, warnings_of
from tests.parallel.models import (
    EXPERTS,
    HEAD,
    KINDS,
    VOCABULARY,
    WIDTH,
    Attention,
    Llama,
    divide_llama,
    outside_of_layers,
    sequence_parallel,
    with_experts,
)
from tests.step.specs import chain


class WithHeadNorm(Attention):
    """Norms its queries head by head, of each part's heads only."""

    def __init__(self) -> None:
        super().__init__()
        self.head_norm = nn.RMSNorm(HEAD)

    def project(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().project(x)
        return [self.head_norm(q), k, v]


class WithDropout(Llama):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * F.dropout(torch.ones(VOCABULARY), 0.5)


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def in_parts(model: Any = None, axis: str = "tp", replicas: int = 1) -> tuple[Any, DeviceMesh]:
    """Return a model in two parts, by the mesh's axis, and the mesh."""
    mesh = mesh_of(replicas, 2)
    if model is None:
        torch.manual_seed(0)
        model = Llama()
    divide_llama(model, mesh[axis])
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


def message_of_step(model: nn.Module, mesh: Any, seed: int = 7) -> str:
    optimizer = offloaded(model, mesh)
    message = message_of(lambda: step(model, optimizer, seed))
    optimizer.close()
    return message


def gradients_that_differ() -> dict[str, str]:
    rank, messages = dist.get_rank(), {}
    messages["batches"] = message_of_step(*in_parts(), seed=rank)
    torch.manual_seed(0)
    model, mesh = in_parts(WithDropout())
    torch.manual_seed(rank)
    messages["dropout"] = message_of_step(model, mesh)
    torch.manual_seed(0)
    model = Llama()
    for layer in model.layers:
        layer.attention = WithHeadNorm()
    messages["heads"] = message_of_step(*in_parts(model))
    torch.manual_seed(0)
    model = Llama()
    styles = sequence_parallel()
    del styles["norm"]
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], styles)
    parallelize_module(model, mesh["tp"], outside_of_layers())
    messages["sequence"] = message_of_step(model, mesh)
    model, mesh = in_parts()
    optimizer = offloaded(model, mesh)
    if rank:
        with torch.no_grad():
            model.norm.weight.mul_(1.5)
        optimizer.adopt_written_weights()
    messages["written"] = message_of(lambda: step(model, optimizer))
    optimizer.close()
    return messages


@pytest.mark.slow
def test_gradients_of_what_all_parts_hold_must_be_the_same(ranks: Run) -> None:
    of_ranks = ranks(2, gradients_that_differ)
    assert of_ranks[0] == of_ranks[1]
    names = {
        "batches": "",
        "dropout": "embedding.weight",
        "heads": "layers.0.attention.head_norm.weight",
        "sequence": "layers.0.norm.weight",
        "written": "",
    }
    pattern = (
        "(?s)^RankError: parts disagree in step 1: the gradient of '{}.*"
        r"which all 2 ranks of 'tp' hold whole.*SequenceParallel\(\)"
    )
    assert_messages(of_ranks, {case: pattern.format(name) for case, name in names.items()})


def starts_that_differ() -> dict[str, str]:
    rank, messages = dist.get_rank(), {}

    def tried(name: str, model: nn.Module, mesh: Any, rule: Any = None, **options: Any) -> None:
        rule = rule or ot.AdamW(lr=1e-2)
        messages[name] = message_of(
            lambda: ot.offload(model, rule, device="cpu", mesh=mesh, **options).close()
        )

    torch.manual_seed(rank)
    tried("seed", *in_parts(Llama()))
    model, mesh = in_parts()
    model.norm.weight.requires_grad_(rank == 0)
    tried("frozen", model, mesh)
    model, mesh = in_parts()
    model.more = nn.Linear(1, 1 + rank)
    tried("shapes", model, mesh)
    model, mesh = in_parts()
    params = list(model.parameters())
    groups = [{"params": params[: 5 + rank], "weight_decay": 0.0}, {"params": params[5 + rank :]}]
    tried("groups", model, mesh, params=groups)
    tried("undivided", Llama(), mesh)
    model, mesh = in_parts()
    model.norm.weight = nn.Parameter(DTensor.from_local(torch.ones(WIDTH), mesh["tp"], [Partial()]))
    tried("partial", model, mesh)
    model, mesh = in_parts()
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend="eager")
    tried("compiled", model, mesh)
    model, mesh = in_parts()
    alone = dist.new_group([rank], use_local_synchronization=True)
    tried("no mesh", model, None, process_group=alone)
    tried("muon", *in_parts(), ot.Muon())
    tried("lamb", *in_parts(), ot.LAMB())
    model, mesh = in_parts()
    optimizer = offloaded(model, mesh)
    optimizer.backward(model(torch.zeros(1, 4, dtype=torch.long)).square().mean())
    optimizer.clip_grad_norm_(1.0)
    messages["skip"] = message_of(lambda: optimizer.step(skip=rank == 1))
    optimizer.close()
    return messages


@pytest.mark.slow
def test_parts_that_do_not_begin_alike_are_refused(ranks: Run) -> None:
    assert_messages(
        ranks(2, starts_that_differ),
        {
            "seed": "parts 1 and 0 of the model differ in the values of 'embedding.weight'",
            "frozen": r"part 1 and part 0 differ in model: \['norm.weight'",
            "shapes": r"part 1 and part 0 differ in model: \['more.weight'",
            "groups": "part 1 and part 0 differ in groups",
            "undivided": "'tp' of 2 ranks, and no parameter of the model is divided",
            "partial": "'norm.weight' is a DTensor whose values are still to be summed",
            "compiled": "'layers.0' is compiled, and parameter",
            "no mesh": "'layers.0.attention.q.weight' is a DTensor on 2 ranks, and 1 hold",
            "muon": "is a part of a tensor, and Muon updates whole ones",
            "lamb": "is a part of a tensor, and LAMB updates whole ones",
            "skip": "the skips asked for of part 1 and of part 0 differ",
        },
    )


def wrong_experts() -> dict[str, str]:
    messages, ep = {}, mesh_of(1, 2, names=("dp", "ep"))
    dense = replace(EXPERTS, num_experts=0, router_aux_loss_coef=0.0)
    for name, model, mesh in (
        ("indivisible", with_experts(replace(EXPERTS, num_experts=3)), ep),
        ("axes", with_experts(), mesh_of(2, names=("dp",))),
        ("none", with_experts(dense), ep),
    ):
        messages[name] = message_of(lambda m=model, mesh=mesh: ot.expert_parallel(m, mesh))
    divided = with_experts()
    ot.expert_parallel(divided, ep)
    messages["twice"] = message_of(lambda: ot.expert_parallel(divided, ep))
    for name, model, rule, mesh in (
        ("no mesh", divided, ot.AdamW(), None),
        ("muon", divided, ot.Muon(), ep),
        ("tp", with_experts(), ot.AdamW(), mesh_of(1, 2, names=("tp", "ep"))),
        ("undivided", with_experts(), ot.AdamW(), ep),
    ):
        messages[name] = message_of(
            lambda m=model, rule=rule, mesh=mesh: ot.offload(m, rule, device="cpu", mesh=mesh)
        )
    late = with_experts()
    optimizer = ot.offload(late, device="cpu")
    messages["late"] = message_of(lambda: ot.expert_parallel(late, ep))
    optimizer.close()
    return messages


@pytest.mark.slow
def test_experts_that_cannot_be_divided_are_refused(ranks: Run) -> None:
    assert_messages(
        ranks(2, wrong_experts),
        {
            "indivisible": "num_experts = 3 cannot be divided among the 2 ranks",
            "axes": "mesh has the axes 'dp': experts take 'ep'",
            "none": "has no experts",
            "twice": "divided already",
            "no mesh": r"are divided among 2 ranks, and offload\(\) knows of 1",
            "muon": "Muon updates whole ones",
            "tp": "'tp', 'ep': experts take 'ep'",
            "undivided": "no experts of the model are divided along it: call ot.exp",
            "late": r"expert_parallel after offload\(\)",
        },
    )


def overflow_on_rank_1() -> tuple[list[Any], bool]:
    """The gradient of a weight that both hold whole overflows on one of them."""
    model, mesh = in_parts()
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
def test_all_parts_skip_a_step_that_overflows_on_one(ranks: Run) -> None:
    (first, finite), (second, also_finite) = ranks(2, overflow_on_rank_1)
    assert first == second and first[0] and finite and also_finite


def load_parts(precision: str) -> bool:
    """A state dict has each layer's own part, and DTensors come back in full precision."""
    model, mesh = in_parts()
    optimizer = offloaded(model, mesh, precision=precision)
    assert_state_dict_is_of_parts(model)
    other, _ = in_parts(Llama())
    weights = {name: value.clone() for name, value in other.state_dict().items()}
    model.load_state_dict(weights)
    masters = dict(optimizer.master_weights())
    optimizer.close()
    return all(torch.equal(masters[name], local(value)) for name, value in weights.items())


def assert_state_dict_is_of_parts(model: nn.Module) -> None:
    """A DTensor has no address of its own: those of one shape are not one tensor."""
    params = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(local(value), local(params[name])), name


def state_dict_of_experts() -> None:
    model, mesh = with_experts(), mesh_of(1, 2, names=("dp", "ep"))
    ot.expert_parallel(model, mesh)
    optimizer = ot.offload(model, device="cpu", mesh=mesh, precision="fp32")
    assert_state_dict_is_of_parts(model)
    optimizer.close()


@pytest.mark.slow
def test_state_dicts_have_the_part_of_each_layer(ranks: Run) -> None:
    for precision in ("bf16", "fp16"):
        assert ranks(2, load_parts, precision) == [True, True]
    ranks(2, state_dict_of_experts)


def write_into_a_part(working: str, *, adopt: bool) -> tuple[str, bool]:
    """Each part writes into what it has of one matrix."""
    model, mesh = in_parts()
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
    message = message_of(lambda: step(model, optimizer))
    optimizer.close()
    return message, adopted


@pytest.mark.slow
@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("working", ["device", "host"])
def test_a_part_that_is_written_is_noticed(ranks: Run, working: str, adopt: bool) -> None:
    assert ranks(2, write_into_a_part, working, adopt=adopt) == [("nothing", True)] * 2


def warnings_of_columns(by_columns: bool) -> tuple[list[str], str]:
    """The warnings about a plan whose `RowwiseParallel` divides weights by columns."""
    model, mesh = in_parts()
    for layer in model.layers if by_columns else ():
        for module in (layer.attention.o, layer.down):
            kept_by_columns(module)
    with warnings_of("offloadtrain.engine") as messages:
        ot.offload(model, device="cpu", mesh=mesh).close()
    return messages, ""


def warnings_of_experts(state: str) -> tuple[list[str], str]:
    """The warnings about a state format, and the error of a save."""
    model, mesh = with_experts(), mesh_of(1, 2, names=("dp", "ep"))
    ot.expert_parallel(model, mesh)
    with warnings_of("offloadtrain.engine") as messages:
        optimizer = ot.offload(model, device="cpu", mesh=mesh, state=state, precision="bf16")
    error = message_of(optimizer.flat_states) if messages else ""
    optimizer.close()
    return messages, error


@pytest.mark.slow
def test_a_division_that_no_checkpoint_can_name_is_warned_of_at_once(ranks: Run) -> None:
    assert ranks(2, warnings_of_columns, True) == [([], "")] * 2
    (((message,), _), *others) = ranks(2, warnings_of_columns, False)
    assert others == [([], "")], "one of the ranks that hold the parts says so"
    assert "no checkpoint of them can be saved: 'layers.0.attention.o.weight'" in message
    assert ranks(2, warnings_of_experts, "split16") == [([], "")] * 2
    (((message,), error), *others) = ranks(2, warnings_of_experts, "int8")
    assert others == [([], "")]
    why = error.removeprefix("PartError: ")
    assert message == f"these weights train, and no checkpoint of them can be saved: {why}"
    assert "state = 'int8' of 'blocks.0.mlp.experts" in error and "'split16'" in error


# Block inputs in parts among the ranks of tensor parallel (ZeRO-R Pa and Pa+cpu).


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "tier"), [("recompute", "device"), ("offload", "host")])
def test_block_inputs_take_their_part_of_the_bytes(ranks: Run, activation: str, tier: str) -> None:
    mesh, kind = {"dp": 1, "tp": 2}, KINDS["llama"]
    options = {"activation": activation}
    plain = run_on(ranks, "llama", mesh, options)
    divided = run_on(ranks, "llama", mesh, options | {"partition_activations": True})
    half = 4 * kind.rows * kind.length * WIDTH * 2 // 2  # of four layers, in bf16
    for run, other in zip(plain, divided, strict=True):
        assert other.memory["block inputs", tier] == half
        assert other.comm_bytes - run.comm_bytes == kind.microbatches * half
        if activation == "offload":
            assert run.memory["block inputs", tier] == 2 * half


@pytest.mark.parametrize("activation", ["recompute", "selective", "offload"])
def test_what_the_ranks_do_not_divide_stays_whole(activation: str) -> None:
    program = Program(replace(chain(1, activation=activation), input_parts=3), part=2)
    for number, (numel, length, gathers) in enumerate([(100, 100, 0), (99, 33, 1)]):
        done = program.activation_saved(number, numel, "bfloat16")
        done += program.activation_needed(number) + program.activation_dropped(number)
        launches = [op for op in done if isinstance(op, Launch)]
        (source,), (buffer,) = launches[0].reads, launches[0].writes
        assert (source.lo, source.hi, buffer.hi) == (numel - length, numel, length)
        assert sum(op.kind is Op.GATHER_INPUT for op in launches) == gathers


def inputs_that_differ() -> str:
    """Each rank has inputs of its own, as with sequence parallel."""
    model, mesh = in_parts()
    options: dict[str, Any] = {"activation": "offload", "partition_activations": True}
    optimizer = ot.offload(model, device="cpu", mesh=mesh, **options)
    message = message_of(lambda: model(torch.full((2, 4), dist.get_rank())))
    optimizer.close()
    return message


@pytest.mark.slow
def test_block_inputs_that_differ_are_refused(own_ranks: Run) -> None:
    for message in own_ranks(2, inputs_that_differ):
        assert message.startswith("ActivationError") and "sequence parallel" in message
        assert "differs among the 2 ranks of 'tp'" in message


def test_block_inputs_cannot_be_divided_without_ranks_of_parts() -> None:
    with pytest.raises(OptionError, match=r"partition_activations .* an axis 'tp'"):
        ot.offload(Llama(), device="cpu", activation="offload", partition_activations=True)
    with pytest.raises(OptionError, match=r"partition_activations .* 'keep'"):
        ot.offload(Llama(), device="cpu", partition_activations=True)
