"""From a job to a `TrainingContext`: device, plan, data, model and optimizer, on every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from offloadtrain.config.batch_split import shards
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config, problems_of_ranks
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig, Precision
from offloadtrain.data.batches import Batches
from offloadtrain.data.tokens import Progress, TokenFile
from offloadtrain.engine import AnyOptimizer, OffloadOptimizer, offload
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.integrations import hf_job
from offloadtrain.model.language_model import LanguageModel, OwnModel
from offloadtrain.model.transformer import LossTerms, Transformer
from offloadtrain.optim.update_rules import decay_groups, update_rule
from offloadtrain.plan.placement import PlanError
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import settled
from offloadtrain.runtime.detect_machine import here
from offloadtrain.runtime.device import resolve_device, resolve_precision
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.mesh import Mesh
from offloadtrain.runtime.process_group import ALONE, RankError, Ranks
from offloadtrain.train.job_trace import needed_trace
from offloadtrain.train.resume import ResumedSettings
from offloadtrain.train.tensor_parallel import divided, initializer
from offloadtrain.train.token_files import check_tokenizers, masking_of, open_on_ranks
from offloadtrain.train.torch_setup import set_up_torch

if TYPE_CHECKING:
    from offloadtrain.train.pipelined import PipelinedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """Everything the training loop uses.

    Attributes:
        local: the job of this rank, with its part of the global batch, and of the model.
        ranks: the ranks, for the loop's own exchanges.
        replicas: those that hold the same part of the model, in all copies of the state; they
            divide the batch.
        pipelined: this rank's stage of a pipeline; None: it holds the whole model.
        precision: precision of the working weights, with "auto" resolved.
        why: the reason for the precision, if it was chosen here.
        plan: the plan of this job on this machine.
        val_tokens: None if nothing is held out.
    """

    local: Config
    ranks: Ranks
    replicas: Ranks
    model: LanguageModel
    pipelined: PipelinedModel | None
    optimizer: AnyOptimizer
    batches: Batches
    train_tokens: TokenFile
    val_tokens: TokenFile | None
    precision: Precision
    why: str
    plan: Plan


def assemble(
    job: Config,
    on_prepare: Progress | None = None,
    ranks: Ranks = ALONE,
    rank_info: RankInfo | None = None,
    resumed: ResumedSettings | None = None,
    on_verify: Progress | None = None,
) -> TrainingContext:
    """Build everything at the state before the first step. Every rank calls this.

    Args:
        on_prepare, on_verify: called with the progress of preparing text, and of verifying tokens.
        rank_info: this process among the ranks; default: a single rank.
        resumed: settings of the checkpoint to resume; None: a new run.

    Raises:
        ConfigError: the machine or the data does not have what the job requests.
        DataError, HostMemoryError: from the verified data and from the engine.
    """
    rank_info = rank_info or RankInfo()
    device = resolve_device(job.device.kind)
    set_up_torch(job, device, rank_info, resumed)
    precision, why = _precision(job.offload.precision, device, ranks, resumed)
    chosen = replace(
        job,
        offload=_checked(_on_disk_of(job, job.offload.replace(precision=precision)), why),
        device=replace(job.device, kind="auto"),
    )
    if problems := list(problems_of_ranks(chosen)):
        raise ConfigError(*problems)
    mesh = _mesh(job, device, ranks)
    plan = _planned(chosen, device, rank_info, ranks, mesh)
    config = plan.placed.config
    train_tokens, val_tokens = open_on_ranks(
        config,
        ranks,
        verifies=rank_info.local_rank == 0,  # once on each host
        on_prepare=on_prepare,
        on_verify=on_verify,
    )
    _check_same_job(job, train_tokens, ranks)
    check_tokenizers(job, train_tokens, val_tokens)
    model, optimizer, pipelined = _offloaded(config, job.model, device, mesh)
    replicas = mesh.replicas.everyone
    return TrainingContext(
        local=config,
        ranks=ranks,
        replicas=replicas,
        model=model,
        pipelined=pipelined,
        optimizer=optimizer,
        batches=Batches(
            train_tokens,
            batch=config.train.micro_batch,
            seq_len=config.data.seq_len,
            packing=config.data.packing,
            seed=config.train.seed,
            rank=replicas.rank,
            world=replicas.size,
            masking=masking_of(job, train_tokens),
        ),
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        precision=precision,
        why=why,
        plan=plan,
    )


def _mesh(job: Config, device: torch.device, ranks: Ranks) -> Mesh:
    """Divide the ranks into stages of a pipeline, replicas in groups that share a copy of the state
    and parts of matrices, or by their experts; without those all are replicas that share one.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    group = shards(job, ranks.size)
    table = job.ranks
    if table.pipeline == table.tensor == table.expert == 1 and group == ranks.size:
        return Mesh(replicas=ranks)
    return Mesh.make(table.pipeline, device, table.tensor, group, table.expert)


def _precision(
    requested: Precision, device: torch.device, ranks: Ranks, resumed: ResumedSettings | None
) -> tuple[Precision, str]:
    """Return the precision for all ranks and the whole run: "auto" is measured once.

    Raises:
        ConfigError: this rank's GPU does not compute in it.
    """
    if requested == "auto" and resumed is not None:
        chosen, why = resumed.precision, "as before"
    else:
        chosen, why = ranks.broadcast_object(resolve_precision(requested, device))
    resolve_precision(chosen, device)
    return chosen, why


