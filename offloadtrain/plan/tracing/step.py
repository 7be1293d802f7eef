"""Traces one microbatch of any module under the engine, over fake tensors.

[Note: Tracing a step]
The engine is the real one: partition, forward hooks, saved-tensor hooks, recompute, offloaded block
inputs, casts, and the hooks that take gradients. Only three things are replaced: weights and batch
are fake tensors, lanes launch nothing, and the arena maps nothing. Autograd's graph is therefore
the one of training, and tensors die when they die in training. Weights stay on the device in the
trace: their location does not influence torch's allocations.

Fake tensors are on the CPU, even if the plan is for a GPU: [Note: Operations of a GPU] in
`patches`. A model whose forward reads a tensor's value (`if mask.all()`) cannot be traced.

The shipped transformer for a GPU is traced on the meta device, whose operations take a quarter of
the time of those on fake tensors. Other models may mix devices or read values.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes

from offloadtrain.config.errors import ModelError
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.autograd.casting import attach_casts
from offloadtrain.engine.autograd.forward_hooks import in_backward
from offloadtrain.engine.block import Block
from offloadtrain.engine.build import Resources, build
from offloadtrain.engine.checks import check_model
from offloadtrain.engine.division import Division
from offloadtrain.engine.engine import Engine, hook_parameters
from offloadtrain.engine.param_groups import normalise_groups
from offloadtrain.engine.partition import partition
from offloadtrain.model.loss import cpu_stands_for, few_stand_for_all
from offloadtrain.optim import AdamW
from offloadtrain.plan.costs.microbatch import Activations, BlockCost, TracedStep, Work
from offloadtrain.plan.tracing.alike import (
    AlikePieces,
    Moment,
    Run,
    fake_model,
    moment_of,
    runs_of,
    uniform_runs,
    with_skipped_layers,
)
from offloadtrain.plan.tracing.meter import (
    GRADIENTS,
    MOST_OPERATIONS,
    Meter,
    Place,
    TooManyOperationsError,
)
from offloadtrain.plan.tracing.patches import (
    empty_caches_of,
    masks_as_in_training,
    operations_of_device,
)
from offloadtrain.runtime.arena import Ledger, MetaArena
from offloadtrain.runtime.disk_arena import MetaDiskArena
from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.runtime.lanes import Lane, Operation, Range, SequentialLanes, Span
from offloadtrain.step.layout.buffers import BufferSpec

FORWARD, BACKWARD = "forward ", "backward "
"""Prefixes of the engine's span names, followed by the name of a module or block."""


