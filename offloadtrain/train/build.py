"""Builds a `TrainingContext` from a job: torch, device, plan, data, model, optimizer; per rank."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from offloadtrain.config.batch_split import shards, shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config, problems_of_ranks
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig, Precision
from offloadtrain.config.units import format_bytes, parse_bytes
from offloadtrain.data.batches import Batches, Masking
from offloadtrain.data.prepare import prepare
from offloadtrain.data.source import HUB, PYTHON_STDLIB
from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.data.tokens import DataError, TokenFile, verify
from offloadtrain.engine import OffloadOptimizer, offload
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.integrations import hf_job
from offloadtrain.integrations.hf_trace import HfTrace
from offloadtrain.model.language_model import LanguageModel, OwnModel
from offloadtrain.model.transformer import LossTerms, Transformer
from offloadtrain.optim.update_rules import decay_groups, update_rule
from offloadtrain.parallel.mesh import Mesh
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.parallel.tensor.own_model import divided, initializer
from offloadtrain.plan.costs.microbatch import Trace
from offloadtrain.plan.placement import PlanError, resolved
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import settled
from offloadtrain.plan.tracing.tracer import ShapeTrace
from offloadtrain.runtime import kernels
from offloadtrain.runtime.detect_machine import here
from offloadtrain.runtime.device import resolve_device, resolve_precision
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.process_group import ALONE, RankError, Ranks
from offloadtrain.runtime.thread_pools import POOLS, shared_pool
from offloadtrain.train.run_folder import ResumedSettings
from offloadtrain.train.saved_state import seed_all

if TYPE_CHECKING:
    from offloadtrain.parallel.pipeline.language_model import PipelinedModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """Everything the training loop uses.

    Attributes:
        local: the job as this rank runs it: its part of the global batch and of the model.
        ranks: all ranks; the loop uses their collectives.
        replicas: the ranks that hold the same part of the model, in all copies of the state; they
            divide the batch.
        pipelined: this rank's stage of a pipeline; None if it holds all layers.
        precision: precision of the working weights, with "auto" resolved.
        why: the reason for the precision if "auto" chose it; else "".
        plan: the plan of this job on this machine.
        val_tokens: None if the job has no validation tokens.
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
    ranks: Ranks = ALONE,
    rank_info: RankInfo | None = None,
    resumed: ResumedSettings | None = None,
) -> TrainingContext:
    """Build everything in the state before the first step. Every rank calls this.

    Args:
        rank_info: rank, local rank and sizes of this process; default: a single rank.
        resumed: settings of the checkpoint to resume; None for a new run.

    Raises:
        ConfigError: the machine or the data lacks what the job requests.
        DataError: a token file is missing or damaged.
        HostMemoryError: the engine's host memory does not fit.
    """
    rank_info = rank_info or RankInfo()
    device = resolve_device(job.device.kind)
    set_up_torch(job, device, rank_info, resumed)
    kernels.start_threads()
    for name in POOLS:
        shared_pool(name)
    precision, why = _precision(job.offload.precision, device, ranks, resumed)
    chosen = replace(
        job, offload=_offload_options(job, precision, why), device=replace(job.device, kind="auto")
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
    )
    _check_same_job(job, train_tokens, ranks)
    check_tokenizers(job, train_tokens, val_tokens, resumed)
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
    """Divide the ranks into pipeline stages, tensor-parallel parts, groups that share a copy of the
    state, or expert groups. Without these options all ranks are replicas that share one copy.

    Raises:
        ConfigError: the ranks cannot be divided as the job requests.
    """
    group = shards(job, ranks.size)
    table = job.ranks
    if table.pipeline == table.tensor == table.expert == 1 and group == ranks.size:
        return Mesh(replicas=ranks)
    return Mesh.make(table.pipeline, device, table.tensor, group, table.expert)


def _precision(
    requested: Precision, device: torch.device, ranks: Ranks, resumed: ResumedSettings | None
) -> tuple[Precision, str]:
    """Return the precision, equal on all ranks and for the whole run: "auto" is measured once.

    Raises:
        ConfigError: this rank's GPU does not compute in this precision.
    """
    if requested == "auto" and resumed is not None:
        chosen, why = resumed.precision, "as before"
    else:
        chosen, why = ranks.broadcast_object(resolve_precision(requested, device))
    resolve_precision(chosen, device)
    return chosen, why


