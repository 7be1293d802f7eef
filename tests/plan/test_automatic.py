"""What a job leaves to its plan: layers that run again, state on the device, where microbatches are
summed, and how updates are made."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offloadtrain as ot
from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config, load
from offloadtrain.config.offload import OptionError
from offloadtrain.events import schema
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.parallel.pipeline import search as pipeline_search
from offloadtrain.plan import report
from offloadtrain.plan.automatic import FULL
from offloadtrain.plan.costs.costs import CODEC_BYTES
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search import suggest
from offloadtrain.plan.search.suggest import nearest, settled, single_changes
from offloadtrain.runtime.kernels import Layout
from offloadtrain.step.layout.block_spec import BlockSpec
from offloadtrain.step.layout.formats import ADAM_MOMENTS, FORMATS
from offloadtrain.step.layout.placement import lay_out
from offloadtrain.step.layout.state_tiers import device_share, sums_bytes, sums_share
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.train.dry_run import check, preview
from tests.plan.test_memory import job as tiny_job
from tests.train.small_job import events_of, run, small_job, tensor_hashes

RTX4090 = find("rtx4090")[1]
AUTO = ("offload.activation=recompute", "offload.recompute_blocks=auto")


def job(*overrides: str) -> Config:
    return load("offloadtrain/cli/jobs/llama_1b.toml", ["train.micro_batch=8", *overrides])


def with_count(config: Config, count: Any) -> Config:
    return replace(config, offload=config.offload.replace(recompute_blocks=count))


def planned(config: Config, machine: Machine = RTX4090) -> Plan:
    return make(config, "", machine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation", ["recompute", pytest.param("offload", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "gpu_memory",
    ["10 GiB", "16 GiB", *(pytest.param(n, marks=pytest.mark.slow) for n in ("24 GiB", "80 GiB"))],
)
def test_the_fewest_that_fit_run_again(activation: str, gpu_memory: str) -> None:
    config = job(f"offload.activation={activation}", "offload.recompute_blocks=auto")
    machine = replace(RTX4090, gpu_memory=gpu_memory)
    plan = planned(config, machine)
    count, layers = plan.job.offload.activations.recompute_blocks, config.model.num_layers
    assert isinstance(count, int)
    used = [sum(planned(with_count(config, n), machine).device.values()) for n in range(layers + 1)]
    fitting = [n for n in range(layers + 1) if used[n] <= FULL * plan.device_room]
    assert count == min(fitting, default=layers)
    assert plan.fits == bool(fitting)


@pytest.mark.slow
def test_each_layer_that_is_kept_makes_the_step_faster_and_takes_as_much_more() -> None:
    config = job("offload.activation=recompute")
    counts = [None, *range(config.model.num_layers, -1, -1)]
    plans = [planned(with_count(config, count)) for count in counts]
    assert plans[0].device == plans[1].device
    assert plans[0].prediction.seconds == pytest.approx(plans[1].prediction.seconds)
    rates = [plan.prediction.tokens_per_s for plan in plans[1:]]
    assert rates == sorted(rates) and rates[-1] > 1.25 * rates[0]
    bytes_of = [sum(plan.device.values()) for plan in plans[2:]]
    more = {two - fewer for fewer, two in pairwise(bytes_of)}
    assert len(more) == 1 and more.pop() > 0
    keep = planned(job("offload.activation=keep"))
    assert plans[-1].device == keep.device
    assert plans[-1].prediction.seconds == pytest.approx(keep.prediction.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["exact", "delayed"])
def test_the_step_of_some_recomputed_is_between(update: str) -> None:
    """Of very many layers a few are simulated where they are alike."""
    config = load(
        "offloadtrain/cli/jobs/gpt_13b_32gb.toml",
        ["offload.activation=recompute", f"offload.update={update}"],
    )
    machine = find("h200")[1]
    some, none, every = (
        make(with_count(config, count), "", machine).prediction.seconds for count in (20, 0, None)
    )
    assert none <= some * (1 + 1e-9) and some <= every * (1 + 1e-9) and none < every


@pytest.mark.slow
def test_where_state_is_open_too_the_fastest_of_three_is_taken() -> None:
    config = load("offloadtrain/cli/jobs/gpt_13b_32gb.toml", [*AUTO, "offload.state_on=auto"])
    machine = find("h100")[1]
    plan = make(config, "", machine)
    alone = replace(config, offload=config.offload.replace(state_on="host"))
    full = with_count(config, None)
    for other in (alone, full):
        seconds = make(other, "", machine).prediction.seconds
        assert plan.prediction.seconds <= seconds * 1.001
    assert plan.has_room


@pytest.mark.slow
def test_a_job_that_keeps_too_much_is_told_the_number() -> None:
    config = job("offload.activation=keep")
    assert not planned(config).fits
    changes = nearest(config, "", RTX4090, 1)
    [recomputing] = [
        change for change in changes if change.keys.get("offload.activation") == "recompute"
    ]
    count = recomputing.keys["offload.recompute_blocks"]
    assert (
        recomputing.plan.job.offload.activations.recompute_blocks == count < config.model.num_layers
    )
    assert f"offload.recompute_blocks={count}" in recomputing.text and recomputing.plan.has_room


@pytest.mark.slow
def test_a_job_that_recomputes_too_much_is_told_to_leave_it_open() -> None:
    config = planned(job("offload.activation=recompute")).job
    now = planned(config).prediction.tokens_per_s
    rates = {
        change.text: change.plan.prediction.tokens_per_s
        for change in single_changes(config, "", RTX4090, 1)
    }
    assert rates["offload.recompute_blocks=auto"] > 1.1 * now
    of_keep = single_changes(job("offload.activation=keep", "train.micro_batch=1"), "", RTX4090, 1)
    assert not any("offload.recompute_blocks" in change.keys for change in of_keep)


def test_it_is_settled_before_the_engine_sees_it() -> None:
    config = settled(job(*AUTO), "", RTX4090, 1)
    assert type(config.offload.activations.recompute_blocks) is int
    assert (
        config.offload.activations.recompute_blocks
        == planned(job(*AUTO)).job.offload.activations.recompute_blocks
    )
    with pytest.raises(OptionError, match="'auto' is decided by the plan"):
        job(*AUTO).offload.activations.recomputed_of([1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("open_", [AUTO, ("device.placement=auto",)])
def test_where_nothing_runs_again_no_input_is_divided(open_: tuple[str, ...]) -> None:
    """What is settled is checked once more where it is used."""
    parts = ("ranks.tensor=2", "model.num_heads=4", "train.sample_tokens=0")
    divides = ("offload.activation=recompute", "offload.partition_activations=true")
    config = settled(job(*parts, *divides, *open_), "", find("h100")[1], 2)
    assert not config.offload.activations.recomputes and not config.offload.activations.partition
    assert not [*config.offload.problems()]


@pytest.mark.slow
def test_the_report_has_the_number() -> None:
    plan = planned(job(*AUTO))
    count = plan.job.offload.activations.recompute_blocks
    assert f"the forward of {count} of 24 blocks runs again" in report.text(plan)
    assert report.as_json(plan)["recomputed_blocks"] == count
    every = planned(job("offload.activation=recompute"))
    assert "runs again" not in report.text(every)
    assert report.as_json(every)["recomputed_blocks"] == 24


def test_the_engine_lays_out_what_is_planned_and_its_program_is_proved() -> None:
    assert "proved" in check(planned(job(*AUTO)))


def test_selective_recompute_is_planned_between_keeping_and_recompute() -> None:
    """Memory from a trace of the layers; no product runs again."""
    h100 = find("h100")[1]
    modes = ("keep", "selective", "recompute")
    keep, selective, again = (planned(job(f"offload.activation={mode}"), h100) for mode in modes)
    saved = [plan.activations.saved for plan in (keep, selective, again)]
    assert saved[2] * 2 < saved[1] < saved[0] * 0.8
    seconds = [plan.prediction.seconds for plan in (keep, selective, again)]
    assert seconds[0] < seconds[1] < seconds[2]
    assert keep.prediction.forward_again == pytest.approx(0.0, abs=1e-9)
    assert selective.prediction.forward_again == pytest.approx(0.0, abs=1e-9)
    assert again.prediction.forward_again > 0.7
    assert "with recompute of 0 % of the forward" in report.text(selective)
    assert f"of {100 * again.prediction.forward_again:.0f} % of the forward" in report.text(again)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
def test_compiled_layers_are_planned_by_their_budget() -> None:
    h100 = find("h100")[1]

    def plan(*keys: str) -> Plan:
        return planned(job("offload.compile_blocks=true", *keys), h100)

    selective = "offload.activation=selective"
    shares = (0.0, 0.25, 0.5, 1.0)
    plans = [plan(selective, f"offload.activation_budget={share}") for share in shares]
    keep, again = plan("offload.activation=keep"), plan("offload.activation=recompute")
    low, high = again.activations.saved, keep.activations.saved
    saved = [each.activations.saved for each in plans]
    assert saved == sorted(saved) and saved[0] == pytest.approx(low, rel=0.01)
    assert saved[-1] == high < planned(job("offload.activation=keep"), h100).activations.saved
    for share, each in zip(shares, plans, strict=True):
        rest = (1 - share) * plans[0].prediction.forward_again
        assert each.prediction.forward_again == pytest.approx(rest, abs=1e-9)
    # Without a budget the last product runs again, too.
    assert 0.7 < plans[0].prediction.forward_again < again.prediction.forward_again
    assert plan(selective).activations == plans[2].activations


# ---- state on the device

LARGE = "examples/gpt_13b_32gb.toml"
H100 = find("h100")[1]


def large_job(*overrides: str) -> Config:
    small = ("train.global_batch_tokens=4096", "offload.state=fp32", "offload.state_on=auto")
    return load(LARGE, [*small, *overrides])


def planned_large(machine: Machine = H100, *overrides: str, ranks: int = 1) -> Plan:
    return make(settled(large_job(*overrides), "h100", machine, ranks), "h100", machine, ranks)


def seconds_of(plan: Plan, share: float) -> float:
    offload = plan.job.offload.replace(state_on={"device": share})
    return make(replace(plan.job, offload=offload), "", plan.machine).prediction.seconds


@pytest.mark.slow
def test_an_empty_device_is_filled_and_the_step_is_faster() -> None:
    plan = planned_large()
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
    plan, filled = planned_large(machine, *tokens), make(large_job(*tokens), "h100", machine)
    assert device_share(plan.placed.spec) < 0.95 * device_share(filled.placed.spec)
    assert plan.prediction.seconds <= 1.003 * filled.prediction.seconds


@pytest.mark.slow
def test_a_limit_bounds_it() -> None:
    limit = 40 << 30
    plan = planned_large(H100, f"offload.device_memory_limit={limit}")
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
    assert planned_large(find(machine)[1], *overrides).job.offload.state.tier == "host"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_engine_lays_out_what_was_planned_and_its_program_is_proved(ranks: int) -> None:
    """13B at its real size."""
    plan = planned_large(ranks=ranks)
    assert 0 < device_share(plan.placed.spec) <= 1
    assert "free of races" in check(plan)


@pytest.mark.slow
def test_ranks_without_gpus_are_as_many_as_are_asked_for() -> None:
    """The machine file of a CPU has one."""
    two = tiny_job(offload__state_on="auto")
    assert settled(two, "cpu2", find("cpu2")[1], 2).offload.state.tier == "host"


@pytest.mark.slow
def test_sums_on_the_device_move_six_bytes_per_parameter_for_any_number_of_microbatches() -> None:
    """Rounded, four."""
    tokens = "train.global_batch_tokens=65536", "offload.state_on=host"
    host, device = (
        planned_large(H100, *tokens, f"offload.sums_on={tier}") for tier in ("host", "device")
    )
    keys = "offload.sums_on=device", "offload.sums_down=working"
    rounded = planned_large(H100, *tokens, *keys)
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
def test_bytes_of_a_narrow_update_on_the_device_are_those_of_its_operations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
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


# ---- where microbatches are summed

MANY = ("model.num_layers=8", "offload.state=int8", "train.grad_accum_steps=32",
         "train.micro_batch=1", "train.global_batch_tokens=0")  # fmt: skip


def accumulating_job(*overrides: str) -> Config:
    return jobs.load("offloadtrain/cli/jobs/llama_1b.toml", [*MANY, *overrides])


def planned_on_h100(config: Config, machine: Machine = H100) -> Plan:
    return make(config, "", machine)


def with_memory(gpu: str = "80 GiB", host: str = "2 TiB") -> Machine:
    return replace(H100, gpu_memory=gpu, host_memory=host)


def test_many_microbatches_are_summed_on_a_device_that_has_room() -> None:
    plan = planned_on_h100(accumulating_job("offload.sums_on=auto"))
    on_host, on_device = (
        planned_on_h100(accumulating_job(f"offload.sums_on={tier}")) for tier in ("host", "device")
    )
    assert (plan.job.offload.gradients.sums_tier, plan.job.offload.gradients.sums_dtype) == (
        "device",
        "fp32",
    )
    assert plan.prediction == on_device.prediction
    assert plan.prediction.tokens_per_s > 1.03 * on_host.prediction.tokens_per_s
    assert "microbatches are summed on the device" in report.text(plan)


def _gpu_between(share: float) -> Machine:
    """Return a machine whose GPU, 95 % full, has room for so large a share of the sums."""
    on_host, on_device = (
        planned_on_h100(accumulating_job(f"offload.sums_on={tier}")) for tier in ("host", "device")
    )
    used, with_sums = (sum(plan.device.values()) for plan in (on_host, on_device))
    room = int((used + share * (with_sums - used)) / FULL)
    return with_memory(gpu=f"{room + H100.gpu_reserved_bytes} B")


def test_as_many_are_on_the_device_as_it_has_room_for() -> None:
    """The largest share, to a hundredth, where that is faster; and the program is proved."""
    machine = _gpu_between(0.6)
    plan = planned_on_h100(accumulating_job("offload.sums_on=auto"), machine)
    share = plan.job.offload.gradients.device_share
    assert 0.5 < share < 0.65 and plan.has_room
    assert plan.device["gradient sums"] == sums_bytes(plan.placed.spec, share)
    more = planned_on_h100(
        accumulating_job(f"offload.sums_on={{device={share + 0.05:.2f}}}"), machine
    )
    assert not more.has_room
    on_host = planned_on_h100(accumulating_job(), machine)
    assert plan.prediction.tokens_per_s > 1.03 * on_host.prediction.tokens_per_s
    of_host = f"({100 * sums_share(plan.placed.spec):.0f} % of the sums) and on the host"
    assert f"microbatches are summed on the device {of_host}" in report.text(plan)
    assert "free of races" in check(plan)


def test_where_sums_and_state_compete_for_the_device_the_plan_weighs_them() -> None:
    """Neither all sums with what state then fits, nor the reverse, is faster by more than what a
    plan is accurate to."""
    machine = _gpu_between(0.6)
    keys = ("offload.state_on=auto", "train.grad_accum_steps=8")
    plan = planned_on_h100(accumulating_job("offload.sums_on=auto", *keys), machine)
    assert plan.has_room
    for sums_on in ("host", "{device=0.5}", "{device=0.6}"):
        other = planned_on_h100(accumulating_job(f"offload.sums_on={sums_on}", *keys), machine)
        if other.has_room:
            assert plan.prediction.tokens_per_s * 1.03 >= other.prediction.tokens_per_s, sums_on


def test_they_stay_on_the_host_where_the_device_has_no_room_for_their_sums() -> None:
    machine = _gpu_between(0.0)
    decided = planned_on_h100(
        accumulating_job("offload.sums_on=auto", "offload.sums_down=working"), machine
    )
    assert (decided.job.offload.gradients.sums_tier, decided.job.offload.gradients.sums_dtype) == (
        "host",
        "fp32",
    )
    assert decided.fits and "summed on the device" not in report.text(decided)


def _with_room_for_all_sums_or_activations() -> tuple[tuple[str, ...], Machine]:
    """Return keys of a job whose sums fit on the GPU if the forward of all layers runs again, and
    on the host if they are rounded; and the machine."""
    keys = ("offload.sums_down=working", "offload.activation=recompute", "train.micro_batch=4")
    all_again = planned_on_h100(accumulating_job("offload.sums_on=device", *keys))
    room = int(sum(all_again.device.values()) / FULL) + H100.gpu_reserved_bytes
    return keys, replace(_host_between(*keys), gpu_memory=f"{room} B")


@pytest.mark.slow
def test_a_job_that_does_not_fit_is_told_the_share_with_which_it_is_fastest() -> None:
    _, machine = _with_room_for_all_sums_or_activations()
    config = accumulating_job("train.micro_batch=4", "offload.working=host")
    (change,) = (
        change
        for change in nearest(config, "", machine, 1)
        if change.keys.get("offload.activation") == "recompute"
    )
    share = change.plan.job.offload.gradients.device_share
    assert 0 < share < 1 and f"offload.sums_on={{device={share}}}" in change.text
    assert "offload.recompute_blocks=6" in change.text and change.plan.fits


def test_where_no_layer_runs_again_activations_are_kept_by_name() -> None:
    config, machine = job("offload.activation=offload"), replace(RTX4090, gpu_memory="80 GiB")
    keys = {"offload.activation": "recompute"}
    change = suggest.Change(keys, planned(suggest.applied(config, keys), machine))
    less = suggest._with_less_recompute(config, change, "", machine, 1, None)
    assert less.keys == {"offload.activation": "keep"} and less.plan.placed.recomputed == 0


def test_the_least_share_with_which_the_host_has_room_keeps_most_activations() -> None:
    """Fewer sums on the device leave room for layers whose forward does not run again."""
    keys, machine = _with_room_for_all_sums_or_activations()
    keys = (*keys, "offload.recompute_blocks=auto")
    plan = planned_on_h100(accumulating_job("offload.sums_on=auto", *keys), machine)
    all_sums = planned_on_h100(accumulating_job("offload.sums_on=device", *keys), machine)
    assert plan.fits and 0 < plan.job.offload.gradients.device_share < 1
    assert plan.placed.recomputed < all_sums.placed.recomputed
    assert plan.prediction.tokens_per_s > all_sums.prediction.tokens_per_s


def test_a_step_of_one_microbatch_keeps_the_host() -> None:
    assert planned_on_h100(
        accumulating_job("offload.sums_on=auto", "train.grad_accum_steps=1")
    ).job.offload.gradients.sums_tier == ("host")


def _host_between(*keys: str) -> Machine:
    """Return a machine whose host has room for 16-bit gradients and none for fp32 sums."""
    on_host = ("offload.sums_on=host", "offload.sums_down=fp32")
    narrow = ("offload.sums_on=device", "offload.sums_down=working")
    jobs_of_both = (accumulating_job(*keys, *some) for some in (on_host, narrow))
    wide, less = (max(planned_on_h100(config).host_peaks.values()) for config in jobs_of_both)
    assert less < wide
    machine = with_memory(host="1 TiB")
    room = planned_on_h100(accumulating_job(), machine).host_room
    return with_memory(host=f"{(1 << 40) - room + (wide + less) // 2} B")


def test_where_only_sums_on_the_device_fit_they_are_there() -> None:
    machine = _host_between()
    assert not planned_on_h100(accumulating_job(), machine).fits
    open_job = accumulating_job("offload.sums_on=auto", "offload.sums_down=working")
    plan = planned_on_h100(open_job, machine)
    assert plan.fits
    assert (plan.job.offload.gradients.sums_tier, plan.job.offload.gradients.sums_dtype) == (
        "device",
        "working",
    )
    assert settled(open_job, "", machine, 1) == replace(open_job, offload=plan.job.offload)


def test_a_job_that_lacks_host_memory_for_its_sums_is_told_to_sum_on_the_device() -> None:
    """It keeps the tokens of its step."""
    config, machine = accumulating_job("offload.working=host"), _host_between()
    changes = nearest(config, "", machine, 1)
    assert {"offload.sums_on": "device", "offload.sums_down": "working"}.items() <= (
        changes[0].keys.items()
    )
    assert changes[0].plan.fits and changes[0].plan.job.batch_tokens == config.batch_tokens


@pytest.mark.slow
def test_the_search_of_stages_sums_on_the_device_where_that_is_faster() -> None:
    config = accumulating_job("train.grad_accum_steps=128")
    first, *_ = pipeline_search.search(config, "", with_memory(gpu="20 GiB"), 2, ("1f1b",))
    assert first.plan.job.offload.gradients.sums_tier == "device"
    assert " offload.sums_on=device" in first.keys


def test_the_engine_refuses_what_only_a_plan_decides() -> None:
    for key in ("sums_on", "update"):
        config = replace(accumulating_job(f"offload.{key}=auto").offload, precision="bf16")
        with pytest.raises(OptionError, match=f"{key} = 'auto' is decided by the plan"):
            lay_out([BlockSpec("a", (), ())], config, ranks=1, num_tensors=1, available_bytes=None)


def test_the_decision_is_in_the_dry_run_the_run_folder_and_the_log(tmp_path: Path) -> None:
    config = small_job(tmp_path, "train.steps=2", "offload.sums_on=auto")
    text, fits, resolved = preview(config)
    assert fits and resolved.offload.gradients.sums_tier in ("host", "device")
    assert run(config, tmp_path / "run") == 0
    saved = jobs.load(tmp_path / "run" / "resolved.toml").offload.gradients.sums_tier
    (started,) = events_of(tmp_path / "run", schema.RunStarted)
    assert resolved.offload.gradients.sums_tier == saved == started.config["offload"]["sums_on"]
    assert ("summed on the device" in text) == (saved == "device")


# ---- exact or speculative updates

FEW_CORES = find("h100_16cores")[1]
SMALL_BATCH = ("train.micro_batch=4", "train.grad_accum_steps=1", "train.global_batch_tokens=0")


def planned_update(*overrides: str, machine: Machine = FEW_CORES) -> Plan:
    config = jobs.load("offloadtrain/cli/jobs/llama_1b.toml", [*SMALL_BATCH, *overrides])
    return make(config, "", machine)


def test_a_step_that_waits_for_adam_guesses() -> None:
    exact, speculative, chosen = (
        planned_update(f"offload.update={mode}", "offload.state=int8")
        for mode in ("exact", "speculative", "auto")
    )
    assert speculative.prediction.tokens_per_s > 1.03 * exact.prediction.tokens_per_s
    assert chosen.job.offload.update == "speculative"
    assert chosen.prediction == speculative.prediction
    assert "update = auto chooses speculative\n" in report.text(chosen)
    assert "update = auto" not in report.text(exact) + report.text(speculative)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("train.micro_batch=64",), id="nothing is waited for"),
        pytest.param(("offload.state_on={disk=1.0}",), id="not with state on the disk"),
        pytest.param(("offload.clip_norm=0", "offload.skip_nonfinite=false"), id="no guess needed"),
    ],
)
def test_other_steps_are_exact(overrides: tuple[str, ...]) -> None:
    plan = planned_update("offload.update=auto", *overrides)
    assert plan.job.offload.update == "exact"
    assert plan.prediction.none_right_s is None
    assert "update = auto chooses exact: speculative gains less than 3 %" in report.text(plan)
    assert report.as_json(plan)["update"] == "exact"


def test_a_host_without_room_for_second_copies_is_exact() -> None:
    least = max(planned_update("offload.update=exact").host_peaks.values())
    machine = replace(FEW_CORES, host_memory=f"{least + (2 << 30)} B")
    assert planned_update("offload.update=auto", machine=machine).job.offload.update == "exact"


@pytest.mark.slow
def test_the_rest_of_what_is_open_is_decided_with_it() -> None:
    config = jobs.load(
        "offloadtrain/cli/jobs/llama_1b.toml",
        [*SMALL_BATCH, "offload.update=auto", "offload.state_on=auto", "device.placement=auto"],
    )
    job = settled(config, "", FEW_CORES, 1)
    assert "auto" not in (job.offload.update, job.offload.state.tier)


@pytest.mark.slow
def test_the_page_has_the_planned_figures(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path("docs/plan.md").read_text().partition("## Exact or speculative updates")[2]
    (command,) = re.findall(r"^    offloadtrain (.* offload\.update=auto)$", page, re.MULTILINE)
    rows = re.findall(r"^\| (\d+) \| (\S+ tokens/s) \| (\S+ tokens/s) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for size, *rates in rows:
        for mode, rate in zip(("exact", "auto"), rates, strict=True):
            changed = [f"train.micro_batch={size}", f"offload.update={mode}"]
            assert main([*command.split(), *changed]) == 0
            assert rate in capsys.readouterr().out.splitlines()[0]


@pytest.mark.slow
def test_a_run_has_the_weights_of_an_exact_one_and_says_what_was_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for update in ("exact", "auto"):
        job = small_job(tmp_path, "train.steps=4", f"offload.update={update}")
        assert run(job, tmp_path / update) == 0
    assert tensor_hashes(tmp_path / "auto", 4) == tensor_hashes(tmp_path / "exact", 4)
    saved = jobs.load(tmp_path / "auto" / "resolved.toml").offload.update
    (started,) = events_of(tmp_path / "auto", schema.RunStarted)
    assert saved == started.config["offload"]["update"] in ("exact", "speculative")
    assert f"; update = auto: {saved}" in capsys.readouterr().err