class InertLanes(SequentialLanes):
    """Counts the bytes of copies, and sets the meter's place to the running forward or backward.

    The function of a launch is dropped without a call, and with it the tensors that only the launch
    refers to: gradients are freed where a real gather would free them.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self._spans: list[tuple[Span, Place]] = []

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._count(lane, name, writes)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        span = super().open_span(name, reads, writes)
        self._spans.append((span, self._meter.place))
        block = name.removeprefix(FORWARD).removeprefix(BACKWARD)
        self._meter.place = Place(block, in_backward())
        return span

    def close_span(self, span: Span) -> None:
        for number in reversed(range(len(self._spans))):
            if self._spans[number][0] is span:
                self._meter.place = self._spans[number][1]
                del self._spans[number:]
                break
        super().close_span(span)


Loss = Callable[[nn.Module], Tensor]
"""Runs the forward of a model and returns its scalar loss. It creates fake tensors only."""


class TraceError(ModelError):
    """A module cannot run over fake tensors, or not in reasonable time."""


def trace_step(
    model: nn.Module,
    loss_of: Loss,
    config: OffloadConfig,
    *,
    on_cpu: bool,
    packed: bool = False,
) -> TracedStep:
    """Return the memory and the work of one microbatch of a model. Only a few of several equal
    layers are traced: [Note: Layers that are alike].

    Args:
        model: real or on the meta device, in the mode (train or eval) to plan for; not changed.
        config: options with resolved precision; only those in `traced_options` are used.
        on_cpu: the plan is for a CPU, where losses work on smaller pieces.
        packed: `loss_of` gives positions that restart inside sequences.

    Raises:
        ModelError: `offload` would refuse the model.
        TraceError: its forward depends on values, or loops over the tokens.
    """
    check_model(model, may_be_meta=True)
    parts = partition(model)
    layers = [part for part in parts if part.repeated]
    again = config.activations.recomputed_of([part.module for part in layers])

    def traced(runs: Sequence[Run] = ()) -> list[Moment]:
        options = _of_some_layers(config, [part.name for part in layers], runs)
        return _moments_of_fakes(model, loss_of, options, packed, runs)

    with (
        cpu_stands_for(on_cpu=on_cpu),
        operations_of_device(on_cpu=on_cpu),
        _signals_handled_afterwards(),
    ):
        moments = _extended(traced, runs_of(model, again)) or traced()
    return _as_step(moments, [part.name or "root" for part in parts])


def trace_on_meta(
    model: nn.Module, loss_of: Loss, config: OffloadConfig, container: str, layers: int
) -> TracedStep | None:
    """Trace like `trace_step`, for a GPU and a model created only for this trace; return None if
    its layers turn out to differ.

    Args:
        model: on the meta device, without the layers that `uniform_runs` skips.
        container: name of the list of layers.
        layers: their number in the full model.
    """
    names = [f"{container}.{number}" for number in range(layers)]
    runs = uniform_runs(container, layers, len(config.activations.recomputed_of(names)))
    meter = Meter(knows_values=False)
    with operations_of_device(on_cpu=False), _signals_handled_afterwards():
        moments = _metered(model, loss_of, _of_some_layers(config, names, runs), meter)
    for run in runs:
        if (more := with_skipped_layers(moments, run)) is None:
            return None
        moments = more
    parts = [part.name or "root" for part in partition(model)]
    if runs:  # the traced layers stand for all
        inside = [at for at, name in enumerate(parts) if name.startswith(f"{container}.")]
        parts[inside[0] : inside[-1] + 1] = names
    return _as_step(moments, parts)


def _extended(traced: Callable[[Sequence[Run]], list[Moment]], runs: Sequence[Run]) -> list[Moment]:
    """Return the moments of the full model from a trace of fewer layers; empty if there are no
    runs, or their layers turn out to differ: [Note: Extending a trace]."""
    try:
        moments: list[Moment] | None = traced(runs) if runs else None
    except TraceError:
        raise
    except (IndexError, ValueError, RuntimeError):  # the forward counts its layers: trace all
        return []
    for run in runs:
        moments = with_skipped_layers(moments, run) if moments else None
    return moments or []


def _moments_of_fakes(
    model: nn.Module, loss_of: Loss, options: OffloadConfig, packed: bool, runs: Sequence[Run]
) -> list[Moment]:
    # Plain attributes of a module may hold real tensors.
    mode, meter = FakeTensorMode(allow_non_fake_inputs=True), Meter()
    copied = fake_model(model, mode, runs)
    try:
        with mode, _without_addresses(), masks_as_in_training(packed=packed):
            return _metered(copied, loss_of, options, meter)
    finally:
        # Some models cache tensors, which would be fake.
        if meter.holds_something:
            empty_caches_of(mode)


def _metered(model: nn.Module, loss_of: Loss, options: OffloadConfig, meter: Meter) -> list[Moment]:
    """Run a microbatch of a fake or meta model under its engine. Changes the model."""
    engine, blocks, _hooks = _offloaded(model, options, meter)
    storages = [param.untyped_storage() for param in model.parameters()]
    meter.weights = frozenset(storage._cdata for storage in storages)
    with meter, _no_values(type(model).__name__), few_stand_for_all(AlikePieces(meter)):
        loss = loss_of(model)
        if loss.numel() != 1:
            raise TraceError(
                f"the loss has the shape {tuple(loss.shape)}: give a function that returns a scalar"
            )
        with engine.micro_step():
            engine.scaled(loss).backward()
    repeated = {block.name for block in blocks if block.spec.repeated}
    return [moment_of(segment, repeated) for segment in meter.segments]


_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _signals_handled_afterwards() -> Iterator[None]:
    """Defer this process's Python signal handlers until after the trace.

    A handler that raises while torch switches dispatch modes leaves a mode on the stack, or removes
    one too many: torch then raises an AttributeError, or expert products in this process
    return uninitialized memory.

    The handlers are called afterwards; the signals are not raised again, because a reader of the
    wakeup file descriptor has already read each signal and would count it twice.
    """
    pending: list[int] = []
    replaced: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        replaced = {number: signal.getsignal(number) for number in _DEFERRED}
        replaced = {number: handler for number, handler in replaced.items() if callable(handler)}
    try:
        for number in replaced:
            signal.signal(number, lambda number, _: pending.append(number))
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(pending):
            replaced[number](number, sys._getframe())


class _HostMemory(MetaArena):
    """Records the bytes of each activation that would go to the host."""

    def __init__(self, ledger: Ledger, meter: Meter, owner: str) -> None:
        super().__init__(ledger)
        self._meter, self._owner = meter, owner

    def map(self, requests: Sequence[BufferSpec]) -> list[Tensor]:
        sizes = (request.nbytes for request in requests if request.owner == self._owner)
        self._meter.segments[-1].input_sizes += sizes
        with _disable_current_modes():  # host memory does not count
            return super().map(requests)


def traced_options(config: OffloadConfig) -> OffloadConfig:
    """Return a config with the options that affect torch's allocations, others at defaults."""
    return OffloadConfig(
        precision=config.precision,
        activation=config.activations.mode,
        recompute_blocks=config.activations.recompute_blocks,
        activation_policy=config.activations.policy,
        offload_saved_above=config.activations.offload_saved_above,
        keep_fp32=config.weights.keep_fp32,
        cast_inputs=config.activations.cast_inputs,
    )


