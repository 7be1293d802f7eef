"""The plan's bytes are those that an engine books, owner by owner, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offloadtrain as ot
from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.hardware.machine import find
from offloadtrain.model.transformer import Transformer
from offloadtrain.plan.layout import num_tensors
from offloadtrain.plan.placement import PlanError, place
from offloadtrain.plan.plan import make
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.train.build import offload_job
from offloadtrain.train.dry_run import laid_out
from tests import levels

JOB = """
name = "planned"
[model]
size = "debug"
[data]
train = "x"
seq_len = 16
[offload]
precision = "bf16"
[device]
kind = "cpu"
[train]
steps = 1
micro_batch = 2
"""
GPT = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True}
NO_LIMIT = 1 << 50


def job(shape: dict[str, Any] | None = None, **keys: Any) -> Config:
    """A job with other values for dotted keys, written with two underscores; None: as it is."""
    values = {key: value for key, value in keys.items() if value is not None}
    texts = [f"{key.replace('__', '.')}={str(value).lower()}" for key, value in values.items()]
    config = jobs.loads(JOB, overrides=texts)
    if shape is None:
        return config
    small = {"vocab_size": 100, "num_layers": 3, "d_model": 24, "num_heads": 2, "max_seq_len": 16}
    return replace(config, model=ModelShape(**small | shape))


def booked(config: Config, steps: int = 2) -> dict[str, dict[str, int]]:
    """Tier → owner → bytes, most so far, of an engine that has trained."""
    torch.manual_seed(0)
    model = Transformer(config.model)
    optimizer = offload_job(model, config, torch.device("cpu"))
    size = (config.train.micro_batch, config.data.seq_len)
    for _ in range(steps):
        for _ in range(config.train.grad_accum_steps):
            tokens = torch.randint(config.model.vocab_size, size)
            optimizer.backward(model(tokens, tokens))
        optimizer.step()
    owners: dict[str, dict[str, int]] = {"host": {}, "device": {}}
    for row in optimizer.ledger.rows():
        if row.peak_bytes:
            owners.setdefault(row.tier, {})[row.owner] = row.peak_bytes
    optimizer.close()
    return owners


def planned(config: Config, ranks: int = 1) -> dict[str, dict[str, int]]:
    placed = place(config, ranks, NO_LIMIT)
    return {"host": placed.host(), "device": placed.device()}


MODELS = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 5),
        "d_model": st.sampled_from([8, 24, 40]),
        "tie_embeddings": st.booleans(),
        "bias": st.booleans(),
        "mlp": st.sampled_from(["swiglu", "gelu"]),
        "norm": st.sampled_from(["rmsnorm", "layernorm"]),
        "positions": st.sampled_from(["rotary", "learned"]),
        "num_experts": st.sampled_from([0, 0, 2, 5]),
    }
)


@levels.examples(60)
@given(
    shape=MODELS,
    state=st.sampled_from(["fp32", "split16", "int8"]),
    update=st.sampled_from(["exact", "speculative", "delayed"]),
    accum=st.integers(1, 2),
    working=st.sampled_from(["device", "host"]),
    slots=st.integers(1, 3),
    stay=st.one_of(st.none(), st.integers(0, 2)),
    skip=st.booleans(),
    activation=st.sampled_from(["keep", "recompute", "offload"]),
    decay=st.sampled_from(["matrices", "all"]),
    skipped=st.sampled_from([[], ["*.experts.*"], ["*.experts.up", "*.mlp.router.*"]]),
)
def test_every_owner_to_the_byte(
    shape: dict[str, Any],
    state: str,
    update: str,
    accum: int,
    working: str,
    slots: int,
    stay: int | None,
    skip: bool,
    activation: str,
    decay: str,
    skipped: list[str],
) -> None:
    # Whole blocks of the state in each expert, or it is refused.
    width = ModelShape(**{"vocab_size": 100, "num_heads": 2, **shape}).ff_width
    if not shape["num_experts"] or width * shape["d_model"] % 128:
        skipped = []
    config = job(
        shape,
        offload__state=state,
        offload__update=update,
        offload__clip_norm=1.0 if skip else 0.0,
        offload__skip_nonfinite=skip,
        optim__decay=decay,
        train__grad_accum_steps=accum,
        offload__working=working,
        offload__device_slots=slots,
        offload__resident_blocks=stay if working == "host" else None,
        offload__activation=activation,
        offload__skip_unused=skipped,
    )
    assert planned(config) == booked(config)


def test_limits_decide_over_streaming_and_second_copies() -> None:
    sizes = dict(GPT, num_layers=6)
    base = job(
        sizes, offload__working="host", offload__update="speculative", offload__clip_norm=1.0
    )
    assert planned(base) == booked(base)
    least = sum(planned(base)["device"].values())
    host = sum(n for o, n in planned(base)["host"].items() if o != "other copy of the state")
    for more_device, more_host in ((0, 0), (40_000, 300_000), (400_000, 10_000_000)):
        limits = {
            "offload__device_memory_limit": f'"{least + more_device}"',
            "offload__host_memory_limit": f'"{host + more_host}"',
        }
        config = job(
            sizes,
            offload__working="host",
            offload__update="speculative",
            offload__clip_norm=1.0,
            **limits,
        )
        try:
            placed = planned(config)
        except PlanError:
            with pytest.raises(ot.OffloadTrainError):
                booked(config)
            continue
        assert placed == booked(config)
    assert placed["host"].get("other copy of the state")


def test_a_bucket_larger_than_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, and weights that no staging slot holds."""
    monkeypatch.setattr(spec, "STAGING_BYTES", 4096)
    for accum in (1, 2):
        config = job(GPT, train__grad_accum_steps=accum)
        assert planned(config) == booked(config)


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("activation", ["keep", "offload"])
def test_nothing_offloaded(accum: int, activation: str) -> None:
    """16 bytes per parameter on the device (ZeRO, table 1), block inputs at most on the host."""
    keys = {"offload__state_on": "device", "train__grad_accum_steps": accum}
    config = job(GPT, offload__activation=activation, **keys)
    owners = booked(config)
    assert owners == planned(config)
    assert set(owners["host"]) <= {"block inputs", "norms", "padding"}
    state = sum(owners["device"][owner] for owner in ("master weights", "exp_avg", "exp_avg_sq"))
    assert state == 12 * sum(bucket.numel for bucket in place(config).spec.buckets)


