"""The plan as a whole: it is monotone, its parts sum up, and what fits is what a machine holds."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.cli.commands.jobs import shipped_jobs
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import SIZES
from offloadtrain.config.units import format_seconds
from offloadtrain.hardware.machine import Machine, MachineError, dump, find, loads, shipped
from offloadtrain.plan import placement, report, times
from offloadtrain.plan import plan as planning
from offloadtrain.plan.costs.costs import PROGRAM_LAUNCH, Costs, newton_schulz_flops
from offloadtrain.plan.layout import blocks_of
from offloadtrain.plan.placement import PlanError
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search import suggest
from offloadtrain.plan.search.suggest import applied, automatic, nearest
from offloadtrain.step.layout import buffer_table as step_memory
from offloadtrain.step.layout.block_spec import MatrixSpec
from offloadtrain.step.program.operations import Launch
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.simulate import steady
from offloadtrain.train import dry_run
from offloadtrain.train.dry_run import DryRunError, check, proved
from tests import levels
from tests.plan.test_memory import job

ROOT = Path(__file__).resolve().parents[2]
V100 = find("v100_32gb")[1]
DGX2 = find("dgx2")[1]


def test_an_estimate_refuses_only_what_it_cannot_be_wrong_about() -> None:
    """What autograd keeps is estimated: where twice the room might do, a run is warned, and tried;
    the engine's own bytes are known, and refused at once."""
    plan = make(small(), "v100", V100)
    engine_bytes, guessed = sum(plan.placed.device().values()), plan.activations.total
    reserved = V100.gpu_reserved_bytes

    def problems(room: int) -> tuple[list[str], list[str]]:
        less = make(small(), "v100", replace(V100, gpu_memory=f"{reserved + room}"))
        return less.problems, less.certain_problems

    assert problems(engine_bytes + guessed) == ([], [])
    assert "and has 0 B. Largest" in problems(-reserved // 2)[0][0]  # not less than nothing
    maybe, certain = problems(engine_bytes + guessed // 2 + 1)
    assert maybe and not certain
    maybe, certain = problems(engine_bytes + guessed // 2 - 1)
    assert maybe == certain != []
    assert problems(engine_bytes - 1)[1]


def small(**keys: Any) -> Config:
    """A job that takes a few gigabytes on a GPU."""
    config = job(**{"train__micro_batch": 4, "offload__precision": "fp16", **keys})
    return replace(
        config,
        model=SIZES["gpt2-355m"],
        data=replace(config.data, seq_len=512),
        device=replace(config.device, kind="auto"),
    )


def planned(config: Config, machine: Machine = V100, ranks: int = 1) -> Plan:
    return make(config, "test", machine, ranks)


def shipped_job(name: str, **keys: Any) -> Config:
    texts = [f"{key.replace('__', '.')}={str(value).lower()}" for key, value in keys.items()]
    return jobs.load(shipped_jobs()[name], texts)


# ---- bytes


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_more_needs_more_and_takes_longer(state: str) -> None:
    base = planned(small(offload__state=state))
    shape, train = base.job.model, base.job.train
    for more in (
        replace(base.job, model=replace(shape, num_layers=shape.num_layers + 1)),
        replace(base.job, model=replace(shape, d_model=shape.d_model + 64, d_ff=0)),
        replace(base.job, train=replace(train, micro_batch=8)),
    ):
        other = planned(more)
        assert sum(other.device.values()) > sum(base.device.values())
        assert sum(other.host.values()) >= sum(base.host.values())
        assert other.prediction.seconds > base.prediction.seconds


@levels.examples(30)
@given(
    gpu=st.integers(1, 40),
    host=st.integers(1, 64),
    more_gpu=st.integers(0, 20),
    more_host=st.integers(0, 20),
    working=st.sampled_from(["device", "host"]),
    update=st.sampled_from(["exact", "speculative"]),
)
def test_what_fits_fits_in_more(
    gpu: int, host: int, more_gpu: int, more_host: int, working: str, update: str
) -> None:
    config = small(offload__working=working, offload__update=update)

    def fits(gpu: int, host: int) -> bool:
        sizes = {"gpu_memory": f"{gpu} GiB", "host_memory": f"{host} GiB"}
        return planned(config, replace(V100, **sizes)).fits

    assert fits(gpu + more_gpu, host + more_host) or not fits(gpu, host)


def test_ranks_divide_the_host_bytes_and_the_bus() -> None:
    config = small(train__micro_batch=16)
    alone, four = planned(config, DGX2), planned(config, DGX2, 4)
    state = ("master weights", "exp_avg", "exp_avg_sq", "gradients")
    for owner in state:
        assert four.host[owner] == pytest.approx(alone.host[owner] / 4, rel=0.01)
    assert four.prediction.d2h_bytes == pytest.approx(alone.prediction.d2h_bytes / 4, rel=0.01)
    assert four.prediction.comm_bytes == pytest.approx(2 * 3 * four.prediction.d2h_bytes, rel=1e-6)
    assert four.local_ranks == 4 and planned(config, DGX2, 16).hosts == 1


def test_bytes_on_the_bus_per_parameter() -> None:
    """4.0 with one microbatch; the goal that a README may state."""
    plan = planned(shipped_job("gpt_13b_v100", train__global_batch_tokens=4096))
    params = sum(bucket.params for bucket in plan.placed.spec.buckets)
    moved = plan.prediction.d2h_bytes + plan.prediction.h2d_bytes
    assert moved / params == pytest.approx(4.0, rel=1e-3)


# ---- times


@levels.examples(25)
@given(
    layers=st.integers(2, 6),
    update=st.sampled_from(["exact", "speculative", "delayed"]),
    working=st.sampled_from(["device", "host"]),
    accum=st.integers(1, 3),
    ranks=st.sampled_from([1, 2, 16, 64]),
    stage=st.sampled_from([0, 1, 3]),
    activation=st.sampled_from(["keep", "recompute"]),
    state=st.sampled_from(["fp32", "int8"]),
)
def test_what_the_device_does_and_waits_for_is_the_step(
    layers: int,
    update: str,
    working: str,
    accum: int,
    ranks: int,
    stage: int,
    activation: str,
    state: str,
) -> None:
    config = small(
        offload__update=update,
        offload__state=state,
        offload__working=working,
        offload__activation=activation,
        train__micro_batch=2,
        train__grad_accum_steps=accum * ranks,
    )
    if working == "device":
        config = replace(config, offload=config.offload.replace(zero_stage=stage))
    config = replace(config, model=replace(config.model, num_layers=layers))
    prediction = planned(config, replace(DGX2, launch_us=0.0), ranks).prediction
    assert prediction.seconds == pytest.approx(prediction.busy_s["compute"] + prediction.exposed)
    assert prediction.seconds >= max(prediction.busy_s.values()) * (1 - 1e-9)
    per_token = prediction.tflops * 1e12 * prediction.seconds / (2 * 512 * accum)
    assert prediction.tokens_per_s * prediction.seconds == pytest.approx(2 * 512 * accum * ranks)
    assert per_token > 0 and prediction.hardware_tflops >= prediction.tflops


def test_many_microbatches_are_two_and_more_of_the_third() -> None:
    """Extrapolated, and simulated as a whole."""
    for working, slots in (("device", 2), ("host", 1), ("host", 2)):
        config = small(
            train__grad_accum_steps=7, offload__working=working, offload__device_slots=slots
        )
        config = replace(config, model=replace(config.model, num_layers=5))
        plan = planned(config)
        costs = Costs(plan.with_copies, V100)
        assert costs.spec.config.grad_accum_steps == 7
        full = steady(costs.spec, costs.seconds)
        assert plan.prediction.seconds == pytest.approx(full.seconds, rel=1e-3)


def test_faster_links_are_never_slower() -> None:
    config = planned(small(train__micro_batch=1)).job
    before = planned(config).prediction.seconds
    for rate in ("h2d_gbps", "d2h_gbps", "dram_gbps", "fp16_tflops", "hbm_gbps"):
        better: dict[str, Any] = {rate: 2 * getattr(V100, rate), "host_link_gbps": 1e3}
        assert planned(config, replace(V100, **better)).prediction.seconds <= before * (1 + 1e-9)


@pytest.mark.parametrize("name", ["a100_80gb", pytest.param("h100", marks=pytest.mark.slow)])
def test_near_linear_over_nvlink(name: str) -> None:
    """8 of one host, each with the batch that one would have; a quarter of the layers of 13B."""
    machine, layers = find(name)[1], {"model__num_layers": 10}
    alone = shipped_job("gpt_13b_32gb", train__global_batch_tokens=32768, **layers)
    eight = shipped_job("gpt_13b_32gb", train__global_batch_tokens=8 * 32768, **layers)
    of_single = make(alone, name, machine).prediction.tokens_per_s
    many = make(eight, name, machine, 8).prediction.tokens_per_s
    assert many / (8 * of_single) >= 0.95


# ---- what to change


@pytest.mark.slow
def test_changes_make_it_fit_and_are_ranked() -> None:
    tight = replace(V100, gpu_memory="5 GiB", host_memory="14 GiB")
    config = small(train__micro_batch=8)
    assert not planned(config, tight).fits
    changes = nearest(config, "test", tight, 1)
    assert changes
    rates = [change.plan.prediction.tokens_per_s for change in changes]
    assert rates == sorted(rates, reverse=True)
    for change in changes:
        again = planned(applied(config, change.keys), tight)
        assert again.fits
        assert again.prediction.tokens_per_s == pytest.approx(change.plan.prediction.tokens_per_s)
        assert again.job.batch_tokens == config.batch_tokens
        for key in change.keys:  # each of them is needed, or as fast as what fits can be
            if key not in ("train.grad_accum_steps", "offload.recompute_blocks"):
                less = {k: v for k, v in change.keys.items() if k != key}
                if key == "train.micro_batch":
                    less.pop("train.grad_accum_steps", None)
                assert not less or not planned(applied(config, less), tight).fits


def test_a_state_that_a_gpu_cannot_hold_is_offloaded() -> None:
    """16 bytes per parameter fit a large GPU, and are faster there; else the host is proposed."""
    config = small(offload__state_on="device", train__micro_batch=1)
    on_gpu, offloaded = planned(config), planned(small(train__micro_batch=1))
    assert on_gpu.fits and on_gpu.prediction.d2h_bytes == on_gpu.prediction.h2d_bytes == 0
    assert on_gpu.prediction.seconds < offloaded.prediction.seconds
    state_bytes = sum(on_gpu.device.values()) - sum(offloaded.device.values())
    state_bytes -= planning.UPDATE_BYTES
    params = sum(bucket.params for bucket in on_gpu.placed.spec.buckets)
    assert state_bytes == pytest.approx(14 * params, rel=0.01)
    tight = replace(V100, gpu_memory="4 GiB")
    changes = nearest(config, "test", tight, 1)
    assert {"offload.state_on": "host"} in [change.keys for change in changes]
    assert "as planned" in check(on_gpu)


@pytest.mark.slow
def test_nothing_makes_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(V100, gpu_memory="1100 MiB", host_memory="4 GiB")
    tried, combinations = [], suggest.combinations

    def counted(job: Config, *args: Any, **kwargs: Any) -> Any:
        tried.append((job.train.micro_batch, job.train.grad_accum_steps, job.data.seq_len))
        return combinations(job, *args, **kwargs)

    monkeypatch.setattr(suggest, "combinations", counted)
    (closest,) = nearest(small(), "test", tiny, 1)
    # One sequence, then the shortest in the smallest pieces: more than these take no trace. Then
    # the job with state, weights and gradients on a drive.
    assert tried[1:3] == [(1, 1, small().data.seq_len), (1, 1, suggest.SHORTEST)]
    assert tried[3:] == 3 * tried[:1]
    assert not closest.plan.fits
    assert closest.plan.missing_bytes < planned(small(), tiny).missing_bytes
    assert "The least of all" in report.text(planned(small(), tiny), [closest])
    with pytest.raises(PlanError, match="does not fit in any placement"):
        automatic(small(), "test", tiny, 1)


@pytest.mark.slow
def test_smaller_pieces_and_shorter_sequences_make_it_fit() -> None:
    """Where nothing else does."""
    config = small(train__micro_batch=1, offload__working="host", offload__activation="offload")
    tighter = {"train.chunked_loss": True, "offload.device_slots": 1, "data.seq_len": 256}
    needed = sum(planned(applied(config, tighter)).device.values())
    reserved = V100.gpu_reserved_bytes
    tight = replace(V100, gpu_memory=f"{reserved + needed}", host_memory="64 GiB")
    changes = nearest(config, "test", tight, 1)
    assert changes and all(change.plan.fits for change in changes)
    assert tighter.items() <= changes[0].keys.items()


@pytest.mark.slow
@pytest.mark.parametrize("state_on", ["host", "auto"])
def test_block_inputs_that_have_room_are_not_moved_to_a_host_that_is_short(
    monkeypatch: pytest.MonkeyPatch, state_on: Any
) -> None:
    """To try it would take a trace for each microbatch; what is left out would change nothing."""
    config = small(offload__activation="recompute", offload__state_on=state_on)
    tried: list[str] = []

    def noted(job: Config, *args: Any, **options: Any) -> Plan:
        tried.append(job.offload.activations.mode)
        return make(job, *args, **options)

    monkeypatch.setattr(suggest, "make", noted)
    most = max(make(config, "test", V100).host_peaks.values())
    for share in (0.95, 0.7):
        short = replace(V100, host_memory=f"{round(share * most)}")
        tried.clear()
        few = nearest(config, "test", short, 1)
        assert tried and "offload" not in tried
        with monkeypatch.context() as patched:
            patched.setattr(
                suggest,
                "_promising",
                lambda *of, largest_only=False, **more: suggest._candidates(*of, **more),
            )
            assert [change.keys for change in nearest(config, "test", short, 1)] == [
                change.keys for change in few
            ]
        assert "offload" in tried
    tight = replace(V100, gpu_memory="5 GiB", host_memory="14 GiB")
    nearest(replace(config, train=replace(config.train, micro_batch=8)), "test", tight, 1)
    assert "offload" in tried


def holding(**keys: Any) -> Machine:
    """With just the device memory that the job so placed needs."""
    needed = sum(planned(small(train__micro_batch=8, **keys)).device.values())
    return replace(V100, gpu_memory=str(needed + V100.gpu_reserved_bytes + (1 << 20)))


@pytest.mark.slow
def test_automatic_takes_the_fastest_that_fits() -> None:
    """Where there is memory everything stays; then activations go first, then weights."""
    config = small(train__micro_batch=8)

    def chosen(machine: Machine) -> dict[str, Any]:
        change = automatic(config, "test", machine, 1)
        assert change.plan.fits
        return change.keys

    assert chosen(V100) == {}
    assert chosen(holding(offload__activation="recompute")) == {"offload.activation": "recompute"}
    least = {"offload.activation": "offload", "offload.working": "host"}
    assert chosen(holding(offload__activation="offload", offload__working="host")) == least


@pytest.mark.slow
def test_auto_in_a_job_is_settled() -> None:
    machine = holding(offload__activation="recompute")
    config = small(train__micro_batch=8, device__placement="auto")
    settled = suggest.settled(config, "test", machine, 1)
    assert (
        settled.offload.activations.mode == "recompute" and settled.offload.weights.tier == "device"
    )
    assert suggest.settled(small(), "test", machine, 1) == small()


# ---- refusals


ONE_LAYER = replace(SIZES["gpt2-355m"], num_layers=1)
LIMITED = {"offload__device_memory_limit": '"1MiB"'}
STREAMED: dict[str, Any] = {"offload__working": "host"}
REFUSED: list[tuple[str, dict[str, Any], Machine, int]] = [
    ("set offload.precision = fp16 or fp32", {"offload__precision": "bf16"}, V100, 1),
    ("fp32 or int8", {"offload__state": "split16", "offload__precision": "auto"}, V100, 1),
    ("computes on Tesla V100", {"device": "cpu"}, V100, 1),
    (
        r"offload\.working = .* set zero_stage = 3",
        STREAMED | {"offload__zero_stage": 2},
        DGX2,
        2,
    ),
    (r'optim\.name = "muon" updates the', {"optim__name": "muon", "model": ONE_LAYER}, V100, 1),
    # Also where nothing can be streamed.
    *(
        (r"offload\.device_memory_limit is 1\.0 MiB", LIMITED | keys, V100, 1)
        for keys in ({}, STREAMED, {"model": ONE_LAYER}, STREAMED | {"model": ONE_LAYER})
    ),
    (
        "node_link_gbps",
        {"train__micro_batch": 32},
        replace(DGX2, node_link_gbps=0.0),
        32,
    ),
]


@pytest.mark.parametrize(("message", "keys", "machine", "ranks"), REFUSED)
def test_what_cannot_be_planned(
    message: str, keys: dict[str, Any], machine: Machine, ranks: int
) -> None:
    config = small(**{key: value for key, value in keys.items() if "__" in key})
    config = replace(config, model=keys.get("model", config.model))
    config = replace(config, device=replace(config.device, kind=keys.get("device", "auto")))
    with pytest.raises((PlanError, MachineError), match=message):
        _ = planned(config, machine, ranks).prediction


def test_second_copies_are_made_where_there_is_room_and_are_no_need() -> None:
    exact = planned(small())
    least = max(exact.host_peaks.values())
    for host in (least, 2 * least, 20 * least):
        machine = replace(V100, host_memory=str(host))
        plan = planned(small(offload__update="speculative"), machine)
        assert plan.fits and max(plan.host_peaks.values()) <= host
    assert plan.host["other copy of the state"] == pytest.approx(
        sum(plan.host[owner] for owner in ("master weights", "exp_avg", "exp_avg_sq"))
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "host_memory is missing"),
        ("host_memory = 5", "a string"),
        ('host_memory = "much"', "not a size"),
        ("nonsense = 1", "nonsense is unknown"),
        ("gpus = 0", "too small"),
        ("fp32_tflops = 0.0", "above 0"),
        ("h2d_gbps = 25e9", "check its unit"),
        ('gpu = "NVIDIA H100"', "gpu_memory is missing"),
        ('gpu_memory = "24 GiB"', "gpu is missing"),
        ("= 3", "not valid TOML"),
    ],
)
def test_a_machine_file_that_breaks_a_rule(text: str, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        loads(text, "mine.toml")


def test_machine_files() -> None:
    for name in shipped():
        machine = find(name)[1]
        assert loads(dump(machine, "the same"), "again") == machine
        assert machine.host_memory_bytes > 0 and machine.precisions
    with pytest.raises(MachineError, match=r"did you mean h100"):
        find("h10")
    with pytest.raises(MachineError, match="cannot be read"):
        find("no/such.toml")


def test_any_job_has_a_plan_or_one_clear_line() -> None:
    draw = random.Random(5)
    made = 0
    for _ in range(60):
        config = small(
            train__micro_batch=draw.choice([1, 3, 8]),
            train__grad_accum_steps=draw.choice([1, 2]),
            offload__state=draw.choice(["fp32", "int8"]),
            offload__working=draw.choice(["device", "host"]),
            offload__device_memory_limit=draw.choice([0, '"1 GiB"', '"200 MB"']),
            offload__host_memory_limit=draw.choice([0, '"3 GiB"']),
        )
        config = replace(config, model=replace(config.model, num_layers=draw.choice([1, 2, 12])))
        try:
            plan = planned(config, DGX2, draw.choice([1, 2]))
            assert plan.prediction.seconds > 0
            made += 1
        except OffloadTrainError as error:
            assert "\n" not in str(error) and len(str(error)) > 40
    assert made > 20


def test_a_limit_of_the_jobs_memory_does_not_name_what_it_leaves_out() -> None:
    (problem,) = planned(small(offload__host_memory_limit='"1 MiB"'), DGX2).problems
    assert problem.startswith("offload.host_memory_limit needs") and "Python" not in problem


# ---- dry runs


LARGE = {name for name in shipped_jobs() if name.startswith("gpt_13b")} - {"gpt_13b_streamed"}


@pytest.mark.parametrize(
    "name",
    [
        *("demo", "gpt_13b_streamed"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(LARGE)),
    ],
)
def test_the_engine_lays_out_what_is_planned(name: str) -> None:
    """Every shipped 13B job, whole, on the meta device."""
    config = shipped_job(name)
    title, machine = find(config.device.machine or "cpu2")
    plan = make(config, title, machine)
    assert plan.fits
    assert "free of races" in check(plan)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "blocks_of",
            lambda config, ranks: blocks_of(
                replace(config, optim=replace(config.optim, name="lion")), ranks
            ),
            r"'exp_avg', 'exp_avg_sq'\), .* and .*moments=\('exp_avg',\)",
        ),
        ("num_tensors", lambda shape: 3, "num_tensors 292 and 3"),
        ("blocks_of", lambda config, ranks: blocks_of(config, ranks)[:-1], "norm.*None"),
    ],
)
def test_a_plan_that_the_engine_contradicts(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: object, message: str
) -> None:
    monkeypatch.setattr(placement, name, wrong)
    with pytest.raises(DryRunError, match=f"the layout differs from the plan: .*{message}"):
        check(planned(small()))


