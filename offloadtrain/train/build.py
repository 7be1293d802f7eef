"""Construction of the training context from a job: seeds, device, data, model, optimizer."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offloadtrain import optim
from offloadtrain.config.batch_split import replicas
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig, Precision
from offloadtrain.config.units import format_bytes, parse_bytes
from offloadtrain.data.batches import Batches
from offloadtrain.data.prepare import prepare
from offloadtrain.data.source import HUB, PYTHON_STDLIB
from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.data.tokens import DataError, Progress, TokenFile
from offloadtrain.data.verified import verify
from offloadtrain.engine import OffloadOptimizer, offload
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.integrations import hf_job
from offloadtrain.model.language_model import LanguageModel, OwnModel
from offloadtrain.model.transformer import LossTerms, Transformer
from offloadtrain.plan.placement import PlanError
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.suggest import settled
from offloadtrain.runtime import kernels
from offloadtrain.runtime.detect_machine import here
from offloadtrain.runtime.device import resolve_device, resolve_precision
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.mesh import Mesh
from offloadtrain.runtime.process_group import ALONE, RankError, Ranks
from offloadtrain.train import rng
from offloadtrain.train.resume import ResumedSettings

if TYPE_CHECKING:
    from offloadtrain.train.pipelined import PipelinedModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """Everything the training loop uses.

    Attributes:
        local: the job of this rank, with its part of the global batch, and of the model.
        ranks: the ranks, for the loop's own exchanges.
        replicas: those that hold the same part of the model; they divide the batch.
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
    optimizer: OffloadOptimizer
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
    _set_up_torch(job, device, rank_info, resumed)
    _bound_process(job.device.process_memory_limit, device)
    precision, why = _precision(job.offload.precision, device, ranks, resumed)
    chosen = replace(
        job,
        offload=_checked(_on_disk_of(job, replace(job.offload, precision=precision)), why),
        device=replace(job.device, kind="auto"),
    )
    mesh = _mesh(job, device, ranks)
    plan = _planned(chosen, device, rank_info, ranks, mesh)
    config = plan.placed.config
    train_tokens, val_tokens = _open_together(config, on_prepare, ranks)
    if rank_info.local_rank == 0:  # once on each host
        for tokens in filter(None, (train_tokens, val_tokens)):
            verify(tokens, on_verify)
    ranks.barrier()
    _check_same_job(job, train_tokens, ranks)
    _check_tokenizer(config, train_tokens, val_tokens)
    _check_sampling(job, train_tokens)
    model, optimizer, pipelined = _offloaded(config, job.model, device, mesh)
    return TrainingContext(
        local=config,
        ranks=ranks,
        replicas=mesh.replicas,
        model=model,
        pipelined=pipelined,
        optimizer=optimizer,
        batches=Batches(
            train_tokens,
            batch=config.train.micro_batch,
            seq_len=config.data.seq_len,
            packing=config.data.packing,
            seed=config.train.seed,
            rank=mesh.replicas.rank,
            world=mesh.replicas.size,
        ),
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        precision=precision,
        why=why,
        plan=plan,
    )


def _mesh(job: Config, device: torch.device, ranks: Ranks) -> Mesh:
    """Divide the ranks into stages of a pipeline and replicas; without a pipeline all are replicas.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    replicas(job, ranks.size)
    if job.ranks.pipeline == 1:
        return Mesh(replicas=ranks)
    return Mesh.make(job.ranks.pipeline, device)


def _precision(
    asked: Precision, device: torch.device, ranks: Ranks, resumed: ResumedSettings | None
) -> tuple[Precision, str]:
    """Return the precision for all ranks and the whole run: "auto" is measured once.

    Raises:
        ConfigError: this rank's GPU does not compute in it.
    """
    if asked == "auto" and resumed is not None:
        chosen, why = resumed.precision, "as before"
    else:
        chosen, why = ranks.broadcast_object(resolve_precision(asked, device))
    resolve_precision(chosen, device)
    return chosen, why


def described(job: Config) -> Config:
    """Return the job with every parameter of its model known, which `model.hf` needs transformers
    for.

    Raises:
        ConfigError: transformers is not installed, or does not know the model.
    """
    if job.hf is None:
        return job
    return replace(job, hf=hf_job.described(job.hf))


def _offloaded(
    config: Config, shape: ModelShape, device: torch.device, mesh: Mesh
) -> tuple[LanguageModel, OffloadOptimizer, PipelinedModel | None]:
    """Build and offload the model, or this rank's stage of it.

    Args:
        shape: of the whole model.
    """
    train, terms = config.train, None
    if train.chunked_loss:
        terms = LossTerms(train.label_smoothing, train.z_loss)
    if config.hf is not None:
        found, optimizer = hf_job.build(
            config.hf,
            update_rule(config),
            lambda model: decay_groups(model, config),
            config.offload,
            device=device,
            seed=config.train.seed,
            terms=terms,
            isolated=config.data.packing == "isolated",
        )
        return found, optimizer, None
    with torch.device("meta"):  # `offload` creates it block by block: there is never a second copy
        model = Transformer(shape)
    model.chunked_loss = terms
    if config.stage is None:
        return OwnModel(model), offload_job(model, config, device), None
    # torch's schedules take seconds to import, which other jobs do not need.
    from offloadtrain.train.pipelined import offload_stage

    groups = decay_groups(model, config)
    stage = offload_stage(model, update_rule(config), groups, config, mesh, device)
    return stage, stage.pipeline.optimizers[0], stage


def empty_model(config: Config) -> torch.nn.Module:
    """Return the job's model on the meta device; `model.hf` must be described."""
    if config.hf is not None:
        found: torch.nn.Module = hf_job.described_model(config.hf)
        return found
    with torch.device("meta"):
        return Transformer(config.model)


