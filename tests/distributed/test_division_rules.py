"""How ranks divide a job, what each rank is called, and which jobs are refused at the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.config.batch_split import (
    explain,
    replicas,
    roles,
    shards,
    shared,
)
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.plan.search.suggest import choices_of
from tests.distributed.divisions import DEEP, DIVISIONS, EXPERT, STAGES, TENSOR
from tests.distributed.rank_jobs import Options, job_of, save_hf_model

Refused = list[tuple[Options, str]]

REFUSED: dict[str, Refused] = {
    "one rank": [
        ({"offload.resident_blocks": 1}, r"or zero_stage = 3: otherwise all blocks stay"),
    ],
    "stages": [
        (
            {"model.num_experts": 4},
            "set model.router_aux_loss_coef = 0",
        ),
        ({"model.num_layers": 3}, "each stage needs 2 layers; set it to at most 1"),
        ({"model.tie_embeddings": "true"}, "set model.tie_embeddings = false"),
        ({"train.sample_tokens": 5}, "no process holds the whole model"),
        ({"ranks.pipeline": 0}, "ranks.pipeline = 0 must be at least 1"),
        ({"ranks.schedule": '"zb"'}, "ranks.schedule"),
    ],
    "interleaved": [
        ({"ranks.stages_per_rank": 1}, '"interleaved" is for 2 and more stages on each rank'),
        ({"ranks.schedule": '"1f1b"'}, '"interleaved" is for 2 and more stages on each rank'),
        ({"model.num_layers": 6}, "each stage needs 2 layers; set it to at most 1"),
        ({"offload.update": '"speculative"'}, "Set offload.update = 'exact', or"),
        ({"offload.state_on": '"auto"'}, "Set offload.state_on = 'host', or"),
        ({"offload.state_on": '"disk"'}, "Set offload.state_on = 'host', or"),
        ({"offload.host_memory_limit": '"8 GiB"'}, "Set offload.host_memory_limit = 0, or"),
        ({"offload.device_memory_limit": '"8 GiB"'}, "Set offload.device_memory_limit = 0, or"),
        ({"ranks.stages_per_rank": 0}, "ranks.stages_per_rank = 0 must be at least 1"),
    ],
    "2bw": [
        ({"offload.update": '"exact"'}, "and offload.update = 'exact': .* Set it, or"),
        ({"offload.warmup_steps": 2}, "Set offload.warmup_steps = 0, or"),
        ({"offload.working": '"disk"'}, "Set offload.working = 'host', or"),
        ({"offload.skip_unused": '["*.norm*"]'}, r"Set offload.skip_unused = \[\], or"),
        ({"offload.state_on": '"disk"'}, "Set offload.state_on = 'host', or"),
        ({"offload.state_on": '"auto"'}, "Set offload.state_on = 'host', or"),
        ({"optim.name": '"muon"'}, "Set optim.name = 'adamw', or"),
        ({"train.on_spike": '"skip"'}, "Set train.on_spike = 'report', or"),
    ],
    "parts": [
        ({"ranks.tensor": 3}, "ranks.tensor = 3 does not divide model.num_heads = 4"),
        ({"ranks.tensor": 4}, "does not divide model.num_kv_heads = 2"),
        ({"model.d_ff": 65}, "does not divide model.d_ff = 65"),
        ({"ranks.tensor": 0}, "ranks.tensor = 0 must be at least 1"),
        ({"model.num_experts": 2}, "divides no experts"),
        ({"offload.state": '"int8"', "offload.precision": '"bf16"'}, '"fp32" or "split16"'),
        ({"optim.name": '"lamb"'}, 'set optim.name = "adamw"'),
        ({"offload.compile_blocks": "true"}, "ranks.tensor = 2 and offload.compile_blocks = true"),
        ({"train.sample_tokens": 5}, "offloadtrain generate RUN afterwards"),
    ],
    "experts": [
        ({"ranks.expert": 3}, "ranks.expert = 3 does not divide model.num_experts = 4"),
        ({"model.num_experts": 0}, "does not divide model.num_experts = 0"),
        ({"ranks.expert": 0}, "ranks.expert = 0 must be at least 1"),
        ({"ranks.pipeline": 2, "model.num_layers": 4}, "passes on no load-balancing loss"),
        ({"ranks.shard": 2}, "or ranks.shard = 0"),
        ({"offload.state": '"int8"', "offload.precision": '"bf16"'}, '"fp32" or "split16"'),
        ({"optim.name": '"lamb"'}, 'set optim.name = "adamw"'),
        ({"train.sample_tokens": 5}, "offloadtrain generate RUN afterwards"),
        ({"offload.activation": '"offload_saved"'}, "ranks.expert"),
    ],
    "parts, experts": [
        ({"ranks.expert": 1}, r"divide them by ranks\.expert, too"),
        ({"model.num_kv_heads": 1}, r"ranks\.tensor = 2 does not divide model\.num_kv_heads"),
    ],
    "stages, parts": [
        (
            {"model.num_experts": 4, "model.router_aux_loss_coef": 0.0} | EXPERT,
            "Set one of the three to 1",
        ),
    ],
    "stages, experts": [
        ({"model.router_aux_loss_coef": 0.01}, "passes on no load-balancing loss"),
    ],
}


def divided_job(name: str, folder: Path = Path("data"), **changes: Any) -> Config:
    division = DIVISIONS[name]
    return job_of(folder, **division.model | division.options | changes)


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_cannot_be_divided_is_refused(name: str) -> None:
    for changes, message in REFUSED[name]:
        with pytest.raises(ConfigError, match=message) as refused:
            divided_job(name, **changes)
        if name == "2bw":  # the same job with flushes is the way out, and is accepted
            assert 'ranks.schedule = "1f1b"' in str(refused.value)
            divided_job(name, **changes | {"ranks.schedule": '"1f1b"'})
    divided_job(name)


def test_options_that_a_division_allows() -> None:
    zero_3 = divided_job("one rank", **{"offload.zero_stage": 3, "offload.resident_blocks": 1})
    assert zero_3.offload.weights.resident_blocks == 1  # where shards are gathered, blocks can stay
    divided_job("parts, experts", **{"model.d_ff": 49})  # experts are whole


HF_REFUSED: list[tuple[str, Options, Options, str]] = [
    ("Llama", {}, STAGES | {"model.lora": "{r = 2}"}, "model.lora: a pipeline divides no adapters"),
    (
        *("Llama", {"hf.num_hidden_layers": 3}, STAGES),
        "each stage needs 2 layers; set it to at most 1",
    ),
    (
        *("Llama", {"hf.tie_word_embeddings": True}, STAGES),
        "config.json tie_word_embeddings = false",
    ),
    ("Llama", {}, STAGES | {"train.sample_tokens": 5}, "no process holds the whole model"),
    ("OPT", {"hf.word_embed_proj_dim": 32, "hf.ffn_dim": 48}, STAGES, "OPTForCausalLM cannot be"),
    (
        *("Llama", {}, TENSOR | {"model.lora": "{r = 2}"}),
        "the parts of matrices divide no adapters",
    ),
    ("Llama", {}, {"ranks.tensor": 4}, "does not divide model.num_kv_heads = 2"),
    (
        *("Llama", {"hf.attention_dropout": 0.1}, TENSOR),
        "drop the same places in the heads of all",
    ),
    ("Apertus", {}, TENSOR, "'model.layers.0.mlp.act_fn' gets a part of its input, and its plan"),
    ("Doge", {}, TENSOR, r"its code fails in parts \(Attempting to broadcast a dimension"),
    ("HrmText", {}, TENSOR, r"has 'L_module.layers.\*.self_attn.q_proj' = 'colwise'"),
]


@pytest.mark.parametrize(
    ("kind", "config", "options", "message"),
    [
        pytest.param(*row, marks=() if row[2].items() >= STAGES.items() else pytest.mark.slow)
        for row in HF_REFUSED
    ],
)
def test_a_model_of_transformers_that_cannot_be_divided_is_refused(
    data: Path, kind: str, config: Options, options: Options, message: str
) -> None:
    """When it is described, before anything is built."""
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=message):
        job_of(data, hf=kind, **config, **options)


@pytest.mark.slow
def test_a_tied_parameter_that_no_configuration_names_is_refused(data: Path) -> None:
    """The class ties the embeddings; its config.json says nothing about them."""
    pytest.importorskip("transformers")
    path = save_hf_model(data, "Gemma2", tie_word_embeddings=True) / "config.json"
    values = json.loads(path.read_text())
    del values["tie_word_embeddings"]
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="one tied parameter"):
        job_of(data, hf="Gemma2", **{"hf.tie_word_embeddings": True}, **STAGES)


RANKS_REFUSED: list[tuple[str, Options, int, str]] = [
    ("one rank", {"train.grad_accum_steps": 1}, 3, "take 2, or a batch that 3 divides"),
    ("stages", {}, 3, r"ranks.pipeline = 2 and 3 ranks"),
    (
        *("stages", {"train.micro_batch": 1, "train.grad_accum_steps": 1}, 2),
        r"1 sequences per step .* a microbatch for each stage",
    ),
    (
        *("2bw", {"train.micro_batch": 1, "train.grad_accum_steps": 1}, 2),
        "2bw needs a microbatch for each stage",
    ),
    ("parts", {}, 3, r"ranks.tensor = 2 and 3 ranks: .* \(--nproc\)"),
    ("experts", {}, 3, r"ranks.expert = 2 and 3 ranks: .* \(--nproc\)"),
    ("parts, experts", {}, 6, r"experts for a part\. Start a multiple of 4"),
    ("stages, parts", {}, 6, r"each part of each stage .* Start a multiple of 4"),
    ("stages, experts", {}, 6, r"experts of a stage\. Start a multiple of 4"),
]
SHARDS_REFUSED: list[tuple[Options, int, str]] = [
    ({"ranks.shard": 1}, 4, r"ranks.shard = 1 must be 0 \(all ranks share the state\) or at least"),
    ({"ranks.shard": -2}, 4, "ranks.shard = -2 must be 0"),
    ({}, 1, r"ranks.shard = 2 and 1 rank: .* Start a multiple of 2 \(--nproc\)"),
    ({"ranks.shard": 4}, 2, "ranks.shard = 4 and 2 ranks: each group of 4 holds a whole copy"),
    (DEEP | STAGES | {"ranks.shard": 4}, 4, "2 of each part .* multiple of 8"),
    (TENSOR, 2, "ranks.shard = 2 and 2 ranks, 1 of each part of the model"),
]


def test_a_number_of_ranks_that_does_not_divide_is_refused() -> None:
    for name, changes, size, message in RANKS_REFUSED:
        with pytest.raises(ConfigError, match=message):
            shared(divided_job(name, **changes), size)
    for changes, size, message in SHARDS_REFUSED:
        with pytest.raises(ConfigError, match=message):
            shards(divided_job("groups", **changes), size)


def test_every_rank_has_a_role() -> None:
    for name, division in DIVISIONS.items():
        if division.roles:
            assert roles(divided_job(name), division.ranks) == division.roles


def test_ranks_that_see_other_batches() -> None:
    """Replicas: ranks that divide the batch. The others compute other layers or parts."""
    for name, size, expected in (
        *(("stages", 4, 2), ("parts", 4, 2), ("experts", 4, 4), ("groups", 4, 4)),
        *(("parts, experts", 8, 4), ("stages, parts", 8, 2), ("stages, experts", 8, 4)),
    ):
        assert replicas(divided_job(name), size) == expected, name


def test_the_division_is_explained() -> None:
    for name, size, text in (
        ("2bw", 2, "2 stages of one rank each (2bw: no flush between steps) share"),
        ("interleaved", 2, "2 ranks with 2 of 4 stages each share 8 sequences"),
        ("groups", 4, "4 ranks, every 2 of which hold a copy of the state, share 4 seq"),
        ("parts", 2, "1 group of 2 ranks (tensor parallel)"),
        ("stages, parts", 8, "2 stages of 4 ranks each, every 2 of which divide its matrices"),
        ("stages, experts", 4, "2 stages of 2 ranks each, every 2 of which hold all experts"),
    ):
        job = divided_job(name)
        assert text in explain(job, shared(job, size), size)


def test_choices_of_a_search() -> None:
    """A search changes the ranks that share all experts, as far as the other divisions allow."""
    assert choices_of(divided_job("experts"), 4)["ranks.expert"] == (2, 4)
    assert choices_of(divided_job("parts, experts"), 4)["ranks.expert"] == (2,)
    job = divided_job("stages, experts")
    alone = replace(job, ranks=replace(job.ranks, expert=1))
    assert choices_of(alone, 4)["ranks.expert"] == (1, 2)