RULES: dict[str, dict[str, Any]] = {
    "lion": {"optim__name": "lion"},
    "sgd": {"optim__name": "sgd", "optim__momentum": 0.0},
    "adagrad": {"optim__name": "adagrad"},
}


@pytest.mark.parametrize("measured", [0.0, 0.5], ids=["by memory", "as measured"])
def test_fewer_moments_are_fewer_bytes_and_less_time(measured: float) -> None:
    """Where Adam was measured, other rules take the share of its time that their bytes are."""
    machine = replace(V100, fp32_gparams=measured)
    plans = [planned(small(**RULES[name]), machine) for name in ("sgd", "lion")]
    plans.append(planned(small(), machine))
    adagrad = planned(small(**RULES["adagrad"]), machine)
    assert "sum" in adagrad.host and "exp_avg" not in plans[0].host
    assert "exp_avg_sq" not in plans[1].host
    for measure in (
        lambda plan: sum(plan.host.values()),
        lambda plan: plan.prediction.busy_s["host"],
        lambda plan: plan.prediction.dram_bytes,
    ):
        amounts = [measure(plan) for plan in plans]
        assert amounts == sorted(amounts) and len(set(amounts)) == 3
        assert measure(adagrad) == amounts[1]


@pytest.mark.parametrize(
    ("keys", "kernel", "ranks"),
    [
        ({"offload__clip_norm": 1.0}, "norm", 2),  # a single rank's is the device's
        ({"train__grad_accum_steps": 4}, "accumulate", 1),
    ],
)
def test_a_kernel_is_no_faster_than_measured(keys: dict[str, Any], kernel: str, ranks: int) -> None:
    """Bound by its arithmetic it takes the measured time, bound by memory that of its bytes."""

    def host_s(gparams: float) -> float:
        machine = replace(DGX2, **{f"{kernel}_gparams": gparams})
        return planned(small(**keys), machine, ranks).prediction.busy_s["host"]

    assert host_s(0.0) == host_s(1e6) < host_s(0.02) < host_s(0.01)


