"""The table of divisions: ways to share one training job among ranks.

A division has the ranks, the options that divide the job, and a reference: fewer or undivided
ranks that must train the same model. `tests/distributed/test_divisions.py` tests each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.distributed.rank_jobs import FP32, Options

SMALL: Options = {
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.dropout": 0.0,
    "log.to": '["jsonl"]',
    **FP32,
}
"""Two layers, in fp32."""
ONE_ROW: Options = SMALL | {"train.micro_batch": 1, "train.grad_accum_steps": 4}
"""Two ranks take two microbatches each and four ranks one: the same microbatches and sums."""
DEEP: Options = {
    "model.tie_embeddings": "false",
    "model.num_layers": 4,
    "model.dropout": 0.0,
    "train.micro_batch": 2,
    "train.grad_accum_steps": 4,
    "log.to": '["jsonl"]',
}
"""Layers for two stages, in bf16."""
DEEPER: Options = DEEP | {"model.num_layers": 8}
DEEP_HEADS: Options = SMALL | DEEP
EXPERTS: Options = {
    "model.num_experts": 4,
    "model.d_ff": 48,
    "model.router_aux_loss_coef": 0.01,
    "model.dropout": 0.0,
    "log.to": '["jsonl"]',
    **FP32,
}
DEEP_EXPERTS: Options = DEEP | EXPERTS | {"model.router_aux_loss_coef": 0.0}

STAGES: Options = {"ranks.pipeline": 2}
INTERLEAVED: Options = {
    "ranks.pipeline": 2,
    "ranks.schedule": '"interleaved"',
    "ranks.stages_per_rank": 2,
}
TWO_VERSIONS: Options = {
    "ranks.pipeline": 2,
    "ranks.schedule": '"2bw"',
    "offload.update": '"delayed"',
}
GPIPE: Options = {"ranks.pipeline": 2, "ranks.schedule": '"gpipe"'}
FOUR_STAGES: Options = {"ranks.pipeline": 4}
TENSOR: Options = {"ranks.tensor": 2}
EXPERT: Options = {"ranks.expert": 2}
SHARD: Options = {"ranks.shard": 2}
ZERO_3: Options = {"offload.zero_stage": 3}

Order = Literal["same", "same sums", "other"]
"""How the numbers of a division relate to those of its reference: "same" bits; "same sums": all
bits but those of the loss, which is a mean over another number of ranks; "other": gradients are
summed in another order."""


@dataclass(frozen=True)
class Division:
    """A way to share one job among ranks.

    Attributes:
        options: divide the job. Options of the table `[ranks]` are replaced by `reference` in the
            run to compare with; others apply to both.
        model: shape and batch of the jobs that are divided.
        roles: what messages call each rank.
        stages: what the plan in the log calls the stage of each rank.
    """

    ranks: int
    options: Options
    model: Options
    reference_ranks: int
    reference: Options
    order: Order
    roles: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()


_STAGE_1, _STAGE_2 = (
    "stage 1 of 2 (embedding, layers 0 to 1)",
    "stage 2 of 2 (layers 2 to 3, head)",
)
_STAGE_ROLES = ("stage 1 of 2", "stage 2 of 2")
_EXPERT_ROLES = ("experts 0 to 1", "experts 2 to 3")

DIVISIONS: dict[str, Division] = {
    "one rank": Division(1, {}, SMALL, 1, {}, "same"),
    "zero": Division(2, {}, SMALL, 1, {}, "other"),
    "zero on 4": Division(4, {}, SMALL, 1, {}, "other"),
    # Hybrid sharding.
    "groups": Division(
        *(4, SHARD, ONE_ROW, 2, {}, "same sums"),
        roles=("group 1 of 2",) * 2 + ("group 2 of 2",) * 2,
    ),
    "groups and one group": Division(4, SHARD, ONE_ROW, 4, {}, "other"),
    "groups of 3": Division(6, {"ranks.shard": 3}, ONE_ROW, 6, {}, "other"),
    "groups of 2 on 6": Division(6, SHARD, ONE_ROW, 6, {}, "other"),
    "groups of stages": Division(
        *(8, GPIPE | SHARD, DEEP | ONE_ROW, 4, GPIPE, "same sums"),
        roles=tuple(
            f"stage {stage} of 2, group {group} of 2" for stage in (1, 2) for group in (1, 1, 2, 2)
        ),
    ),
    "groups of parts": Division(
        *(8, TENSOR | SHARD, ONE_ROW, 4, TENSOR, "same sums"),
        roles=tuple(
            f"group {group} of 2, part {part} of 2" for group in (1, 1, 2, 2) for part in (1, 2)
        ),
    ),
    # Pipelines.
    "stages": Division(
        2, STAGES, DEEP, 1, {}, "same", roles=_STAGE_ROLES, stages=(_STAGE_1, _STAGE_2)
    ),
    "stages of 2": Division(
        *(4, STAGES, DEEP, 2, {}, "same"),
        roles=("stage 1 of 2",) * 2 + ("stage 2 of 2",) * 2,
        stages=(_STAGE_1,) * 2 + (_STAGE_2,) * 2,
    ),
    "four stages": Division(4, FOUR_STAGES, DEEPER, 1, {}, "same"),
    "gpipe": Division(2, GPIPE, DEEP, 1, {}, "same"),
    # The plan balances them: the stage with the head has fewer layers.
    "balanced stages": Division(
        *(2, STAGES | {"ranks.layers_per_stage": '"auto"'}, DEEP | {"model.num_layers": 5}),
        *(1, {}, "same"),
        stages=("stage 1 of 2 (embedding, layers 0 to 2)", "stage 2 of 2 (layers 3 to 4, head)"),
    ),
    "interleaved": Division(
        *(2, INTERLEAVED, DEEPER, 1, {}, "same"),
        roles=("stages 1 and 3 of 4", "stages 2 and 4 of 4"),
        stages=(
            "stages 1 and 3 of 4 (embedding, layers 0 to 1; layers 4 to 5)",
            "stages 2 and 4 of 4 (layers 2 to 3; layers 6 to 7, head)",
        ),
    ),
    "interleaved on 4": Division(4, INTERLEAVED, DEEPER, 2, {}, "same"),
    "interleaved, 4 x 2 stages": Division(
        *(4, INTERLEAVED | FOUR_STAGES, DEEP | {"model.num_layers": 16}, 1, {}, "same")
    ),
    "interleaved, 2 x 3 stages": Division(
        *(2, INTERLEAVED | {"ranks.stages_per_rank": 3}, DEEP | {"model.num_layers": 12}),
        *(1, {}, "same"),
    ),
    "2bw": Division(2, TWO_VERSIONS, DEEP, 1, {}, "same", roles=_STAGE_ROLES),
    "2bw, streamed": Division(2, TWO_VERSIONS | {"offload.working": '"host"'}, DEEP, 1, {}, "same"),
    "2bw on 4": Division(4, TWO_VERSIONS, DEEP, 2, {}, "same"),
    "2bw, 4 stages": Division(4, TWO_VERSIONS | FOUR_STAGES, DEEPER, 1, {}, "same"),
    "2bw, groups": Division(8, TWO_VERSIONS | SHARD, DEEP, 4, {}, "same"),
    # Tensor parallelism.
    "parts": Division(2, TENSOR, SMALL, 1, {}, "other", roles=("part 1 of 2", "part 2 of 2")),
    "parts on 4": Division(4, TENSOR, SMALL, 2, {}, "other"),
    "four parts": Division(
        4, {"ranks.tensor": 4}, SMALL | {"model.num_kv_heads": 4}, 1, {}, "other"
    ),
    # Expert parallelism.
    "experts": Division(2, EXPERT, EXPERTS, 2, {}, "other", roles=_EXPERT_ROLES),
    "experts on 4": Division(4, EXPERT, EXPERTS, 4, {}, "other"),
    "four experts": Division(4, {"ranks.expert": 4}, EXPERTS, 4, {}, "other"),
    # Two of them.
    "parts, experts": Division(
        *(4, TENSOR | EXPERT, EXPERTS, 2, EXPERT, "other"),
        roles=tuple(f"part {part} of 2, {experts}" for experts in _EXPERT_ROLES for part in (1, 2)),
    ),
    "stages, parts": Division(
        *(4, STAGES | TENSOR, DEEP_HEADS, 2, TENSOR, "same"),
        roles=tuple(f"{stage}, part {part} of 2" for stage in _STAGE_ROLES for part in (1, 2)),
        stages=(_STAGE_1,) * 2 + (_STAGE_2,) * 2,
    ),
    "stages, experts": Division(
        *(4, STAGES | EXPERT, DEEP_EXPERTS, 2, EXPERT, "same"),
        roles=tuple(f"{stage}, {experts}" for stage in _STAGE_ROLES for experts in _EXPERT_ROLES),
        stages=(_STAGE_1,) * 2 + (_STAGE_2,) * 2,
    ),
}
