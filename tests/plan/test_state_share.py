"""What a plan keeps on the device where `state_on` is "auto": what fits, and no more than helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offloadtrain as ot
from offloadtrain.config.job import Config, load
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan import report
from offloadtrain.plan.automatic import FULL
from offloadtrain.plan.costs.costs import CODEC_BYTES
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import settled
from offloadtrain.runtime.kernels import Layout
from offloadtrain.step.layout.formats import ADAM_MOMENTS, FORMATS
from offloadtrain.step.layout.state_tiers import device_share
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.train.dry_run import check
from tests.plan.test_memory import job as small_job

JOB = "examples/gpt_13b_32gb.toml"
H100 = find("h100")[1]


def job(*overrides: str) -> Config:
    small = ("train.global_batch_tokens=4096", "offload.state=fp32", "offload.state_on=auto")
    return load(JOB, [*small, *overrides])


def planned(machine: Machine = H100, *overrides: str, ranks: int = 1) -> Plan:
    return make(settled(job(*overrides), "h100", machine, ranks), "h100", machine, ranks)


def seconds_of(plan: Plan, share: float) -> float:
    offload = plan.job.offload.replace(state_on={"device": share})
    return make(replace(plan.job, offload=offload), "", plan.machine).prediction.seconds


@pytest.mark.slow
def test_an_empty_device_is_filled_and_the_step_is_faster() -> None:
    plan = planned()
    used, share = sum(plan.device.values()), device_share(plan.placed.spec)
    assert 0.2 < share < 0.35 and plan.job.offload.state.tier == {"device": share}
    one_layer = max(bucket.numel for bucket in plan.placed.spec.buckets) * 14
    assert plan.device_room * FULL - one_layer < used <= plan.device_room * FULL
    assert plan.fits and plan.prediction.seconds < 0.9 * seconds_of(plan, 0.0)
    assert "of the state on the device: 18 of 68 blocks" in report.text(plan)
    assert report.as_json(plan)["state_on_device"] == share


@pytest.mark.slow
def test_no_more_is_kept_than_makes_the_step_faster() -> None:
    """With many tokens the forward hides most of Adam: the last share makes no difference."""
    tokens = "train.global_batch_tokens=16384", "train.micro_batch=16"
    machine = replace(H100, numa_nodes=1)  # with the memory of half the host it waits for more
    plan, filled = planned(machine, *tokens), make(job(*tokens), "h100", machine)
    assert device_share(plan.placed.spec) < 0.95 * device_share(filled.placed.spec)
    assert plan.prediction.seconds <= 1.003 * filled.prediction.seconds


@pytest.mark.slow
def test_a_limit_bounds_it() -> None:
    limit = 40 << 30
    plan = planned(H100, f"offload.device_memory_limit={limit}")
    device_bytes = sum(plan.placed.device().values())
    assert limit - (3 << 30) < device_bytes <= limit and plan.placed.spec.has_state_on(Tier.DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "overrides"),
    [
        ("rtx5090", ()),  # its 32 GB are full of weights
        # Lion's narrow state is decoded in plain torch there, slower than on the host.
        ("h100", ("offload.state=int8", "optim.name=lion", "optim.betas=[0.9,0.99]")),
    ],
)
def test_where_there_is_no_room_or_no_gain_all_is_on_the_host(
    machine: str, overrides: tuple[str, ...]
) -> None:
    assert planned(find(machine)[1], *overrides).job.offload.state.tier == "host"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_engine_lays_out_what_was_planned_and_its_program_is_proved(ranks: int) -> None:
    """13B at its real size."""
    plan = planned(ranks=ranks)
    assert 0 < device_share(plan.placed.spec) <= 1
    assert "free of races" in check(plan)


@pytest.mark.slow
def test_ranks_without_gpus_are_as_many_as_are_asked_for() -> None:
    """The machine file of a CPU has one."""
    two = small_job(offload__state_on="auto")
    assert settled(two, "cpu2", find("cpu2")[1], 2).offload.state.tier == "host"


@pytest.mark.slow
def test_sums_on_the_device_move_six_bytes_per_parameter_for_any_number_of_microbatches() -> None:
    """Rounded, four."""
    tokens = "train.global_batch_tokens=65536", "offload.state_on=host"
    host, device = (
        planned(H100, *tokens, f"offload.sums_on={tier}") for tier in ("host", "device")
    )
    keys = "offload.sums_on=device", "offload.sums_down=working"
    rounded = planned(H100, *tokens, *keys)
    params = sum(bucket.numel for bucket in host.placed.spec.buckets)
    plans = (host, device, rounded)
    moved = [plan.prediction.d2h_bytes + plan.prediction.h2d_bytes for plan in plans]
    assert moved == [34 * params, 6 * params, 4 * params]
    assert rounded.prediction.dram_bytes == 28 * params
    assert rounded.needed["gradients"] == 2 * params < device.needed["gradient sums"]
    assert "free of races" in check(rounded)
    # Without the 16 sums of 10 bytes: Adam's 30, of fp32 sums.
    assert device.prediction.dram_bytes == 30 * params < host.prediction.dram_bytes / 6
    assert device.fits and device.placed.device()["gradient sums"] == 4 * params


class Counted(TorchDispatchMode):
    """Bytes that operations read and write; views move none."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        moves = not func.is_view and not str(func).startswith(("aten.empty", "aten.alias"))
        tensors = tree_leaves((args, options, out)) if moves else []
        self.nbytes += sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("name", CODEC_BYTES)
def test_bytes_of_a_narrow_update_on_the_device_are_those_of_its_operations(name: str) -> None:
    state_format, numel, rule = FORMATS[name], 1 << 17, ot.AdamW()
    state = tuple(
        torch.zeros(field.numel(numel), dtype=getattr(torch, field.dtype or "bfloat16"))
        for field in state_format.fields(ADAM_MOMENTS)
    )
    scalars = rule.scalars(rule.defaults(), step=1, grad_scale=1.0, seed=0)
    grad, layout = torch.randn(numel).bfloat16(), Layout.of_one(numel)
    with Counted() as counted:
        rule._update_by_codec(state_format, state, grad, None, layout, scalars, None)
    assert counted.nbytes / numel == pytest.approx(CODEC_BYTES[name], rel=0.05)