@pytest.mark.parametrize("early", [False, True])
def test_adam_and_copies_slow_each_other_while_both_run(early: bool) -> None:
    """Weights go up during Adam in every step, gradients come down during it where no norm has to
    be known first. In each direction's seconds Adam loses half of what both cost it."""
    rates = {"fp32_gparams": 0.5, "fp32_copying_gparams": 0.3}
    machine = replace(V100, **rates, h2d_adam_gbps=8.0, d2h_adam_gbps=5.0, bf16_tflops=50.0)
    job = small(
        offload__clip_norm=0 if early else 1.0,
        offload__skip_nonfinite=not early,
        offload__precision="bf16",
    )
    numel = sum(bucket.shard_numel for bucket in planned(job, machine).placed.spec.buckets)
    up, down = 2e-9 * numel / 8.0, 2e-9 * numel / (5.0 if early else V100.d2h_gbps)
    busy = planned(job, machine).prediction.busy_s
    assert busy["h2d"] == pytest.approx(up) and busy["d2h"] == pytest.approx(down, rel=1e-3)
    copies = up + down if early else up
    assert busy["host"] == pytest.approx(1e-9 * numel / 0.5 + copies * (1 - 0.3 / 0.5) / 2)
    alone = replace(machine, fp32_copying_gparams=0.0, h2d_adam_gbps=0.0, d2h_adam_gbps=0.0)
    assert planned(job, alone).prediction.busy_s["host"] == pytest.approx(1e-9 * numel / 0.5)


