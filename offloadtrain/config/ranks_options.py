"""The table [ranks] of a job, which divides its model into stages of a pipeline, parts of matrices,
experts, and shards of the state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, TypeAlias

from offloadtrain.config.errors import broken
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.config.option import at_least, ranged
from offloadtrain.config.toml import shown

Schedule: TypeAlias = Literal["1f1b", "gpipe", "2bw", "interleaved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """The division of the model among ranks; the batch is always divided.

    Attributes:
        pipeline: number of stages of the layers. It must divide the number of ranks; the ranks of
            one stage divide the batch.
        schedule: order of microbatches. "1f1b" has at most as many in flight as stages; "gpipe" has
            all of them in flight; "2bw" continues with the next step without a flush, which needs
            `offload.update = "delayed"`; "interleaved" is 1f1b over `stages_per_rank` stages.
        stages_per_rank: number of stages on each rank with "interleaved". The first stages of all
            ranks come first, then the second stages.
        layers_per_stage: number of layers of each stage, in order; (): as equal as possible.
            "auto", for jobs: the plan balances the computation of the stages and the head, within
            the memory.
        tensor: number of parts of the matrices of every layer (tensor parallel). It must divide the
            number of ranks; the ranks of one part divide the batch.
        shard: number of ranks that share one copy of the state, usually the ranks of a host; each
            such group has a copy (hybrid sharding). 0: all ranks share one copy.
        expert: number of ranks with different experts of every layer (expert parallel). It must
            divide the ranks of each stage. All of them divide the batch.
    """

    pipeline: int = ranged(1, at_least(1))
    schedule: Schedule = "1f1b"
    stages_per_rank: int = ranged(1, at_least(1))
    layers_per_stage: tuple[int, ...] | Literal["auto"] = ()
    tensor: int = ranged(1, at_least(1))
    shard: int = ranged(
        0, ((lambda value: value == 0 or value >= 2), "0 (all ranks share the state) or at least 2")
    )
    expert: int = ranged(1, at_least(1))

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return 1 if self.pipeline == 1 else self.pipeline * self.stages_per_rank

    def stage(self, index: int, layers: int) -> Stage:
        """Return a stage of a model with `layers` layers."""
        return Stage.of(index, self.given_layers or evenly(layers, self.stages))

    @property
    def given_layers(self) -> tuple[int, ...]:
        """`layers_per_stage` after a plan, which has replaced "auto"."""
        assert self.layers_per_stage != "auto"
        return self.layers_per_stage

    @property
    def flushes(self) -> bool:
        """True if every step ends before the next step begins."""
        return self.pipeline == 1 or self.schedule != NO_FLUSH


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a pipeline.

    Attributes:
        first_layer: index of its first layer in the whole model.
        layers: number of layers.
    """

    index: int
    count: int
    first_layer: int
    layers: int

    @classmethod
    def of(cls, index: int, layers_per_stage: Sequence[int]) -> Stage:
        """Return one of the stages with these numbers of layers."""
        first = sum(layers_per_stage[:index])
        return cls(index, len(layers_per_stage), first, layers_per_stage[index])

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def contents(self) -> str:
        """The layers of the stage, for messages."""
        embedding, head = "embedding, " if self.is_first else "", ", head" if self.is_last else ""
        last = self.first_layer + self.layers - 1
        return f"{embedding}layers {self.first_layer} to {last}{head}"


def evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, as equal as possible."""
    bounds = [layers * number // stages for number in range(stages + 1)]
    return tuple(end - first for first, end in pairwise(bounds))


def numbers_of(stages: Sequence[Stage]) -> str:
    """Return the numbers of a rank's stages, counted from 1: "stage 1 of 2"."""
    numbers = " and ".join(str(stage.index + 1) for stage in stages)
    return f"stage{'s' if len(stages) > 1 else ''} {numbers} of {stages[0].count}"


def names_of(stages: Sequence[Stage]) -> str:
    """Return the numbers of a rank's stages, and their layers."""
    return f"{numbers_of(stages)} ({'; '.join(stage.contents for stage in stages)})"


NO_FLUSH: Final = "2bw"
"""The schedule whose steps follow each other without a flush (PipeDream-2BW)."""

INTERLEAVED: Final = "interleaved"
"""The schedule with several stages on each rank."""