def described(job: Config) -> Config:
    """Return the job with the full shape of its model; `model.hf` needs transformers for that.

    Raises:
        ConfigError: transformers is missing, does not know the model, or [ranks] asks for stages
            that cannot divide it; or the model does not support an option of the job.
    """
    if job.hf is None:
        return job
    isolated = job.data.packing == "isolated"
    varlen = job.data.seq_len if job.data.varlen_attention else 0
    hf_job.check_can(job.hf, chunked=job.train.chunked_loss, isolated=isolated, varlen=varlen)
    return replace(job, hf=hf_job.described(job.hf, job.ranks, job.model.num_layers))


def _offloaded(
    config: Config, shape: ModelShape, device: torch.device, mesh: Mesh
) -> tuple[LanguageModel, AnyOptimizer, PipelinedModel | None]:
    """Build and offload the model, or this rank's stage of it.

    Args:
        shape: shape of the model with all stages.
    """
    train, terms = config.train, None
    if train.chunked_loss:
        terms = LossTerms(train.label_smoothing, train.z_loss)
    if config.stage is not None:
        # torch's schedules take seconds to import, which other jobs do not need.
        stage: PipelinedModel
        if config.hf is None:
            from offloadtrain.parallel.pipeline.language_model import offload_own_stages

            stage = offload_own_stages(config, shape, terms, mesh, device)
        else:
            from offloadtrain.integrations.hf_stages import offload_stages

            stage = offload_stages(config, shape.num_layers, terms, mesh, device)
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
            varlen=config.data.varlen_attention,
            mesh=None if mesh.is_plain else mesh,
        )
        return module, optimizer, None
    model = divided(shape, mesh)
    model.chunked_loss, model.varlen_attention = terms, config.data.varlen_attention
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
        mesh: mesh of the ranks; None: all ranks are replicas.
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
    """Raise RankError if ranks have different job files, overrides or token files."""
    of_ranks = ranks.gather((asdict(job), tokens.header.content))
    for rank, (other, content) in enumerate(of_ranks):
        if other != of_ranks[0][0]:
            keys = [key for key, value in other.items() if value != of_ranks[0][0][key]]
            raise RankError(f"rank {rank} has another job than rank 0: {', '.join(keys)} differ")
        if content != of_ranks[0][1]:
            raise RankError(f"rank {rank} has other tokens in {tokens.path} than rank 0")


def _offload_options(job: Config, precision: Precision, why: str) -> OffloadConfig:
    """Return the job's options with the resolved precision. Disk state goes next to the runs
    unless the job names a folder.

    Raises:
        ConfigError: an option contradicts the precision; it names both keys.
    """
    offload = job.offload.replace(precision=precision)
    if offload.uses_disk and not offload.memory.scratch_dir:
        offload = offload.replace(scratch_dir=job.runs_dir)
        Path(job.runs_dir).mkdir(parents=True, exist_ok=True)  # --run-dir may be elsewhere
    chosen = f" (offload.precision = {offload.precision}: {why})" if why else ""
    if problems := [f"offload.{problem}{chosen}" for problem in offload.problems()]:
        raise ConfigError(*problems)
    return offload


def _planned(
    config: Config, device: torch.device, rank_info: RankInfo, ranks: Ranks, mesh: Mesh
) -> Plan:
    """Plan the job, and refuse it before the first allocation if it does not fit.

    Raises:
        PlanError: the engine's own memory does not fit.
        ConfigError: Liger's kernels cannot run here.
    """
    if config.hf is not None:
        hf_job.check_liger(config.hf, device)
    name, machine = here(on_gpu=device.type == "cuda")
    if config.device.machine:
        # This machine's memory, with the rates of another one where those are set.
        name, other = find(config.device.machine)
        rates: dict[str, Any] = {
            rate: getattr(other, rate) or getattr(machine, rate)
            for rate in ("bf16_tflops", "fp16_tflops", "fp32_tflops")
        }
        machine = replace(
            other,
            gpu=machine.gpu,
            gpu_memory=machine.gpu_memory,
            host_memory=machine.host_memory,
            host_reserved="",
            node_link_gbps=other.node_link_gbps or other.gpu_link_gbps,
            **rates,
        )
    machine = replace(machine, gpus=rank_info.local_size)
    trace = needed_trace(config, machine, ranks.size)
    local = settled(config, name, machine, ranks.size, trace)
    # All ranks use the decisions of rank 0. The broadcast turns tuples into lists.
    options, each = ranks.broadcast_object([local.offload.options(), local.ranks.layers_per_stage])
    stages = replace(config.ranks, layers_per_stage=tuple(each))
    chosen = replace(config, offload=OffloadConfig(**options), ranks=stages)
    plan = make(chosen, name, machine, ranks.size, trace, mesh.stages.rank)
    if problems := plan.certain_problems:
        raise PlanError(
            f"{config.name} does not fit: {' '.join(problems)}. What to change: offloadtrain plan"
        )
    return plan