def test_speculation_is_planned_with_all_guesses_right_and_with_none() -> None:
    """After wrong guesses nothing is guessed: a step then takes as long as one of mode "exact"."""
    slow = replace(V100, fp32_gparams=2.0, dram_gbps=200.0)
    exact, guessing = (
        planned(small(offload__clip_norm=1.0, offload__update=update), slow)
        for update in ("exact", "speculative")
    )
    prediction = guessing.prediction
    assert exact.prediction.none_right_s is None
    assert prediction.none_right_s == pytest.approx(exact.prediction.seconds)
    assert prediction.seconds < 0.95 * exact.prediction.seconds
    printed = report.text(guessing, [])
    right, none = (format_seconds(s) for s in (prediction.seconds, exact.prediction.seconds))
    assert f"speculative: {right} if all guesses are right, {none} (" in printed
    assert f"{none} if no guess of speculative is right)" in printed


def test_an_update_into_other_memory_moves_what_it_overwrites() -> None:
    """Where memory bounds it. Where arithmetic does, it takes as long as in place."""

    def host_s(update: str, gparams: float) -> float:
        machine = replace(V100, fp32_gparams=gparams)
        job = small(offload__clip_norm=1.0, offload__update=update)
        return planned(job, machine).prediction.busy_s["host"]

    buckets = planned(small(), V100).placed.spec.buckets
    overwritten_s = 12e-9 * sum(bucket.shard_numel for bucket in buckets) / V100.dram_gbps
    by_memory, by_arithmetic = 0.0, 1e-3
    in_place_s = host_s("exact", by_memory)
    assert host_s("speculative", by_memory) == pytest.approx(in_place_s + overwritten_s)
    assert host_s("speculative", by_arithmetic) == pytest.approx(host_s("exact", by_arithmetic))