def contradictions(
    ranks: RanksConfig,
    model: ModelShape,
    offload: OffloadConfig,
    *,
    is_own: bool,
    samples: bool,
    adapters: bool,
    rule: str,
) -> Iterator[str]:
    """Yield a sentence for each feature that a division of the model does not support.

    Args:
        is_own: the model is the project's transformer.
        samples: the run generates text at the end.
        adapters: the job trains adapters of a frozen model of transformers.
        rule: name of the update rule.
    """
    if ranks.pipeline == 1 and ranks.layers_per_stage:
        yield (
            f"ranks.layers_per_stage = {shown(ranks.layers_per_stage)} is for the stages of a "
            "pipeline: set ranks.pipeline, or leave it out"
        )
    if ranks.pipeline > 1:
        yield from _pipeline_contradictions(ranks, model, is_own=is_own, adapters=adapters)
    if ranks.tensor > 1:
        yield from _tensor_contradictions(ranks, model, is_own=is_own, adapters=adapters)
    if ranks.expert > 1:
        yield from _expert_contradictions(ranks, model, is_own=is_own)
    for key, count, peers, tensors in (
        ("tensor", ranks.tensor, "parts", "matrices"),
        ("expert", ranks.expert, "ranks", "tensors"),
    ):
        setting = f"ranks.{key} = {count}"
        if count > 1:
            yield from broken(
                (
                    offload.compute.compile_blocks,
                    f"{setting} and offload.compile_blocks = true: torch does not compile DTensors "
                    "whose memory moves. Set one of them to its default",
                ),
                (
                    offload.state.format not in ("fp32", "split16"),
                    f"{setting} and offload.state = {offload.state.format!r}: its scales stand for "
                    f"blocks of elements in the order of memory, which other {peers} order "
                    "differently, so that no other mesh could read a checkpoint. Set "
                    'offload.state = "fp32" or "split16"',
                ),
                (
                    rule in ("muon", "lamb"),
                    f"{setting} and optim.name = {rule!r}, which updates whole {tensors}: set "
                    'optim.name = "adamw"',
                ),
            )
    for key, count, holds in (
        ("pipeline", ranks.pipeline, "no process holds the whole model"),
        ("tensor", ranks.tensor, "one rank holds parts of the model"),
        ("expert", ranks.expert, "one rank holds some of the experts"),
    ):
        if samples and count > 1:
            yield (
                f"ranks.{key} = {count} and train.sample_tokens: {holds}. Set "
                "train.sample_tokens = 0, and use offloadtrain generate RUN afterwards"
            )


def _pipeline_contradictions(
    ranks: RanksConfig, model: ModelShape, *, is_own: bool, adapters: bool
) -> Iterator[str]:
    setting, each = f"ranks.pipeline = {ranks.pipeline}", ranks.stages_per_rank
    layers = ranks.layers_per_stage
    if layers and layers != "auto":
        stated = f"ranks.layers_per_stage = {shown(layers)}"
        remedy = f'give each of the {ranks.stages} stages its number, or set "auto"'
        yield from broken(
            (
                len(layers) != ranks.stages,
                f"{stated} has {len(layers)} numbers for {ranks.stages} stages: {remedy}",
            ),
            (
                sum(layers) != model.num_layers,
                f"{stated} are {sum(layers)} layers, and the model has {model.num_layers}: numbers "
                f'that add up to {model.num_layers}, or "auto"',
            ),
            (min(layers) < 2, f"{stated}: each stage needs 2 layers"),
        )[:1]
    tied = "model.tie_embeddings" if is_own else "in its config.json tie_word_embeddings"
    of_each = f" of {each} stages each" if each > 1 else ""
    yield from broken(
        (
            adapters,
            f"{setting} and model.lora: a pipeline divides no adapters. Leave one of them out",
        ),
        (
            (ranks.schedule == INTERLEAVED) != (each > 1),
            f"ranks.schedule = {ranks.schedule!r} and ranks.stages_per_rank = {each}: "
            f'"{INTERLEAVED}" is for 2 and more stages on each rank, the others for 1',
        ),
        (
            2 * ranks.stages > model.num_layers,
            f"{setting}{of_each} and model.num_layers = {model.num_layers}: each stage needs 2 "
            f"layers; set it to at most {max(model.num_layers // max(2 * each, 1), 1)}",
        ),
        (
            model.tie_embeddings,
            f"{setting} would divide tied embeddings: set {tied} = false",
        ),
        (
            model.num_experts and model.router_aux_loss_coef,
            f"{setting} passes on no load-balancing loss of experts (model.num_experts = "
            f"{model.num_experts}): set model.router_aux_loss_coef = 0",
        ),
        (
            ranks.tensor > 1 and ranks.expert > 1,
            f"{setting}, ranks.tensor = {ranks.tensor} and ranks.expert = {ranks.expert}: a stage "
            "divides matrices or experts. Set one of the three to 1",
        ),
    )