def _of_some_layers(
    config: OffloadConfig, layers: Sequence[str], runs: Sequence[Run]
) -> OffloadConfig:
    """Return the options for a trace without the skipped layers of `runs`."""
    options = traced_options(config)
    if config.activations.recompute_blocks is None:
        return options
    left_out = {run.names[at] for run in runs for at in run.skipped}
    again = [name for name in config.activations.recomputed_of(layers) if name not in left_out]
    return options.replace(recompute_blocks=len(again))


def _offloaded(
    model: nn.Module, config: OffloadConfig, meter: Meter
) -> tuple[Engine, Sequence[Block], Sequence[object]]:
    """Return the engine of a fake model, its blocks, and its hooks, which must stay alive with
    it."""
    ledger, rule = Ledger(), AdamW()
    arena = _HostMemory(ledger, meter, config.activations.moved)
    engine = build(
        model,
        [rule],
        normalise_groups(model, None, rule),
        config,
        Resources(InertLanes(meter), arena, MetaDiskArena(ledger), ledger),
        device=next(model.parameters()).device,
        division=Division(),
        param_init_fn=None,
        has_values=False,
    )
    layers = [part.module for part in partition(model) if part.repeated]
    # Before the engine's own hook, which removes the gradient.
    hooks: list[object] = [
        param.register_post_accumulate_grad_hook(partial(_delivered, meter))
        for param in model.parameters()
        if param.requires_grad
    ]
    hooks += hook_parameters(engine)
    dtype = PRECISIONS[config.precision]
    hooks += attach_casts(model, layers, dtype, cast_inputs=config.activations.cast_inputs)
    return engine, [*engine.residency.blocks.values()], hooks


def _delivered(meter: Meter, param: Tensor) -> None:
    assert param.grad is not None
    meter.moved_to(param.grad, GRADIENTS)


@contextmanager
def _without_addresses() -> Iterator[None]:
    """Ignore torch's warning that fake tensors have no address: kernel tables read addresses, but
    no kernel is launched here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def _no_values(name: str) -> Iterator[None]:
    """Raise TraceError if a forward needs values or never ends; the message names the cause."""
    try:
        yield
    except TooManyOperationsError:
        raise TraceError(
            f"{name} is not traced: the forward of a layer runs more than {MOST_OPERATIONS:,} "
            "operations, such as a few for each token. Give shorter sequences, or install the "
            "kernels that its layers ask for"
        ) from None
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"{name} cannot be traced without data: its forward asks for the values of a tensor "
            f"({error.func}). Give a batch whose whole numbers have values, leave out masks that "
            "make it look, or choose another implementation of that part (of experts, for "
            'instance: experts_implementation = "grouped_mm")'
        ) from error


def _as_step(moments: Sequence[Moment], names: Sequence[str]) -> TracedStep:
    """Return moments as a `TracedStep`; `names` are the blocks' names, in order."""
    works: dict[Place, Work] = {}
    for moment in moments:
        block = moment.place.block if moment.place.block in names else names[-1]
        works.setdefault(replace(moment.place, block=block), Work()).add(moment.work)
    # Bytes saved in layers' forward, made in backward, outside of layers, of gradients.
    saved, working, outside, gradients = max(
        (moment.peak_bytes for moment in moments if moment.peak_bytes), key=sum
    )
    return TracedStep(
        {
            name: BlockCost(*(works.get(Place(name, back), Work()) for back in (False, True)))
            for name in names
        },
        Activations(saved, working, outside, gradients),
        tuple(size for moment in moments for size in moment.input_sizes),
    )