def test_no_step_is_shorter_than_its_launches() -> None:
    """The operations of torch and, each as long as some of them, those of the program."""
    config = small(offload__activation="recompute")
    step = planned(config, replace(V100, launch_us=300.0))
    spec = step.placed.spec
    # an eager forward and backward, and a forward again
    of_torch = step.placed.repeated * (30 + 60 + 30)
    four, five = (
        sum(isinstance(op, Launch) for op in steps(Program(spec), count)) for count in (4, 5)
    )
    of_program = five - four
    assert of_program > 5 * len(spec.buckets)  # norm, gather, copy down, Adam, copy up
    seconds = 300e-6 * (of_torch + PROGRAM_LAUNCH * of_program)
    assert step.prediction.seconds == step.prediction.launch_s == pytest.approx(seconds)
    assert "bound by launches" in report.text(step, [])
    fast = planned(config, replace(V100, launch_us=0.0))
    assert fast.prediction.launch_s == 0.0 < fast.prediction.seconds < seconds
    assert "bound by launches" not in report.text(fast, [])


def test_a_lone_rank_has_the_memory_of_its_node() -> None:
    """Kernels are bound to their GPU's node; ranks on both nodes have all of it."""
    single_node, halved = DGX2, replace(DGX2, numa_nodes=2)

    def host_s(machine: Machine, ranks: int) -> float:
        return planned(small(offload__clip_norm=1.0), machine, ranks).prediction.busy_s["host"]

    assert host_s(halved, 1) == pytest.approx(2 * host_s(single_node, 1))
    assert host_s(halved, 2) == host_s(single_node, 2)