def _tensor_contradictions(
    ranks: RanksConfig, model: ModelShape, *, is_own: bool, adapters: bool
) -> Iterator[str]:
    setting = f"ranks.tensor = {ranks.tensor}"
    yield from broken(
        (
            adapters,
            f"{setting} and model.lora: the parts of matrices divide no adapters. Leave one out",
        ),
        (
            model.num_experts and ranks.expert == 1,
            f"{setting} divides no experts (model.num_experts = {model.num_experts}): divide them "
            "by ranks.expert, too, or set ranks.tensor = 1",
        ),
    )
    counts = {"model.num_heads": model.num_heads, "model.num_kv_heads": model.kv_heads}
    counts |= {} if model.num_experts else {"model.d_ff": model.ff_width}
    for key, count in counts.items():
        if count % ranks.tensor:  # each part has whole heads
            other = f", or {key} to a multiple" if is_own else ""  # config.json has it otherwise
            yield (
                f"{setting} does not divide {key} = {count}: each part holds as many as the "
                f"others. Set ranks.tensor to a divisor of it{other}"
            )


def _expert_contradictions(ranks: RanksConfig, model: ModelShape, *, is_own: bool) -> Iterator[str]:
    setting = f"ranks.expert = {ranks.expert}"
    yield from broken(
        (
            not is_own,
            f"{setting} divides the shipped transformer only: leave it out with model.hf",
        ),
        (
            is_own and (model.num_experts % ranks.expert or not model.num_experts),
            f"{setting} does not divide model.num_experts = {model.num_experts}: each rank holds "
            "as many experts as the others. Set ranks.expert to a divisor of it",
        ),
        (
            is_own and ranks.shard,
            f"{setting} and ranks.shard = {ranks.shard}: ranks that hold different experts hold "
            "all else alike, and share its state. Set ranks.expert = 1 or ranks.shard = 0",
        ),
    )


def interleaved_contradictions(ranks: RanksConfig, offload: OffloadConfig) -> Iterator[str]:
    """Yield a sentence for each feature of a job that several stages on a rank do not support,
    because one stage decides by the memory that another leaves free."""
    if ranks.pipeline == 1 or ranks.stages_per_rank == 1:
        return
    for key, value, goes, instead in (
        ("update", offload.update, offload.update != "speculative", "'exact'"),
        ("state_on", offload.state.tier, offload.state.tier in ("host", "device"), "'host'"),
        ("working", offload.weights.tier, offload.weights.tier != "disk", "'host'"),
        ("host_memory_limit", offload.memory.host_limit, offload.memory.host_limit is None, "0"),
        (
            *("device_memory_limit", offload.memory.device_limit),
            *(offload.memory.device_limit is None, "0"),
        ),
    ):
        if not goes:
            yield (
                f"ranks.stages_per_rank = {ranks.stages_per_rank} and offload.{key} = "
                f"{shown(value)}: each stage on a rank would have it for itself. Set "
                f"offload.{key} = {instead}, or ranks.stages_per_rank = 1"
            )


def unflushed_contradictions(
    ranks: RanksConfig, offload: OffloadConfig, *, rule: str, on_spike: str
) -> Iterator[str]:
    """Yield a sentence for each feature that a pipeline without flushes does not support.

    Args:
        rule: name of the update rule.
        on_spike: the action for a step whose loss is far above the usual loss.
    """
    if ranks.flushes:
        return
    setting, tier = f'ranks.schedule = "{NO_FLUSH}"', offload.state.tier
    if offload.update != "delayed":
        yield (
            f"{setting} and offload.update = {offload.update!r}: without a flush every update is "
            'one step late, that of offload.update = "delayed". Set it, or ranks.schedule = "1f1b"'
        )
    for key, value, goes, instead, why in (
        (
            *("offload.warmup_steps", offload.warmup_steps, not offload.warmup_steps, 0),
            "its first steps are delayed, too",
        ),
        (
            *("offload.working", offload.weights.tier, offload.weights.tier != "disk", "host"),
            "both versions of the weights are in memory",
        ),
        (
            *("offload.state_on", tier, tier in ("host", "device"), "host"),
            "all state is on the host, or all on the device",
        ),
        (
            *("offload.skip_unused", [*offload.skip_unused], not offload.skip_unused, []),
            "which experts a step has used would be read when the next one has marked some",
        ),
        (
            *("optim.name", rule, rule != "muon", "adamw"),
            "it updates matrices on the device, where the next step computes",
        ),
        (
            *("train.on_spike", on_spike, on_spike == "report", "report"),
            "the update of a step is asked for before its loss is there on the last stage, and to "
            "wait for that would be the flush that this schedule leaves out",
        ),
    ):
        if not goes:
            yield (
                f"{setting} and {key} = {shown(value)}: {why}. Set {key} = {shown(instead)}, or "
                'ranks.schedule = "1f1b"'
            )
