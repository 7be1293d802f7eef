"""The public function `plan_model()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from offloadtrain.config.hf_model import HfModel
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig, OffloadOptions, chosen_options
from offloadtrain.config.sections import DataConfig, OptimConfig, TrainConfig
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan import report
from offloadtrain.plan.layout import parts_of_module
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search import suggest
from offloadtrain.plan.search.suggest import Change
from offloadtrain.plan.tracing.step import TraceError
from offloadtrain.plan.tracing.tracer import Tracer
from offloadtrain.plan.tracing.values import give_values, has_values
from offloadtrain.runtime.detect_machine import here


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The result of `plan_model`; `print` it for a report.

    Attributes:
        plan: memory by owner and tier, the time of a step, and whether it fits.
        changes: changes that make it fit, fastest first; empty if it fits.
    """

    plan: Plan
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def device_bytes(self) -> int:
        """Peak bytes on each device, including activations."""
        return sum(self.plan.device.values())

    @property
    def host_bytes(self) -> int:
        """Host memory of one rank in a step, including Python and torch."""
        return sum(self.plan.host.values())

    def __str__(self) -> str:
        return report.text(self.plan, self.changes)


def plan_model(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    machine: str | Machine = "",
    ranks: int = 1,
    loss: Callable[[Any], Tensor] | None = None,
    config: OffloadConfig | None = None,
    **options: Unpack[OffloadOptions],
) -> ModelPlan:
    """Plan `offload(model, **options)` on a machine, without weights and data.

    The module's forward and backward run once over fake tensors: see [Note: Tracing a step] in
    `trace_step`. Parameters and buffers are counted; activations and FLOPs are traced.
    The model does not change.

    Args:
        model: a model in the mode (train or eval) to plan for, on any device, including meta; or a
            function that creates it, which is called under `torch.device("meta")`.
        batch: a microbatch of one rank, samples first; its tensors may be on the meta device. A
            mapping is passed as `model(**batch)`, a tuple as `model(*batch)`, and anything else as
            `model(batch)`.
        machine: a machine file or the name of a shipped one; default: this machine.
        ranks: number of GPUs, each with such a microbatch.
        loss: maps the model's output to a scalar. Default: its `loss`, or the output if that is a
            scalar.
        config, options: as in `offload`.

    Raises:
        ModelError: `offload` would refuse the model, or it cannot be traced.
        PlanError, MachineError: the machine cannot run it with any memory.
        ValueError: options are out of range or contradictory.
    """
    chosen = chosen_options(config, options).checked()
    name, target = _machine(machine)
    made = model if isinstance(model, nn.Module) else _made(model)
    job = _job(made, batch, chosen, ranks, loaded=isinstance(model, nn.Module))

    def loss_of(fake: nn.Module, config: Config) -> Tensor:
        return _loss(_called(fake, _resized(batch, config.train.micro_batch)), loss)

    packed = isinstance(batch, Mapping) and "position_ids" in batch
    size = job.train.micro_batch // ranks
    trace = Tracer(made, loss_of, size, on_cpu=target.on_cpu, packed=packed)
    plan = make(job, name, target, ranks, trace)
    changes = [] if plan.fits else suggest.nearest(job, name, target, ranks, trace=trace)
    return ModelPlan(plan, tuple(changes))


def _machine(machine: str | Machine) -> tuple[str, Machine]:
    if isinstance(machine, Machine):
        return machine.gpu or "a CPU", machine
    return find(machine) if machine else here(on_gpu=torch.cuda.is_available())


def _made(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


def _job(
    model: nn.Module, batch: Any, config: OffloadConfig, ranks: int, *, loaded: bool
) -> Config:
    """Describe the model as a job for `make`. `loaded`: the host holds the full model before the
    engine has its weights."""
    parts = parts_of_module(model)
    in_memory = loaded and not any(param.is_meta for param in model.parameters())
    kind = type(model).__name__
    samples, length = _sizes(batch)
    return Config(
        name=kind,
        model=ModelShape(vocab_size=1, num_layers=1, d_model=1, num_heads=1),
        hf=HfModel(hf=kind, init="random" if in_memory else "weights", parts=parts),
        data=DataConfig(train="-", seq_len=length),
        optim=OptimConfig(decay="all"),
        offload=config,
        train=TrainConfig(
            steps=1,
            micro_batch=samples * ranks,
            grad_accum_steps=config.grad_accum_steps,
            seed=config.state.seed,
        ),
    )


def _sizes(batch: Any) -> tuple[int, int]:
    """Return (samples, tokens per sample): the longest row of integers, or 1."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        raise TraceError(
            "the batch holds no tensor with samples: give for example "
            '{"input_ids": torch.empty(4, 1024, dtype=torch.long, device="meta")}'
        )
    rows = [t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    return tensors[0].shape[0], max(rows, default=1)


def _resized(batch: Any, samples: int) -> Any:
    """Return the batch as fake tensors, with `samples` in the sample dimension; integers keep their
    values."""
    num_samples = _sizes(batch)[0]

    def fake(tensor: Tensor) -> Tensor:
        with_samples = tensor.dim() and tensor.shape[0] == num_samples
        shape = (samples, *tensor.shape[1:]) if with_samples else tensor.shape
        made = torch.empty(shape, dtype=tensor.dtype, device="cpu")
        if not has_values(tensor):
            return made
        with _disable_current_modes():
            again = torch.arange(samples) % num_samples
            return give_values(made, tensor[again] if with_samples else tensor)

    return tree_map_only(Tensor, fake, batch)


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _loss(out: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        return loss(out)
    scalar = out if isinstance(out, Tensor) else getattr(out, "loss", None)
    if not isinstance(scalar, Tensor) or scalar.numel() != 1:
        raise TraceError(
            f"the model returns {type(out).__name__} without a scalar loss: give loss=, a function "
            "from its output to a scalar"
        )
    return scalar