def test_a_single_rank_measures_its_gradient_on_the_device() -> None:
    """Two bytes per parameter less of the host's memory, and no work of the host's."""
    alone, two = (planned(small(offload__clip_norm=1.0), DGX2, ranks) for ranks in (1, 2))
    buckets = alone.placed.spec.buckets
    assert alone.prediction.dram_bytes == 28 * sum(bucket.shard_numel for bucket in buckets)
    shards = sum(bucket.shard_numel for bucket in two.placed.spec.buckets)
    assert two.prediction.dram_bytes == (28 + 2) * shards


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [{}, {"offload__working": "host"}, {"optim__decay": "all", "offload__zero_stage": 3}],
)
def test_ranks_have_whole_matrices_as_planned(keys: dict[str, Any]) -> None:
    config = small(optim__name="muon", train__micro_batch=16, **keys)
    plan = planned(config, DGX2, 8)
    assert "as planned" in check(plan)
    layer = next(block for block in plan.placed.spec.blocks if block.repeated)
    (matrices,) = (bucket for bucket in layer.buckets if bucket.matrices)
    assert [matrix for rank in range(8) for matrix in matrices.matrices_of(rank)] == [
        *matrices.matrices
    ]


def test_muon_costs_what_its_matrices_move_and_multiply() -> None:
    adamw, muon = planned(small()), planned(small(optim__name="muon"))
    matrices = [matrix for b in muon.placed.spec.buckets for matrix in b.matrices]
    moved = 2 * sum(matrix.numel for matrix in matrices)
    padding = sum(b.numel for b in muon.placed.spec.buckets) - sum(
        b.numel for b in adamw.placed.spec.buckets
    )
    for key in ("d2h_bytes", "h2d_bytes"):
        more = getattr(muon.prediction, key) - getattr(adamw.prediction, key)
        assert more == moved + 2 * padding, key
    assert newton_schulz_flops(MatrixSpec(0, 2, 3)) == 5 * (4 * 2 * 2 * 3 + 2 * 2**3)
    assert newton_schulz_flops(MatrixSpec(0, 3, 2)) == newton_schulz_flops(MatrixSpec(0, 2, 3))
    at_least = sum(map(newton_schulz_flops, matrices)) / V100.flops("fp16", 1 << 20)
    assert muon.prediction.busy_s["ortho"] > at_least > 0
    assert "ortho" not in adamw.prediction.busy_s
    assert muon.prediction.dram_bytes < adamw.prediction.dram_bytes
    assert muon.device["matrix workspace"] == max(
        2 * (2 * matrix.numel + 2 * min(matrix.rows, matrix.columns) ** 2) for matrix in matrices
    )