def described(job: Config) -> Config:
    """Return the job with every parameter of its model known, which `model.hf` needs transformers
    for.

    Raises:
        ConfigError: transformers is not installed, or does not know the model, or the stages of
            [ranks] cannot divide it; or the model cannot do what the job asks for.
    """
    if job.hf is None:
        return job
    isolated = job.data.packing == "isolated"
    hf_job.check_can(job.hf, chunked=job.train.chunked_loss, isolated=isolated)
    return replace(job, hf=hf_job.described(job.hf, job.ranks, job.model.num_layers))


def _offloaded(
    config: Config, shape: ModelShape, device: torch.device, mesh: Mesh
) -> tuple[LanguageModel, AnyOptimizer, PipelinedModel | None]:
    """Build and offload the model, or this rank's stage of it.

    Args:
        shape: of the whole model.
    """
    train, terms = config.train, None
    if train.chunked_loss:
        terms = LossTerms(train.label_smoothing, train.z_loss)
    if config.stage is not None:
        # torch's schedules take seconds to import, which other jobs do not need.
        from offloadtrain.train import pipelined

        stage = pipelined.offload_stage(config, shape, terms, mesh, device)
        return stage, stage.pipeline.optimizer, stage
    if config.hf is not None:
        module, optimizer = hf_job.build(
            config.hf,
            update_rule(config.optim),
            lambda model: decay_groups(model, config),
            config.offload,
            device=device,
            seed=config.train.seed,
            terms=terms,
            mesh=None if mesh.is_plain else mesh,
        )
        return module, optimizer, None
    model = divided(shape, mesh)
    model.chunked_loss = terms
    return OwnModel(model), offload_job(model, config, device, mesh), None


def empty_model(config: Config) -> torch.nn.Module:
    """Return the job's model on the meta device; `model.hf` must be described."""
    if config.hf is not None:
        model: torch.nn.Module = hf_job.described_model(config.hf)
        return model
    with torch.device("meta"):
        return Transformer(config.model)


def offload_job(
    model: Transformer, config: Config, device: torch.device, mesh: Mesh | None = None
) -> OffloadOptimizer:
    """Offload a model with the options of its job, whose precision is resolved.

    Args:
        mesh: of the ranks; None: all of them are replicas.
    """
    return offload(
        model,
        update_rule(config.optim),
        params=decay_groups(model, config),
        device=device,
        config=config.offload,
        param_init_fn=initializer(model, config.train.seed, mesh or Mesh()),
        mesh=None if mesh is None or mesh.is_plain else mesh,
    )


def _check_same_job(job: Config, tokens: TokenFile, ranks: Ranks) -> None:
    """Raises RankError if ranks have different job files, overrides or token files."""
    of_ranks = ranks.gather((asdict(job), tokens.header.content))
    for rank, (other, content) in enumerate(of_ranks):
        if other != of_ranks[0][0]:
            keys = [key for key, value in other.items() if value != of_ranks[0][0][key]]
            raise RankError(f"rank {rank} has another job than rank 0: {', '.join(keys)} differ")
        if content != of_ranks[0][1]:
            raise RankError(f"rank {rank} has other tokens in {tokens.path} than rank 0")


def _on_disk_of(job: Config, offload: OffloadConfig) -> OffloadConfig:
    """Put what is on the disk beside the runs, unless the job names a folder for it."""
    if not offload.uses_disk:
        return offload
    return offload.replace(scratch_dir=offload.memory.scratch_dir or job.runs_dir)


def _checked(offload: OffloadConfig, why: str) -> OffloadConfig:
    """Refuse options that contradict the resolved precision.

    Raises:
        ConfigError: naming both keys.
    """
    chosen = f" (offload.precision = {offload.precision}: {why})" if why else ""
    if problems := [f"offload.{problem}{chosen}" for problem in offload.problems()]:
        raise ConfigError(*problems)
    return offload


def _planned(
    config: Config, device: torch.device, rank_info: RankInfo, ranks: Ranks, mesh: Mesh
) -> Plan:
    """Refuse a job that does not fit before the first byte is allocated.

    Raises:
        PlanError: the engine's own memory does not fit.
    """
    name, machine = here(on_gpu=device.type == "cuda")
    if config.device.machine:
        name, rates = find(config.device.machine)
        machine = _rates_of(rates, machine)
    machine = replace(machine, gpus=rank_info.local_size)
    trace = needed_trace(config, machine, ranks.size)
    local = settled(config, name, machine, ranks.size, trace)
    # By rank 0's memory and rates. What is sent has no tuples.
    options, each = ranks.broadcast_object([local.offload.options(), local.ranks.layers_per_stage])
    stages = replace(config.ranks, layers_per_stage=tuple(each))
    chosen = replace(config, offload=OffloadConfig(**options), ranks=stages)
    plan = make(chosen, name, machine, ranks.size, trace, mesh.stages.rank)
    if problems := plan.certain_problems:
        raise PlanError(
            f"{config.name} does not fit: {' '.join(problems)}. What to change: offloadtrain plan"
        )
    return plan


def _rates_of(rates: Machine, here: Machine) -> Machine:
    """Return this machine's memory with other rates, which keep this machine's values if unset."""
    open_rates = ("bf16_tflops", "fp16_tflops", "fp32_tflops")
    chosen: dict[str, Any] = {
        rate: getattr(rates, rate) or getattr(here, rate) for rate in open_rates
    }
    return replace(
        rates,
        gpu=here.gpu,
        gpu_memory=here.gpu_memory,
        host_memory=here.host_memory,
        node_link_gbps=rates.node_link_gbps or rates.gpu_link_gbps,
        **chosen,
    )