def offload_job(model: Transformer, config: Config, device: torch.device) -> OffloadOptimizer:
    """Offload a model with the options of its job, whose precision is resolved."""
    return offload(
        model,
        update_rule(config),
        params=decay_groups(model, config),
        device=device,
        config=config.offload,
        param_init_fn=model.initializer(config.train.seed),
    )


def _open_together(
    config: Config, on_prepare: Progress | None, ranks: Ranks
) -> tuple[TokenFile, TokenFile | None]:
    """Open the token files on all ranks; rank 0 makes them first if they are missing."""
    if ranks.rank:
        ranks.barrier()
    opened = open_tokens(config, on_prepare)
    if ranks.rank == 0:
        ranks.barrier()
    for tokens in filter(None, opened):
        _check_vocabulary(config, tokens)
    return opened


def _check_same_job(job: Config, tokens: TokenFile, ranks: Ranks) -> None:
    """Raises RankError if ranks have different job files, overrides or token files."""
    of_ranks = ranks.gather((asdict(job), tokens.header.content))
    for rank, (other, content) in enumerate(of_ranks):
        if other != of_ranks[0][0]:
            keys = [key for key, value in other.items() if value != of_ranks[0][0][key]]
            raise RankError(f"rank {rank} has another job than rank 0: {', '.join(keys)} differ")
        if content != of_ranks[0][1]:
            raise RankError(f"rank {rank} has other tokens in {tokens.path} than rank 0")


def _bound_process(limit: str, device: torch.device) -> None:
    """Let torch enforce the limit for every allocation."""
    if not limit:
        return
    if device.type != "cuda":
        raise ConfigError(
            "device.process_memory_limit bounds the memory of a GPU, and this run computes on the "
            "CPU: leave it out"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    if parse_bytes(limit) > total:
        raise ConfigError(
            f"device.process_memory_limit = {limit}, and the GPU has {format_bytes(total)}"
        )
    torch.cuda.set_per_process_memory_fraction(parse_bytes(limit) / total, device)


def open_tokens(
    config: Config, on_prepare: Progress | None = None
) -> tuple[TokenFile, TokenFile | None]:
    """Open the token files of a job, made first if the job names a source."""
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
        tokenizer=data.tokenizer or "bytes",
        form=data.form,
        field=data.field,
        chat_template=data.chat_template,
        progress=on_prepare,
    )
    if made.remark:
        _log.warning(made.remark)
    return TokenFile(made.train), TokenFile(made.val) if made.val else None


def _on_disk_of(job: Config, offload: OffloadConfig) -> OffloadConfig:
    """Put state on the disk beside the runs, unless the job names a folder for it."""
    if not offload.disk_share:
        return offload
    return replace(offload, scratch_dir=offload.scratch_dir or job.runs_dir)


def _checked(offload: OffloadConfig, why: str) -> OffloadConfig:
    """Refuse options that contradict the resolved precision.

    Raises:
        ConfigError: naming both keys.
    """
    chosen = f" (offload.precision = {offload.precision}: {why})" if why else ""
    if problems := [f"offload.{problem}{chosen}" for problem in offload.problems()]:
        raise ConfigError(*problems)
    return offload


def _set_up_torch(
    config: Config, device: torch.device, rank_info: RankInfo, resumed: ResumedSettings | None
) -> None:
    rng.seed_all(config.train.seed + rank_info.rank)  # each rank draws its own dropout
    torch.set_num_threads(_threads(config, device, rank_info, resumed))
    if config.device.threads:
        kernels.set_threads(config.device.threads)
    elif rank_info.local_size > 1 and device.type == "cpu":
        kernels.set_threads(_share(rank_info))
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.train.deterministic)