def test_a_ledger_that_is_not_the_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped is what the spec says of all owners together, or it is told."""
    owners = step_memory.host_owners
    name = "offloadtrain.train.dry_run.host_owners"
    monkeypatch.setattr(name, lambda spec: owners(spec) | {"exp_avg": 1})
    with pytest.raises(DryRunError, match="exp_avg on the host: planned 1 bytes, laid out"):
        check(planned(small()))


def test_the_program_of_a_job_is_proved() -> None:
    spec = planned(small(offload__working="host", offload__resident_blocks=4)).with_copies.spec
    launches, faults = proved(spec)
    assert faults == [] and launches > 3 * len(spec.blocks)


@pytest.mark.slow
def test_a_dry_run_of_13b_takes_little_memory() -> None:
    """A model of 25 GiB in 16 bits, laid out and proved in less than 2 GiB."""
    code = (
        "import sys; from offloadtrain.cli.main import main; "
        "code = main(['train', 'examples/gpt_13b_v100.toml', '--dry-run']); "
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')); "
        "print(code, peak.split()[1], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    status, kib = map(int, done.stderr.splitlines()[-1].split())
    assert status == 0 and kib < 2 << 20
    assert "free of races" in done.stderr


@pytest.mark.parametrize(("stay", "resident"), [(0, 0), (5, 2)])
def test_of_very_many_blocks_some_are_proved(
    monkeypatch: pytest.MonkeyPatch, stay: int, resident: int
) -> None:
    """A job of 5,000 layers took minutes. The layout is checked of all of them."""
    monkeypatch.setattr(dry_run, "MOST_PIECES", 4)
    monkeypatch.setattr(dry_run, "FEWEST_BLOCKS", 4)
    keys = {"offload__working": "host", "offload__resident_blocks": stay}
    plan = make(job({"num_layers": 10}, **keys), "cpu2", find("cpu2")[1])
    some = dry_run.some_of(plan.with_copies.spec)
    assert sum(block.repeated for block in some.blocks) == 4 and len(some.streamed) == 4 - resident
    message = check(plan)
    assert "laid out 10 blocks" in message and "of 4 of the blocks free of races" in message


@pytest.mark.parametrize("working", ["device", "host"])
def test_tables_in_shards_are_proved_with_the_layers(
    monkeypatch: pytest.MonkeyPatch, working: str
) -> None:
    """ZeRO stage 3 on 4 ranks, where a part of the layers stands for all."""
    monkeypatch.setattr(dry_run, "MOST_PIECES", 4)
    monkeypatch.setattr(dry_run, "FEWEST_BLOCKS", 4)
    keys = {"offload__zero_stage": 3, "offload__working": working, "train__micro_batch": 4}
    shape = {"num_layers": 10, "tie_embeddings": False, "vocab_size": 4096}
    plan = make(job(shape, **keys), "cpu2", find("cpu2")[1], 4)
    some = dry_run.some_of(plan.with_copies.spec)
    assert {"embedding", "head"} <= some.streamed and len(some.streamed) == 6
    assert "of 4 of the blocks" in check(plan)


@pytest.mark.parametrize("working", ["device", "host"])
@pytest.mark.parametrize("count", [1, 4])
def test_layers_that_are_alike_are_extrapolated_exactly(
    monkeypatch: pytest.MonkeyPatch, working: str, count: int
) -> None:
    shape = {"num_layers": 40, "d_model": 512, "num_heads": 8, "max_seq_len": 64}
    keys = {"offload__working": working, "offload__activation": "offload"}
    config = job(
        shape, **keys, device__kind="auto", offload__precision="fp16", train__grad_accum_steps=count
    )
    placed = make(config, "test", V100).placed
    extrapolated = times.predict(placed, V100)
    monkeypatch.setattr(times, "_LAYERS", 40)
    exact = times.predict(placed, V100)
    assert extrapolated.seconds == pytest.approx(exact.seconds, rel=1e-6)
    assert extrapolated.busy_s == pytest.approx(exact.busy_s) and extrapolated.exposed_s.keys() <= {
        *exact.busy_s
    }
    assert extrapolated.exposed == pytest.approx(exact.exposed, rel=1e-6)


def test_an_encoder_computes_all_scores_and_holds_the_same() -> None:
    """Flash attention of a decoder skips half of the scores."""
    job = small()
    decoder, encoder = (
        planned(replace(job, model=replace(job.model, objective=objective)))
        for objective in ("causal", "mlm")
    )
    assert (encoder.device, encoder.host) == (decoder.device, decoder.host)
    busy = [plan.prediction.busy_s["compute"] for plan in (decoder, encoder)]
    assert busy[0] < busy[1] < 2 * busy[0]


def test_another_policy_of_activations_leaves_its_size_out() -> None:
    """`offload_saved_above` is of one policy: with it no other could be proposed."""
    demo = shipped_job("demo")
    offload = demo.offload.replace(activation="offload_saved", offload_saved_above=1 << 12)
    keys = {"offload.activation": "recompute"}
    changed = suggest._consistent(replace(demo, offload=offload), keys)
    assert list(changed.offload.problems()) == []
