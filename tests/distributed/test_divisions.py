"""Six properties of training jobs that are divided among ranks, for each division of the table.

1. Training: the job trains the model of its reference, to the bit where sums have one order.
2. Plan: every rank allocates and sends what the plan says.
3. Checkpoints: a checkpoint is the same in every division.
4. Resuming: a stopped job continues as if it had not stopped.
5. Moving: a stopped job continues in another division.
6. Failing: a killed rank is named, and the job restarts from its checkpoint.

What is refused before ranks start is in `test_division_rules.py`.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any, Literal

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config.batch_split import explain, shared
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import Plan, make
from offloadtrain.train import dry_run
from tests.distributed.conftest import Run
from tests.distributed.divisions import (
    DIVISIONS,
    INTERLEAVED,
    TWO_VERSIONS,
    ZERO_3,
    Division,
)
from tests.distributed.rank_faults import HANG_S, Job
from tests.distributed.rank_jobs import (
    BF16,
    CONSTANT,
    FP16,
    FP32,
    Options,
    RankRun,
    assert_as_planned,
    assert_same_run,
    assert_same_state,
    convert,
    evaluations,
    figures,
    job_of,
    losses_are_close,
    master_difference,
    newest,
    train,
    without_loss,
    write_job,
)
from tests.distributed.test_faults import ended, started

EVAL: Options = {"train.eval_every": 4, "train.eval_batches": 4}
NO_EVAL: Options = {"train.eval_every": 0}
GPT2: Options = {
    "model.bias": "true",
    "model.norm": '"layernorm"',
    "model.mlp": '"gelu"',
    "model.positions": '"learned"',
    "model.tie_embeddings": "true",
}
UNTIED_GPT2: Options = GPT2 | {"model.tie_embeddings": "false"}
STREAMED: Options = {"offload.working": '"host"'}
DEVICE_STATE: Options = {"offload.state_on": '"device"'}
SPLIT16: Options = BF16 | {"offload.state": '"split16"'}
DELAYED: Options = {"offload.update": '"delayed"'}
SPECULATIVE: Options = {"offload.update": '"speculative"'}
RECOMPUTE: Options = {"offload.activation": '"recompute"'}
OFFLOADED: Options = {"offload.activation": '"offload"'}
PARTITIONED: Options = {"offload.partition_activations": "true"}
CHUNKED: Options = {"train.chunked_loss": "true"}
ISOLATED: Options = {"data.packing": '"isolated"'}
CLIPPED: Options = {"offload.clip_norm": 0.5}
DROPOUT: Options = {"model.dropout": 0.1}
SKIPPING: Options = {
    "model.num_experts": 8,
    "model.experts_per_token": 1,
    "model.router_aux_loss_coef": 0.0,
    "model.d_ff": 48,
    "offload.skip_unused": '["*.experts.*"]',
    "data.seq_len": 8,
    "train.micro_batch": 1,
    "train.eval_every": 0,
} | FP32
"""Few tokens, which many experts do not get."""
EIGHT_LAYERS: Options = {"model.num_layers": 8}

HF_GPT2: Options = {
    "hf": "GPT2",
    "hf.n_inner": 48,
    # The same places are dropped in all parts and in one process: nothing between is divided.
    **{"hf.num_key_value_heads": 4, "hf.attn_pdrop": 0.1, "hf.resid_pdrop": 0.1},
}
MIXTRAL: Options = {"hf": "Mixtral", "hf.num_local_experts": 4}
QWEN3_MOE: Options = {
    "hf": "Qwen3Moe",
    **{"hf.num_experts": 4, "hf.num_experts_per_tok": 2, "hf.moe_intermediate_size": 48},
}
MASTERS_APART = 1e-3
"""Where sums have another order: a tenth of what one step of lr moves."""

Level = Literal["quick", "slow", "long"]


def case(*values: Any, level: Level = "slow") -> Any:
    """Make a case of a table; level quick runs only those that it names."""
    marks = () if level == "quick" else (getattr(pytest.mark, level),)
    texts = (
        "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)
        for value in values
    )
    return pytest.param(*values, marks=marks, id="; ".join(texts) or None)


def keys(division: Division, options: Options) -> Options:
    """Return the keys of a divided job. With a model of transformers only those of the division."""
    model = {} if "hf" in options else division.model
    return model | division.options | options


def undivided(division: Division, options: Options) -> Options:
    """Return the keys of the job to compare with."""
    every = keys(division, options)
    return {key: value for key, value in every.items() if not key.startswith("ranks.")} | {
        key: value for key, value in division.reference.items() if key.startswith("ranks.")
    }


def plan_of(division: Division, data: Path, options: Options) -> Plan:
    return make(job_of(data, **options), *find("cpu2"), division.ranks)


def assert_plans_are_proved(division: Division, data: Path, options: Options) -> None:
    """The dry run lays each stage out as planned, and finds no race."""
    stages = options.get("ranks.pipeline", 1)
    for stage in range(stages // options.get("ranks.stages_per_rank", 1) or 1):
        plan = make(job_of(data, **options), *find("cpu2"), division.ranks, stage=stage)
        report = dry_run.check(plan)
        assert "as planned" in report and "free of races" in report
        assert plan.ranks == division.ranks


# 1. Training

TRAINED = [
    case("zero", EVAL, level="quick"),
    case("zero on 4", EVAL | {"offload.zero_stage": 1}),
    case("groups", EVAL | {"train.eval_batches": 8} | ZERO_3),
    case("groups", EVAL | {"train.eval_batches": 8} | DELAYED | STREAMED),
    case("groups and one group", EVAL),
    case("groups of stages", NO_EVAL, level="long"),
    case("groups of parts", NO_EVAL, level="long"),
    case("stages", EVAL | FP16 | ISOLATED),
    case("gpipe", CHUNKED | STREAMED),
    case("stages of 2", EVAL | RECOMPUTE),
    case("balanced stages", {}),
    case("interleaved", EVAL | OFFLOADED | STREAMED),
    case("interleaved on 4", RECOMPUTE | DELAYED | {"offload.zero_stage": 1}, level="long"),
    case("interleaved, 4 x 2 stages", CHUNKED, level="long"),
    case("interleaved, 2 x 3 stages", {"offload.state": '"split16"'}, level="long"),
    case("2bw", EVAL | STREAMED | SPLIT16 | {"train.checkpoint_every": 3}),
    case("2bw on 4", EVAL | CLIPPED),
    case("2bw, 4 stages", DEVICE_STATE | CHUNKED | NO_EVAL | {"train.checkpoint_every": 0}),
    case("2bw", {"model.num_experts": 4, "model.router_aux_loss_coef": 0.0}, level="long"),
    case("2bw, groups", {"train.grad_accum_steps": 16}, level="long"),
    case("parts", EVAL | GPT2, level="quick"),
    case("parts on 4", ZERO_3 | EVAL),
    case("parts", RECOMPUTE | STREAMED),
    case("experts", EVAL, level="quick"),
    case("four experts", EVAL | {"model.experts_per_token": 1, "offload.zero_stage": 1}),
    case("experts on 4", EVAL | GPT2 | ZERO_3),
    case("parts, experts", EVAL | GPT2),
    case("stages, parts", UNTIED_GPT2 | BF16 | RECOMPUTE | PARTITIONED),
    case("stages, parts", TWO_VERSIONS | SPLIT16),
    case("stages, parts", INTERLEAVED | EIGHT_LAYERS | CHUNKED, level="long"),
    case("stages, experts", EVAL | FP16),
    case("stages, experts", INTERLEAVED | EIGHT_LAYERS | ZERO_3),
    case("stages", SKIPPING),
    case("experts", SKIPPING),
]

TRANSFORMERS_TRAINED = [
    case("stages", {"hf": "Llama"} | CHUNKED | STREAMED),
    case("stages", {"hf": "GPT2", "model.init": '"random"'} | EVAL),
    case("stages of 2", {"hf": "Gemma2"} | EVAL | RECOMPUTE, level="long"),
    case("interleaved", {"hf": "Qwen2", "hf.num_hidden_layers": 8} | EVAL | CHUNKED, level="long"),
    case("2bw", {"hf": "Qwen3"}, level="long"),
    case("parts", {"hf": "Phi3"} | FP32 | STREAMED),
    case("parts", MIXTRAL | FP32 | RECOMPUTE),
    case("parts", HF_GPT2 | FP32),
    *(
        case("parts", {"hf": kind} | FP32, level="long")
        for kind in ("Qwen3", "Gemma2", "Olmo2", "Glm4", "Gemma3Text", "GPTNeoX", "Granite")
    ),
    case("parts", QWEN3_MOE | FP32, level="long"),
    case("stages, parts", {"hf": "Llama"} | FP32 | CHUNKED | ISOLATED),
    case("stages, parts", {"hf": "Gemma2", "model.init": '"random"'} | FP32, level="long"),
]


@pytest.mark.draws(0.3)
@pytest.mark.parametrize(("name", "options"), [*TRAINED, *TRANSFORMERS_TRAINED])
def test_a_divided_job_trains_the_model_of_its_reference(
    ranks: Run,
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: Options,
) -> None:
    """The bits of the reference, or with another order of sums values near it; and as planned."""
    division = DIVISIONS[name]
    few = {"train.steps": 8, "train.checkpoint_every": 4} | options
    divided, plain = keys(division, few), undivided(division, few)
    require_transformers(options)
    plan = plan_of(division, data, divided)
    expected, run = tmp_path / "expected", tmp_path / "run"
    first, *_ = ranks(division.reference_ranks, train, expected, data, **plain)
    runs: list[RankRun] = ranks(division.ranks, train, run, data, **divided)

    assert all(rank.losses == runs[0].losses for rank in runs)  # the mean over all ranks
    assert {rank.val_loss for rank in runs} == {runs[0].val_loss}
    assert runs[0].tokens == first.tokens
    assert_reported_once(runs, run)
    if division.order == "same":
        assert_same_run(expected, run, division.ranks)
        assert evaluations(run) == evaluations(expected)
        assert runs[0].val_loss == first.val_loss
    elif division.order == "same sums":
        for rank in range(division.ranks):
            assert without_loss(figures(run, rank)) == without_loss(figures(expected)), rank
        assert_same_state(run, expected)
        assert_near(runs[0], first, 1e-6)
    else:
        assert_near(runs[0], first, 1e-4)
        if "experts" in name and division.reference_ranks == division.ranks:
            assert runs[0].losses[1] == first.losses[1]  # experts compute the same bits elsewhere
        norms = [float(figures(folder)[0][2]) for folder in (expected, run)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)  # every gradient counts once
        difference = master_difference(expected, run)
        with capsys.disabled():
            print(f"\n{name}, {options}: the worst master differs by {difference:.2g}")
        assert 0 < difference < MASTERS_APART
    flushes = divided.get("ranks.schedule") != TWO_VERSIONS["ranks.schedule"]
    if "ranks.pipeline" in divided and division.reference_ranks == 1 and flushes:
        # A rank reports the traffic of all its stages and of no other.
        traffic = zip(*(rank.d2h_bytes for rank in runs), strict=True)
        assert [sum(step) for step in traffic] == first.d2h_bytes

    assert_allocated_and_sent_as_planned(runs, plan, divided)
    assert_plans_are_proved(division, data, divided)
    if division.stages and {"ranks.schedule", "hf.num_hidden_layers"}.isdisjoint(options):
        assert tuple(rank.parts["stage"] for rank in runs) == division.stages
    if "ranks.tensor" in divided and division.roles and "ranks.shard" not in divided:
        for rank, role in zip(runs, division.roles, strict=True):
            assert rank.parts["part"].startswith("part") and role.endswith(rank.parts["part"])


def require_transformers(options: Options) -> None:
    if "hf" in options:
        pytest.importorskip("transformers")


def assert_near(run: RankRun, expected: RankRun, rel: float) -> None:
    assert losses_are_close(run.losses, expected.losses, rel)
    if expected.val_loss is None:
        assert run.val_loss is None
    else:
        assert run.val_loss == pytest.approx(expected.val_loss, rel=rel)


def assert_reported_once(runs: list[RankRun], folder: Path) -> None:
    """Rank 0 alone reports the times of all ranks, and writes each step to the metrics."""
    assert [len(rank.ranks_ms) for rank in runs] == [len(runs)] + [0] * (len(runs) - 1)
    assert all((rank.busy_ms.get("comm", 0.0) > 0) == (rank.comm_bytes > 0) for rank in runs)
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert logged == [*runs[0].losses.items()]


def assert_allocated_and_sent_as_planned(runs: list[RankRun], plan: Plan, options: Options) -> None:
    for rank in runs:
        assert_as_planned(rank)
        if "ranks.pipeline" not in options and "ranks.tensor" not in options:
            assert rank.comm_bytes == plan.prediction.comm_bytes


# 2. Plan


@pytest.mark.draws(0.35)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        case("zero", ZERO_3 | {"model.d_model": 128}),
        case("zero", BF16 | STREAMED | {"offload.state": '"int8"'}),
        case("zero on 4", {"offload.zero_stage": 1, "offload.reduction": '"fp32"'} | BF16),
        case("groups", ZERO_3 | BF16, level="quick"),
        case("groups", BF16 | {"offload.reduction": '"fp32"'} | DEVICE_STATE),
        case("parts", STREAMED | SPECULATIVE),
        case("parts", OFFLOADED | PARTITIONED),
        case("experts", SPLIT16 | DELAYED),
        case("experts", ZERO_3 | {"offload.device_slots": 1, "model.num_layers": 4}),
        case("experts on 4", ZERO_3 | BF16 | {"model.num_layers": 1, "model.d_ff": 512}),
        case("experts on 4", SPECULATIVE | OFFLOADED | {"train.grad_accum_steps": 8}),
        case("parts, experts", SPLIT16 | ZERO_3 | {"model.num_layers": 1}),
        case("parts on 4", MIXTRAL | BF16 | ZERO_3),
    ],
)
def test_every_rank_allocates_and_sends_what_was_planned(
    ranks: Run, tmp_path: Path, data: Path, name: str, options: Options
) -> None:
    """To the byte, by tier and owner."""
    require_transformers(options)
    division = DIVISIONS[name]
    few = {"train.steps": 3, "optim.warmup_steps": 0, "train.checkpoint_every": 0} | NO_EVAL
    divided = keys(division, options) | few
    plan = plan_of(division, data, divided)
    runs = ranks(division.ranks, train, tmp_path / "run", data, **divided)
    assert_allocated_and_sent_as_planned(runs, plan, divided)
    assert_plans_are_proved(division, data, divided)
    if "ranks.shard" in divided:
        assert plan.placed.spec.copies == 2 and (plan.hosts, plan.local_ranks) == (1, 4)


# 3. Checkpoints


@pytest.mark.slow
@pytest.mark.draws(0.3)
@pytest.mark.parametrize(
    ("first", "then", "options"),
    [
        case("groups", "one rank", DELAYED),
        case("zero", "groups", ZERO_3),
        case("zero", "one rank", SPLIT16 | DELAYED),
        case("groups of 2 on 6", "groups of 3", BF16 | {"train.grad_accum_steps": 6}, level="long"),
        case("parts", "one rank", SPLIT16),
        case("one rank", "parts on 4", GPT2),
        case("four parts", "parts on 4", {"model.num_kv_heads": 4} | STREAMED),
        case("four experts", "experts", {"offload.zero_stage": 1}),
        case("experts on 4", "zero", STREAMED),
        case("parts, experts", "four experts", SPLIT16 | DELAYED),
        case("parts", "stages, parts", UNTIED_GPT2 | BF16),
        case("stages, experts", "experts", ZERO_3),
        case("stages", "stages, experts", {}),
        case("experts", "one rank", SKIPPING),
        case("one rank", "stages", SKIPPING | {"model.tie_embeddings": "false"}),
        case("one rank", "parts", {"hf": "Qwen3"} | FP32),
        case("parts on 4", "zero on 4", MIXTRAL | BF16 | {"offload.zero_stage": 2}),
        case("stages, parts", "one rank", {"hf": "Llama"} | FP32),
        case("parts", "zero", HF_GPT2 | FP32, level="long"),
    ],
)
def test_a_checkpoint_is_the_same_in_every_division(
    ranks: Run,
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    first: str,
    then: str,
    options: Options,
) -> None:
    """Converted and converted back, it has the same tensors, each saved once, and one export."""
    require_transformers(options)
    before, after = DIVISIONS[first], DIVISIONS[then]
    few = options | {"train.steps": 3} | NO_EVAL
    chosen = few if "hf" in options else after.model | before.model | few
    run, other, back = (tmp_path / name for name in ("run", "other", "back"))
    job_of(data, **chosen | before.options)  # saves the model of transformers once
    ranks(before.ranks, train, run, data, **chosen | before.options)
    ranks(after.ranks, convert, run, other, data, **chosen | after.options)
    assert_same_state(run, other)
    ranks(before.ranks, convert, other, back, data, **chosen | before.options)
    assert_same_state(run, back)

    assert main(["checkpoints", str(run), "--verify"]) == 0
    no_export = {"model.positions", "model.experts_per_token"}
    if no_export.isdisjoint(options):  # no model of transformers has the other shapes
        weights = []
        for folder in (run, other):
            target = f"{folder}-exported"
            assert main(["export", str(newest(folder).path), target, "--dtype", "fp32"]) == 0
            weights.append(Path(target, "model.safetensors").read_bytes())
        assert weights[0] == weights[1]
    if "hf" not in options:
        assert main(["generate", str(run), "--prompt", "a", "--max-tokens", "3"]) == 0
    capsys.readouterr()
    if "ranks.shard" in before.options:
        sizes = [file.stat().st_size for file in sorted(newest(run).path.glob("rank-*.bin"))]
        assert len(sizes) == before.ranks and all(sizes)  # every group writes a share


# 4. Resuming


@pytest.mark.draws(0.35)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        case("zero", BF16 | DROPOUT, level="quick"),
        case("groups", ZERO_3 | FP16 | DROPOUT),
        case("zero", ZERO_3 | DELAYED | BF16),
        case("2bw on 4", DEVICE_STATE | CLIPPED),
        case("interleaved", DELAYED),
        case("parts", DELAYED | FP16 | DROPOUT),
        case("experts", SKIPPING),
        case("parts, experts", ZERO_3 | DROPOUT),
        case("stages", {"hf": "Gemma2"}),
    ],
)
def test_a_stopped_job_continues_to_the_bit(
    ranks: Run, tmp_path: Path, data: Path, name: str, options: Options
) -> None:
    """Without flushes also from a checkpoint that was written during later steps."""
    require_transformers(options)
    division = DIVISIONS[name]
    chosen = keys(division, options) | CONSTANT | {"train.checkpoint_every": 5}
    job_of(data, **chosen)
    complete, run = tmp_path / "complete", tmp_path / "run"
    ranks(division.ranks, train, complete, data, **chosen)
    ranks(division.ranks, train, run, data, **chosen | {"train.steps": 7})
    ranks(division.ranks, train, run, data, resume=True, **chosen)
    assert_same_run(complete, run, division.ranks)
    if not name.startswith("2bw"):
        return
    before = figures(run)
    (run / "checkpoints/step-00000012").rename(tmp_path / "last")
    ranks(division.ranks, train, run, data, resume=True, **chosen)
    assert figures(run) == before + [figure for figure in before if figure[0] > 10]


# 5. Moving


@pytest.mark.draws(0.3)
@pytest.mark.parametrize(
    ("path", "options"),
    [
        case(("one rank", "zero"), {}, level="quick"),
        case(("zero", "groups", "zero"), {}),
        case(("balanced stages", "stages"), {"model.num_layers": 5}),
        case(("2bw", "one rank"), DELAYED | EIGHT_LAYERS),
        case(("one rank", "2bw"), DELAYED | EIGHT_LAYERS),
        case(("2bw", "2bw, 4 stages"), SPLIT16 | STREAMED | EIGHT_LAYERS),
        case(("2bw, streamed", "2bw"), {}, level="long"),
        case(("2bw", "stages"), DELAYED | EIGHT_LAYERS, level="long"),
        case(("interleaved", "stages"), DELAYED | EIGHT_LAYERS),
        case(("four stages", "interleaved"), DELAYED | EIGHT_LAYERS, level="long"),
        case(("one rank", "interleaved"), DELAYED | EIGHT_LAYERS, level="long"),
        case(("parts", "one rank"), {}),
        case(("zero", "experts"), {}),
        case(("stages, parts", "parts"), {}),
        case(("one rank", "stages"), {"hf": "Gemma2"}),
    ],
)
def test_a_stopped_job_continues_in_another_division(
    ranks: Run, tmp_path: Path, data: Path, path: tuple[str, ...], options: Options
) -> None:
    """Stopped once or twice; to the bit or, where sums have another order, near the run that never
    stopped."""
    require_transformers(options)
    divisions = [DIVISIONS[name] for name in path]
    models = [division.model for division in reversed(divisions)]
    chosen: Options = {} if "hf" in options else {k: v for m in models for k, v in m.items()}
    chosen |= CONSTANT | {"train.checkpoint_every": 5} | options
    ends = {2: (7, 12), 3: (4, 8, 12)}[len(path)]
    complete, run = tmp_path / "complete", tmp_path / "run"
    job_of(data, **chosen | divisions[0].options)
    ranks(divisions[0].ranks, train, complete, data, **chosen | divisions[0].options)
    for division, steps in zip(divisions, ends, strict=True):
        some = chosen | division.options | {"train.steps": steps}
        runs = ranks(division.ranks, train, run, data, resume=steps > ends[0], **some)
    orders = {division.order for division in divisions if not is_reference(division, divisions)}
    if orders <= {"same"}:
        assert figures(run) == figures(complete)
        assert_same_state(run, complete)
    elif orders <= {"same sums", "same"}:
        assert without_loss(figures(run)) == without_loss(figures(complete))
        assert_same_state(run, complete)
    else:
        expected = {figure[0]: figure[1] for figure in figures(complete)}
        later = {step: expected[step] for step in range(ends[-2] + 1, 13)}
        for rank in runs:
            losses = {step: rank.losses[step] for step in later}
            assert losses_are_close(losses, later, 1e-4)
        assert 0 < master_difference(complete, run) < MASTERS_APART


def is_reference(division: Division, divisions: list[Division]) -> bool:
    """Tell whether this is the undivided job of all the others."""
    return all(
        other is division
        or (other.reference_ranks, other.reference) == (division.ranks, division.options)
        for other in divisions
    )


# 6. Failing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "killed", "fault", "options"),
    [
        case("groups", 2, "backward:kill", DROPOUT),
        case("parts, experts", 3, "backward:kill", DROPOUT, level="long"),
        case("stages, experts", 2, "backward:kill", DROPOUT),
        case("stages, parts", 3, "forward:stop", DROPOUT, level="long"),
        case("interleaved", 1, "backward:kill", {}, level="long"),
        case("2bw", 0, "backward:kill", STREAMED, level="long"),
        case("stages", 1, "backward:kill", {"hf": "Llama"}, level="long"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_job_comes_back(
    tmp_path: Path, pools: object, name: str, killed: int, fault: str, options: Options
) -> None:
    """Restarted from its checkpoint, the job has the bits of a run in which nothing failed."""
    require_transformers(options)
    division = DIVISIONS[name]
    path = write_job(tmp_path, **keys(division, options))
    least = ("--nproc", f"{division.ranks}", "--set", f"train.hang_timeout_s={HANG_S}")
    fails = (fault, "6", f"{killed}")
    run = Job.finished(path, tmp_path / "run", *least, "--max-restarts", "1", fault=fails)
    what = "was killed by SIGKILL" if fault.endswith("kill") else "makes no progress"
    role = rf"rank {killed} \({division.roles[killed]}, pid \d+\) {what}"
    assert re.search(role, run.text), run.text
    job = job_of(tmp_path, **keys(division, options))
    assert explain(job, shared(job, division.ranks), division.ranks).split(":")[0] in run.text
    Job.finished(path, tmp_path / "complete", *least)
    last = {figure[0]: figure for figure in figures(tmp_path / "run")}
    assert list(last.values()) == figures(tmp_path / "complete")
    assert_same_state(tmp_path / "run", tmp_path / "complete")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stages", "parts"])
def test_the_other_ranks_end_and_name_the_one_that_failed(
    tmp_path: Path, pools: object, name: str
) -> None:
    division = DIVISIONS[name]
    with started(write_job(tmp_path, **keys(division, {})), "backward", 1) as processes:
        codes = [ended(process) for process in processes]
    assert codes == [1, -signal.SIGKILL]
    output = (tmp_path / "output0").read_text()
    assert f"another rank has failed: rank 1 ({division.roles[1]}, pid" in output