def needed_trace(job: Config, machine: Machine, ranks: int) -> Trace | None:
    """Return the trace that a plan of this job requires; None if a shape estimate is enough.

    With `offload.activation = "offload_saved"` autograd's saved tensors go to the host one by one,
    and the layout of host memory needs the size of each.
    """
    needed = job.offload.activations.mode == "offload_saved"
    # For foreign models the shape-based estimate of activations is too coarse to fill a device.
    needed = needed or (job.hf is not None and job.offload.activations.recompute_blocks == "auto")
    return tracer_of(job, machine, ranks) if needed else None


def tracer_of(job: Config, machine: Machine, ranks: int) -> Trace:
    """Return the tracer of a microbatch of one rank; the trace itself runs on first use.

    Raises:
        PlanError: the machine does not support device, precision or state format.
        ConfigError: the ranks cannot share the batch.
    """
    of_rank = shared(resolved(job, machine), ranks)
    if of_rank.hf is not None:
        return HfTrace(of_rank, machine.on_cpu)
    return ShapeTrace(machine.on_cpu)


def open_on_ranks(
    config: Config, ranks: Ranks, *, verifies: bool
) -> tuple[TokenFile, TokenFile | None]:
    """Open and verify the token files; rank 0 prepares missing ones first. Every rank
    calls this.

    Args:
        verifies: this rank compares the checksums of the files; set it on one rank per host.

    Raises:
        ConfigError: the vocabulary of a file is larger than the model's.
        DataError: a file is missing or damaged.
    """
    # The other ranks wait until rank 0 has prepared the files.
    if ranks.rank:
        ranks.barrier()
    opened = open_tokens(config)
    if ranks.rank == 0:
        ranks.barrier()
    for tokens in filter(None, opened):
        _check_vocabulary(config, tokens)
    for tokens in filter(None, opened if verifies else ()):
        verify(tokens, partial(HEARTBEAT.advance, "verifying the tokens"))
    # No rank continues before the files of its host are verified.
    ranks.barrier()
    return opened


def open_tokens(config: Config) -> tuple[TokenFile, TokenFile | None]:
    """Open the token files of a job; a job with a source prepares them first."""
    data = config.data
    if not data.source:
        return TokenFile(data.train), TokenFile(data.val) if data.val else None
    named = data.source == PYTHON_STDLIB or data.source.startswith(HUB)
    if not named and not Path(data.source).exists():
        raise DataError(
            f"data.source = {data.source} is not there. Set it to a file of text or records or a "
            "folder of them (--set data.source=my_texts), or name token files made by "
            "`offloadtrain prepare my_texts data` (--set data.train=data/train.bin "
            "data.val=data/val.bin)"
        )
    folder = Path(data.cache) / (Path(data.source).stem or "source")
    made = prepare(
        data.source,
        folder,
        val_fraction=data.val_fraction,
        tokenizer=data.tokenizer or _tokenizer_of_weights(config) or "bytes",
        form=data.form,
        field=data.field,
        chat_template=data.chat_template,
        progress=partial(HEARTBEAT.advance, "preparing the data"),
    )
    if made.remark:
        _log.warning(made.remark)
    return TokenFile(made.train), TokenFile(made.val) if made.val else None


def epoch_tokens(job: Config) -> int:
    """Return the tokens of one epoch of a job: those of complete windows, or of documents.

    Raises:
        DataError: the tokens cannot be read, or are too few.
    """
    with TemporaryDirectory() as cache:
        tokens, _ = open_tokens(replace(job, data=replace(job.data, cache=cache)))
        seq_len, packing = job.data.seq_len, job.data.packing
        return Batches(tokens, batch=1, seq_len=seq_len, packing=packing).windows * seq_len


def masking_of(config: Config, tokens: TokenFile) -> Masking | None:
    """Return the masking of a masked-language-model job; None for a decoder."""
    if config.hf is not None or config.model.is_causal:
        return None
    return Masking(config.model.mask_token, tokens.header.vocab_size)


def _check_vocabulary(config: Config, tokens: TokenFile) -> None:
    masks = config.hf is None and not config.model.is_causal
    if masks and tokens.header.vocab_size > config.model.mask_token:
        raise ConfigError(
            f"{tokens.path} has tokens of a vocabulary of {tokens.header.vocab_size}, and "
            f"model.vocab_size = {config.model.vocab_size} must be at least "
            f'{tokens.header.vocab_size + 1}: with model.objective = "mlm" its last row is the '
            "mask token"
        )
    if tokens.header.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{tokens.path} has tokens of a vocabulary of {tokens.header.vocab_size}, and "
            f"model.vocab_size = {config.model.vocab_size}; "
            + ("set it to at least that" if config.hf is None else "use the model's own tokenizer")
        )