@pytest.mark.parametrize(
    "sums_on", ["host", pytest.param("device", marks=pytest.mark.slow), "{device=0.4}"]
)
def test_half_of_the_state_on_the_device(sums_on: str) -> None:
    keys = {"offload__state_on": "{device=0.5}", "offload__sums_on": sums_on}
    config = job(GPT, train__grad_accum_steps=2, **keys)
    assert booked(config) == planned(config)


def test_parameters_are_counted_as_the_model_has_them() -> None:
    for shape in (GPT, {}, {"num_kv_heads": 1, "num_heads": 2}, GPT | {"tie_embeddings": True}):
        config = job(shape)
        model = Transformer(config.model)
        assert num_tensors(config) == sum(1 for _ in model.parameters())
        params = sum(bucket.params for bucket in place(config).spec.buckets)
        assert params == sum(param.numel() for param in model.parameters())


@levels.examples(60)
@given(
    shape=MODELS,
    options=st.fixed_dictionaries(
        {
            "state": st.sampled_from(["fp32", "split16", "int8"]),
            "update": st.sampled_from(["exact", "speculative", "delayed"]),
            "working": st.sampled_from(["device", "host"]),
            "zero_stage": st.sampled_from([0, 1, 2, 3]),
            "reduction": st.sampled_from(["working", "fp32"]),
            "skip_nonfinite": st.booleans(),
        }
    ),
    keep_fp32=st.sampled_from([[], ["*norm*"], ["blocks.*"], ["*"]]),
    decay=st.sampled_from(["matrices", "all"]),
    rule=st.sampled_from(["adamw", "lamb", "lion", "sgd", "adagrad"]),
    accum=st.integers(1, 2),
    ranks=st.sampled_from([1, 2, 3, 8]),
)
def test_a_spec_is_the_same_from_the_module_and_from_its_shape(
    shape: dict[str, Any],
    options: dict[str, Any],
    keep_fp32: list[str],
    decay: str,
    rule: str,
    accum: int,
    ranks: int,
) -> None:
    """For any number of ranks, on the meta device; and what is mapped is what it says."""
    if options["working"] == "host" and options["zero_stage"] in (1, 2):
        options["zero_stage"] = 3
    if rule == "adagrad" and options["state"] == "int8":
        options["state"] = "split16"  # its sum has no narrower form
    keys = {f"offload__{key}": value for key, value in options.items()}
    keys |= {"train__grad_accum_steps": accum * ranks, "device__kind": "auto"}
    config = job(shape, optim__decay=decay, optim__name=rule, **keys)
    config = replace(config, offload=config.offload.replace(keep_fp32=tuple(keep_fp32)))
    plan = make(config, "h100", find("h100")[1], ranks)
    ledger = laid_out(plan)
    booked = sum(row.bytes for row in ledger.rows())
    planned = sum(plan.with_copies.host().values()) + sum(plan.placed.device().values())
    later = plan.placed.device()["gradients"] if plan.placed.spec.zero_stage == 1 else 0
    assert booked == planned - later