def _threads(
    config: Config, device: torch.device, rank_info: RankInfo, resumed: ResumedSettings | None
) -> int:
    """Return torch's number of threads: as requested, or as in the checkpoint since bits depend on
    it, or as available."""
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
    """Return the CPUs per rank of this host, by affinity and quota; at least 1."""
    usable, quota = len(os.sched_getaffinity(0)), cgroup.cpu_quota()
    if quota is not None:
        usable = min(usable, int(quota))
    return max(1, usable // rank_info.local_size)


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
    options = asdict(settled(config, name, machine, ranks.size).offload)
    # By rank 0's memory.
    chosen = replace(config, offload=OffloadConfig(**ranks.broadcast_object(options)))
    found = make(chosen, name, machine, ranks.size, stage=mesh.stages.rank)
    if problems := found.certain_problems:
        raise PlanError(
            f"{config.name} does not fit: {' '.join(problems)}. What to change: offloadtrain plan"
        )
    return found


def _rates_of(rates: Machine, here: Machine) -> Machine:
    """Return this machine's memory with other rates, which keep this machine's values if unset."""
    open_rates = ("bf16_tflops", "fp16_tflops", "fp32_tflops")
    kept: dict[str, Any] = {
        rate: getattr(rates, rate) or getattr(here, rate) for rate in open_rates
    }
    return replace(
        rates,
        gpu=here.gpu,
        gpu_memory=here.gpu_memory,
        host_memory=here.host_memory,
        node_link_gbps=rates.node_link_gbps or rates.gpu_link_gbps,
        **kept,
    )


def update_rule(config: Config) -> optim.AnyRule:
    """Return the rule that the job names, with its hyperparameters among the job's."""
    chosen = config.optim
    if chosen.name == "muon":
        rest = optim.AdamW(
            lr=chosen.adamw_lr,
            betas=chosen.betas,
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
        )
        return optim.Muon(
            lr=chosen.lr,
            weight_decay=chosen.weight_decay,
            momentum=chosen.muon_momentum,
            adjust_lr_fn=chosen.adjust_lr,
            rest=rest,
        )
    rule: type[Any] = _RULES[chosen.name]
    made: optim.UpdateRule = rule(
        **{field.name: getattr(chosen, field.name) for field in fields(rule)}
    )
    return made


_RULES: dict[str, Any] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "lion": optim.Lion,
    "sgd": optim.SGD,
    "adagrad": optim.Adagrad,
}


def decay_groups(model: torch.nn.Module, config: Config) -> list[dict[str, Any]]:
    """Return parameter groups: with "matrices", norms and biases do not decay."""
    params = [param for param in model.parameters() if param.requires_grad]
    if config.optim.decay == "all":
        return [{"params": params}]
    groups: list[dict[str, Any]] = [
        {"params": [param for param in params if param.ndim >= 2]},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_sampling(config: Config, tokens: TokenFile) -> None:
    """Raises ConfigError if the text generated after the last step could not be decoded."""
    if not (count := config.train.sample_tokens):
        return
    try:
        identity = tokenizer(tokens.header.tokenizer).identity
        if tokens.header.tokenizer_id not in ("", identity):
            raise DataError(f"the tokenizer {tokens.header.tokenizer} is another one by now")
    except DataError as error:
        raise ConfigError(
            f"train.sample_tokens = {count}, but the text cannot be decoded: {tokens.path}: "
            f"{error}; set train.sample_tokens = 0"
        ) from None


def _check_tokenizer(config: Config, train: TokenFile, val: TokenFile | None) -> None:
    """Raises ConfigError if the files are known not to be of one tokenizer, or not of the job's."""
    identity = train.header.tokenizer_id
    if val is not None and val.header.tokenizer_id not in ("", identity):
        raise ConfigError(
            f"{val.path} is of another tokenizer ({val.header.tokenizer}) than {train.path} "
            f"({train.header.tokenizer}): prepare both with one"
        )
    asked = config.data.tokenizer
    if asked and identity not in ("", tokenizer(asked).identity):
        raise ConfigError(
            f"data.tokenizer = {asked}, but {train.path} was prepared with another one "
            f"({train.header.tokenizer}): prepare it again, or leave data.tokenizer out"
        )


def _check_vocabulary(config: Config, tokens: TokenFile) -> None:
    if tokens.header.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{tokens.path} has tokens of a vocabulary of {tokens.header.vocab_size}, and "
            f"model.vocab_size = {config.model.vocab_size}; set it to at least that"
        )