def _tokenizer_of_weights(config: Config) -> str:
    """Return the folder of the job's initial weights if it has a tokenizer; else ""."""
    if config.hf is None or config.hf.init != "weights":
        return ""
    with suppress(FileNotFoundError):  # a run resumes without its folder
        folder = config.hf.folder
        if any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
            return str(folder)
    return ""


def check_tokenizers(
    config: Config,
    train: TokenFile,
    val: TokenFile | None,
    resumed: ResumedSettings | None = None,
) -> None:
    """
    Raises:
        ConfigError: the files are known to use different tokenizers, or another one than the
            job's, or the tokenizer that decodes the final sample is not available.
    """
    identity = train.header.tokenizer_id
    if val is not None and val.header.tokenizer_id not in ("", identity):
        raise ConfigError(
            f"{val.path} is of another tokenizer ({val.header.tokenizer}) than {train.path} "
            f"({train.header.tokenizer}): prepare both with one"
        )
    wanted = config.data.tokenizer
    if wanted and identity not in ("", tokenizer(wanted).identity):
        raise ConfigError(
            f"data.tokenizer = {wanted}, but {train.path} was prepared with another one "
            f"({train.header.tokenizer}): prepare it again, or leave data.tokenizer out"
        )
    is_new = identity not in ("", "" if resumed is None else resumed.tokenizer)
    if is_new and not wanted and (folder := _tokenizer_of_weights(config)):
        with suppress(DataError):  # a tokenizer that cannot be read here
            if tokenizer(folder).identity != identity:
                raise ConfigError(
                    f"{train.path} was prepared with another tokenizer ({train.header.tokenizer}) "
                    f"than that of the weights: prepare it again with --tokenizer {folder}, or set "
                    f'data.tokenizer = "{train.header.tokenizer}" to train them on other tokens'
                )
    if not config.train.sample_tokens:
        return
    try:
        if identity not in ("", tokenizer(train.header.tokenizer).identity):
            raise DataError(f"the tokenizer {train.header.tokenizer} is another one by now")
    except DataError as error:
        raise ConfigError(
            f"train.sample_tokens = {config.train.sample_tokens}, but the text cannot be decoded: "
            f"{train.path}: {error}; set train.sample_tokens = 0"
        ) from None


def set_up_torch(
    config: Config, device: torch.device, rank_info: RankInfo, resumed: ResumedSettings | None
) -> None:
    """Set up this process, before anything is drawn or allocated.

    Raises:
        ConfigError: the limit on GPU memory cannot be applied.
    """
    # Dropout differs between ranks, but not between tensor-parallel ranks of the same batch.
    seed_all(config.train.seed + rank_info.rank // config.ranks.tensor)
    torch.set_num_threads(_threads(config, device, rank_info, resumed))
    if config.device.threads:
        kernels.set_threads(config.device.threads)
    elif rank_info.local_size > 1 and device.type == "cpu":
        kernels.set_threads(_share(rank_info))
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.train.deterministic)
    limit = config.device.process_memory_limit
    if limit and device.type != "cuda":
        raise ConfigError(
            "device.process_memory_limit bounds the memory of a GPU, and this run computes on the "
            "CPU: leave it out"
        )
    if limit:
        total = torch.cuda.get_device_properties(device).total_memory
        if parse_bytes(limit) > total:
            raise ConfigError(
                f"device.process_memory_limit = {limit}, and the GPU has {format_bytes(total)}"
            )
        # torch enforces the limit for every allocation.
        torch.cuda.set_per_process_memory_fraction(parse_bytes(limit) / total, device)


def _threads(
    config: Config, device: torch.device, rank_info: RankInfo, resumed: ResumedSettings | None
) -> int:
    """Return torch's number of threads: the job's; OMP_NUM_THREADS, for a single rank; the
    checkpoint's, since bits depend on it; else torch's default or the usable CPUs per rank."""
    if config.device.threads:
        return config.device.threads
    alone = rank_info.local_size == 1
    if alone and "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    if resumed is not None and resumed.threads and resumed.ranks == rank_info.size:
        return min(resumed.threads, len(os.sched_getaffinity(0)))
    if not alone and device.type == "cuda":
        return torch.get_num_threads()
    return _share(rank_info) if not alone else min(torch.get_num_threads(), _share(rank_info))


def _share(rank_info: RankInfo) -> int:
    """Return the CPUs per rank of this host by affinity and quota; at least 1."""
    usable, quota = len(os.sched_getaffinity(0)), cgroup.cpu_quota()
    if quota is not None:
        usable = min(usable, int(quota))
    return max(1, usable // rank_info.local_size)
