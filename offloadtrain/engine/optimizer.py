"""The optimizer that `offload()` returns."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import ModelError
from offloadtrain.config.offload import OffloadConfig, StateOn
from offloadtrain.engine.autograd.casting import attach_casts
from offloadtrain.engine.autograd.float8 import converted_layers
from offloadtrain.engine.autograd.hooks import Removable
from offloadtrain.engine.bucket import dense_stride
from offloadtrain.engine.build import Release, Resources, build, disk_arena, lay_out, make_blocks
from offloadtrain.engine.checks import check_model, offloaded, warn_of_local_norm
from offloadtrain.engine.division import Division, SplitSteps
from offloadtrain.engine.engine import Engine, hook_parameters
from offloadtrain.engine.evaluations import check_evaluations, eager
from offloadtrain.engine.foreign_readers import ParameterReaders
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.param_groups import check_groups, completed_groups, listed
from offloadtrain.engine.parameters import ParameterGuard
from offloadtrain.engine.partition import layers_of, partition
from offloadtrain.engine.prepared import Prepared
from offloadtrain.engine.promotion import Promotion
from offloadtrain.engine.relayout import Earlier, check_room, warn_of_turns
from offloadtrain.engine.state import (
    VARIANTS,
    check_held_by,
    copy_assigned,
    entries_of,
    load_dict,
    reset_moments,
    steps_of,
    views,
)
from offloadtrain.engine.step_report import Phase, StepReport
from offloadtrain.engine.weights import ParamInit, WeightsIO, attach_state_dict_hooks
from offloadtrain.hardware.host_memory import available_bytes
from offloadtrain.optim import AnyRule, rule_of
from offloadtrain.runtime.arena import Arena, Ledger, with_own_storage
from offloadtrain.runtime.dtypes import PRECISIONS, name_of
from offloadtrain.runtime.lanes import Lanes
from offloadtrain.step.layout.buffers import BufferSpec, Memory
from offloadtrain.step.layout.tiers import Tier

_log = logging.getLogger(__name__)

_S = TypeVar("_S", bound=SplitSteps)


class OffloadOptimizer(WeightsIO, Prepared, torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose state lives in pinned host memory.

    Made by `offload()`. Learning-rate schedulers, `param_groups` and `state_dict` work as with any
    optimizer. `state[p]` has `step` and the tensors of the state format (`fp32`: `master` and the
    moments): views of host memory in the parameter's shape (scales: one value per block), complete
    after `synchronize()`, valid until `close()` (update mode "speculative": until the next step;
    `state_on = "auto"`: until the state moves).
    With several ranks each has its shard: views of the elements that it owns, 1-D if these are
    not the complete parameter.
    """

    _split: SplitSteps | None = None
    """Replaces `step()`: ends each step in several calls."""
    _warned: frozenset[str] = frozenset()
    """Names of the warnings that were logged: each is logged once."""

    def __init__(
        self,
        model: nn.Module,
        rule: AnyRule,
        groups: list[dict[str, Any]],
        config: OffloadConfig,
        device: torch.device,
        division: Division,
        lanes: Lanes,
        param_init_fn: ParamInit | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`ledger`: ledger that this process's engines share; None for a single engine."""
        # Defaults that all groups have: torch adds missing defaults to each group.
        defaults = {k: v for k, v in rule.defaults().items() if all(k in group for group in groups)}
        super().__init__(groups, defaults)
        self.device, self.model = device, model
        self._division, self._rule = division, rule
        rules = [rule_of(rule, group) for group in self.param_groups]
        self._promotion = Promotion(config, rules, device, division)
        self._missed: dict[nn.Parameter, int] = {}
        """Parameter that was added or unfrozen during the run → steps that it has missed."""
        self._frozen_state: dict[nn.Parameter, list[Tensor]] = {}
        """Frozen parameter → the memory of its state."""
        self.averages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.saved_averages: list[Mapping[str, Any]] = []
        """Averages (`EMA`) in the order of their creation; loaded state for those made later."""
        ledger = ledger or Ledger()
        arena = Arena(ledger, pin=config.memory.pin and device.type == "cuda")
        lanes.loads_cross_bus = config.weights.offloaded
        resources = Resources(lanes, arena, disk_arena(config, ledger), ledger)
        joined = division.replicas, division.stages, division.parts
        self._release = Release(self, resources, joined)
        try:
            self._build(config, rules, param_init_fn)
        except BaseException:
            self._release.finalizer()
            raise
        self._start()
        if config.clip_norm is not None:
            self._warn_of_local_norm(f"clip_norm = {config.clip_norm:g}")

    def _build(
        self,
        config: OffloadConfig,
        rules: Sequence[AnyRule],
        param_init_fn: ParamInit | None = None,
        earlier: Earlier | None = None,
    ) -> None:
        """Create the engine; `earlier`: the previous layout."""
        fp8, compiled = config.compute.fp8, config.compute.compile_blocks
        # Before modules inside of layers get hooks.
        with converted_layers(self.model, fp8, self.device, is_compiled=compiled) as layers:
            self._engine = build(
                self.model,
                rules,
                self.param_groups,
                config,
                self._release.resources,
                device=self.device,
                division=self._division,
                param_init_fn=param_init_fn,
                earlier=earlier,
            )
        self._engine.casts += layers

    def _start(self, casts: list[Removable] | None = None) -> None:
        """Upload the weights and attach the engine's hooks to the model; `casts`: the hooks that
        cast inputs, if they are attached already."""
        self._release.engine = weakref.ref(self._engine)
        self._engine.lanes.copies_block = self.device.type == "cuda" and not self.pinned
        self._engine.emit()  # The first upload: parameters hold the weights from here on.
        self._parameter_guard = ParameterGuard(self.model, self.param_groups)
        counter = self._engine.counter
        counter.shown = {n: torch.zeros((), device="cpu") for n in (0, *self._missed.values())}
        counter.count_from(counter.steps)
        self._fill_state()
        alive = weakref.ref(self)
        self._engine.successor = lambda: None if (some := alive()) is None else some._follow()
        model, engine, cast_inputs = self.model, self._engine, self.config.activations.cast_inputs
        slots = [slot for block in self._blocks for b in block.all_buckets for slot in b.slots]
        engine.attached += [
            *hook_parameters(engine),
            *attach_state_dict_hooks(model, self, engine),
            *check_evaluations(model, engine, self.ranks),
            ParameterReaders(self, [(slot.name, slot.param) for slot in slots], engine),
        ]
        dtype = self.working_dtype
        engine.casts += casts or attach_casts(
            model, layers_of(model), dtype, cast_inputs=cast_inputs
        )

    @property
    def config(self) -> OffloadConfig:
        """The options of the optimizer."""
        return self._engine.program.spec.config

    @property
    def working_dtype(self) -> torch.dtype:
        """The dtype of the weights that compute reads, and of gradients."""
        return PRECISIONS[self.config.precision]

    @property
    def ledger(self) -> Ledger:
        """The bytes of this process's engines, by owner and tier."""
        return self._release.resources.ledger

    @property
    def grad_accum_steps(self) -> int:
        """Number of microbatches in a step. May be set between two steps.

        Raises:
            EngineError: when set between backward and `step()`.
            ModelError: when set for a model on several ranks.
        """
        return self.config.grad_accum_steps

    @grad_accum_steps.setter
    def grad_accum_steps(self, count: int) -> None:
        if count != self.grad_accum_steps:
            config = self.config.replace(grad_accum_steps=count).checked()
            self._relayout(f"grad_accum_steps = {count}", config)

    @property
    def lanes(self) -> Lanes:
        """The lanes that its operations run on."""
        return self._engine.lanes

    def lanes_state(self) -> str:
        """Describe what its lanes do, from any thread."""
        return self.lanes.state()

    @property
    def pinned(self) -> bool:
        """True if all host memory is page-locked: only then do transfers overlap with compute."""
        return self._release.resources.arena.pinned

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last step: unscaled, before clipping; may be inf or NaN if skipped."""
        return self.last_step.grad_norm if self.last_step else None

    @property
    def last_step(self) -> StepReport | None:
        """The report of the last `step()`; None before the first."""
        return self._engine.reports.last_step

    @property
    def loss_scale(self) -> float:
        """The factor that the next `backward` applies to the loss; 1.0 unless precision is fp16."""
        return self._engine.counter.loss_scale

    @property
    def phase(self) -> Phase:
        """The present phase of the step."""
        return self._engine.guard.phase

    @property
    def warns_of_skips(self) -> bool:
        """True to log a warning of three skips in a row; False if the caller reports skips."""
        return self._engine.reports.warns_of_skips

    @warns_of_skips.setter
    def warns_of_skips(self, value: bool) -> None:
        self._engine.reports.warns_of_skips = value

    def backward(self, loss: Tensor, *, divide: bool = True) -> None:
        """Run backward of one microbatch: divides by `grad_accum_steps`, applies the loss scale.

        A plain `loss.backward()` does neither, as in every torch loop: the loss has to be
        divided before, and precision "fp16" raises an error.

        Args:
            loss: scalar, the mean over the microbatch.
            divide: False if the caller has divided by the number of microbatches already, as
                Accelerate and the Trainer of transformers do.

        Raises:
            EngineError, GradientError: out of turn, or a gradient that cannot be used. After any
                exception the gradients of the step are dropped.
        """
        with self._engine.micro_step():
            self._engine.scaled(loss, divide=divide).backward()

    def scaled(self, loss: Tensor, *, divide: bool = True) -> Tensor:
        """Return the loss that `backward` differentiates; for use with `micro_step`."""
        return self._engine.scaled(loss, divide=divide)

    def micro_step(self) -> AbstractContextManager[None]:
        """Return a context: the backward inside it, however called, is that of one microbatch.

        For a part of a model whose backward starts from gradients of another process
        instead of a loss. In fp16 these must be gradients of a loss that `scaled` has returned.

        Raises:
            EngineError, GradientError: as `backward`.
        """
        return self._engine.micro_step()

    def end_micro_step(self) -> None:
        """End the micro-step: the backward of a microbatch is over.

        For loops that call `loss.backward()` several times without a forward of the model in
        between: otherwise gradients of two microbatches are added in the working dtype and count as
        one microbatch. `backward(loss)`, a forward and `step()` call it implicitly. No-op if no
        backward has begun.
        """
        self._engine.end_micro_step()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip this step's gradient, after its last backward and before `step()`.

        A second call sees the norm that the first has left, and coefficients multiply; `clip_norm`
        comes last, in `step()`, and has no effect if `max_norm` was as small. The norm is
        measured once and no gradient is changed: Adam multiplies by the coefficient. All ranks must
        call it. Waits for the norm, as `step()` would.

        Args:
            max_norm: `inf` measures and clips nothing.

        Returns:
            0-dim fp64 on the CPU: the global norm before this clipping, unscaled; not finite if
            the step will be skipped.

        Raises:
            EngineError: no backward since the last step, or Adam runs inside backward
                (no `clip_norm`, `skip_nonfinite` off).
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm = {max_norm} is not a number of at least 0")
        self._warn_of_local_norm("clip_grad_norm_")
        norm = self._engine.step_gradients.clip(float(max_norm))
        return torch.tensor(norm, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, gradient) of every trained parameter, after the last backward of a
        step and before `step()`.

        In a single process it is `param.grad`, a view of the memory that Adam will read: the step
        uses what is written into it. With several ranks, and with `grad_on = "disk"`, it is a copy
        on the host, fp32, of the mean over ranks. All ranks must exhaust the iterator; each gets
        its part of a DTensor. In fp16 gradients are those of the scaled loss.

        Raises:
            EngineError: as `clip_grad_norm_`.
        """
        return self._engine.step_gradients.by_name()

    def grad_norms(self) -> dict[str, float]:
        """Return parameter name → norm of its gradient, unscaled and before clipping, after the
        last backward of a step and before `step()`.

        Norms are measured during backward: nothing is copied. Waits for the norm, as `step()`
        would; all ranks must call it.

        Raises:
            EngineError: as `clip_grad_norm_`, or the model is divided into pipeline stages.
        """
        return self._engine.step_gradients.norms_by_name()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, skip: bool = False) -> Any:
        """Update from the delivered gradients; waits only for the gradient norm.

        A non-finite gradient norm skips the step: no state, no weight and no step count changes
        (`last_step.skipped`). Fewer microbatches than `grad_accum_steps` are applied without
        rescaling. Without a backward since the last step nothing changes, as in torch, whose
        optimizers skip parameters without gradients; a warning says so once.

        Args:
            closure: recomputes the loss and calls backward; its result is returned.
            skip: skip the step in any case, on every rank, for example because of its loss.

        Raises:
            EngineError: with several ranks, no backward since the last step; or `skip` while Adam
                runs inside backward.
            ModelError: a parameter was replaced, added or frozen since forward, or a write is lost.
        """
        if self._prepared and self._accumulating:
            return None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._engine.step_gradients.take_assigned()
        # With several ranks the others may have had a backward, and would wait for this rank.
        guard = self._engine.guard
        if guard.phase is Phase.FORWARD and not guard.in_flight and self._division.size == 1:
            if not self._parameter_guard.is_retrained():
                self._parameter_guard.check()  # All parameters may have been replaced.
            if "no backward" not in self._warned:
                self._warned |= {"no backward"}
                _log.warning(
                    "step() without a backward: no parameter of the model has received a gradient "
                    "since the last step, and nothing has changed"
                )
            return loss
        self._check()
        self._engine.step(skip=skip)
        if self._promotion.is_active:
            self._move_state(self._promotion.after_step(self._engine))
        return loss

    def split(self, make: Callable[[Engine, Callable[[], None]], _S]) -> _S:
        """Let another object end the steps, each in several calls.

        Args:
            make: creates the object from the engine and a function that raises if the model or a
                hyperparameter cannot be updated.
        """
        self._split = split = make(self._engine, self._check)
        return split

    def speculate(self, *, enabled: bool) -> bool:
        """In update mode "speculative", between two steps: allow guesses, or update as "exact"
        does, with the same bits. Returns whether the next step guesses."""
        return self._engine.program.mode.speculate(enabled=enabled)

    def keep_exact(self) -> None:
        """On all ranks, between steps of "speculative": if state can move, change to mode "exact"
        and free the second copies (hosts may have different ones). As slow as `offload()`."""
        if self.config.update == "speculative" and self._promotion.can_move:
            config = self.config.replace(update="exact")
            self._relayout("update = 'exact'", config, state_on=config.state.tier)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used, in any tier; after `step()` there are none.
        `zero_grad()` of the model does the same.

        `set_to_none` makes no difference: a parameter that a step did not use counts as having a
        zero gradient, so that its decay and moments continue, unless `skip_unused` names it.

        Raises:
            EngineError: microbatches of split steps are in flight.
        """
        if self.phase is not Phase.CLOSED and not (self._prepared and self._accumulating):
            self._engine.drop_gradients()
            if not self._parameter_guard.is_retrained():
                self._move_state(self._promotion.after_drop(self._engine))

    @torch.no_grad()
    def reset_state(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Set moments to zero; the weights stay. `state.clear()` does the same to all parameters.

        Args:
            params: trained parameters whose moments are reset. Their step count, used for bias
                correction, stays. Default: all, and the step count becomes 0.

        Raises:
            EngineError: for a parameter that this optimizer does not train.
            UpdateError: between backward and `step()`, if Adam runs inside backward.
        """
        self.settle()
        if params is not None and self.phase is Phase.FORWARD:
            self._follow()  # they may have been unfrozen just now
        self._engine.program.mode.before_masters_change()
        slots = {slot.param: (bucket, slot) for bucket, slot in self._slots()}
        for param in slots if params is None else params:
            if param not in slots:
                raise EngineError(
                    f"reset_state() of a parameter of shape {tuple(param.shape)}, which this "
                    "optimizer does not train"
                )
            bucket, slot = slots[param]
            reset_moments(bucket, slot, self._rules[bucket.group])
        if params is None:
            self._missed = {}
            for bucket, _ in self._slots():
                bucket.missed_steps = 0
            for param in [*self._frozen_state]:
                self._drop_frozen(param)
            self._count_from(0, {})
        self._fill_state()

    def synchronize(self) -> None:
        """Wait until every lane is idle and state is complete.

        Between steps, parameters hold the newest weights afterwards: in update mode "delayed" the
        pending update is uploaded, and the next step uses it without delay.
        """
        self._engine.synchronize()
        # Speculative updates swap the copies of the state: views of it may show the other copy.
        if self.config.update == "speculative":
            self._take_over_state()
            self._fill_state()

    def sample_timeline(self) -> None:
        """Record the intervals of each lane in the next step, for its report's `timeline`; if
        steps are split, in the step after the next decided one. Nothing waits for the lanes
        until the timeline is read."""
        (self._split or self._engine.reports).sample_timeline()

    @property
    def samples_late(self) -> bool:
        """True if a sampled timeline comes one step later, as split steps overlap."""
        return self._split is not None

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, plus "scaler" (None without loss scaling), "seed" of the
        rounding, "step" of the run, "held_by", "averages" (the state dict of each `EMA` of this
        optimizer), "state_on_device" (its share), and "untrained" (indices of parameters without
        state). Values are views of host memory, not copies: the next step changes them."""
        # Adam on the host lane may still write the state that the views show.
        self.settle()
        self._take_over_frozen()
        extra: dict[str, Any] = {"scaler": self.scaler_state(), "held_by": self._held_by}
        extra |= {"seed": self._engine.functions.seed, "step": self._engine.counter.steps}
        averages = [average.state_dict() for average in self.averages.values()]
        extra["averages"] = [*averages, *self.saved_averages]
        extra["state_on_device"] = self._engine.reports.state_on_device
        state_dict = eager(torch.optim.Optimizer.state_dict)(self)
        keys = {key for group in state_dict["param_groups"] for key in group["params"]}
        return state_dict | extra | {"untrained": sorted(keys - state_dict["state"].keys())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load state and hyperparameters; the working weights are updated from the loaded masters.

        With several ranks, each loads its own `state_dict`, saved by the same number of ranks; full
        tensors fit any number. A state dict of torch's Adam or AdamW, with moments and no weights,
        is accepted: the masters stay, so load the model's weights as well, in any order. Each `EMA`
        loads its averages, including those created later.

        Raises:
            EngineError: if groups, shapes, step counts or ranks do not fit this optimizer.
        """
        # This thread writes the state next, which Adam and uploads in flight still use.
        self.settle()
        check_held_by(state_dict, self._held_by)
        self._follow()
        slot_of = {slot.param: (bucket, slot) for bucket, slot in self._slots()}
        entries = entries_of(state_dict, self.param_groups, slot_of)
        steps, of_experts = steps_of(entries, slot_of)
        step = max([*steps.values(), *chain(*of_experts.values())], default=0)
        step = state_dict.get("step", step)
        missed = {param: step - of_param for param, of_param in steps.items() if of_param != step}
        if missed != self._missed:
            self._relayout("state of different steps", missed=missed)
            slot_of = {slot.param: (bucket, slot) for bucket, slot in self._slots()}
        load_dict(entries, state_dict["param_groups"], self.param_groups, slot_of, self._rules)
        for param in entries.keys() - slot_of.keys():
            self._keep(param, entries[param])
        # As in torch: a parameter without an entry in the state dict starts with fresh state.
        for param in slot_of.keys() - entries.keys():
            bucket, slot = slot_of[param]
            reset_moments(bucket, slot, self._rules[bucket.group])
        for param in [p for p in self._frozen_state if p not in entries]:
            self._drop_frozen(param)
        self._engine.functions.seed = state_dict.get("seed", self._engine.functions.seed)
        scaler = state_dict.get("scaler", self.scaler_state())
        self.finish_load(step=step, scaler=scaler, expert_steps=of_experts)
        self.saved_averages = [*state_dict.get("averages", ())]
        for average in [*self.averages.values()][: len(self.saved_averages)]:
            average.load_state_dict(self.saved_averages.pop(0))
        share = state_dict.get("state_on_device", 0.0)
        self._move_state(self._promotion.after_load(self._engine, share))

    @property
    def tries(self) -> int:
        """Number of steps decided so far, including skipped ones: their updates are complete, or
        `salvage` completes them."""
        return self._engine.counter.tries

    def salvage(self, failure: BaseException) -> int:
        """After a failure of the device: finish the decided updates on the host, without using the
        device again. Returns the number of completed steps. `state_dict`, `named_state` and `close`
        work afterwards; streamed weights are views of the host copy.

        Raises:
            SalvageError: the state is between two steps, or not on the host.
        """
        self._engine.salvage(failure)
        self._fill_state()
        return self._engine.counter.steps

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model, from the next step on: parameters that were frozen,
        or that were added to it. See [Note: Changes between steps] in `engine.relayout`.

        Args:
            param_group: as for torch's optimizers; missing hyperparameters are the rule's defaults.

        Raises:
            EngineError: between backward and `step()`.
            ModelError: a parameter is in another group or not in the model; or the model is on
                several ranks.
            ValueError: for hyperparameters out of range or unknown.
        """
        if not hasattr(self, "_engine"):
            eager(torch.optim.Optimizer.add_param_group)(self, param_group)
            return
        group = {**param_group, "params": listed(param_group["params"])}
        added = completed_groups(self.model, [group], self._rule, are_all=False)
        self._relayout("add_param_group()", groups=[*self.param_groups, *added])

    def _follow(self) -> Engine | None:
        """Create a new layout if parameters were frozen, unfrozen or regrouped since the last step,
        and return the new engine; otherwise None."""
        # The last moment before an update may run inside backward, or undo a write.
        if self._is_delayed or not self._engine.program.mode.waits_for_norm:
            with torch.inference_mode(False):
                self.take_over_writes()
        guard, groups = self._parameter_guard, self.param_groups
        is_same = self._engine.functions.groups is groups and not guard.is_regrouped(groups)
        if is_same and not guard.is_retrained():
            return None
        # A completely frozen model pauses its training: the critic of a GAN, in the steps of its
        # generator.
        if is_same and not any(slot.param.requires_grad for _, slot in self._slots()):
            return None
        # An evaluation between forward and backward: the graph needs its weights in place.
        if not torch.is_grad_enabled() and any(not block.is_unread for block in self._blocks):
            return None
        self._relayout("parameters were frozen, unfrozen or regrouped")
        return self._engine

    @torch.no_grad()
    def _relayout(
        self,
        change: str,
        config: OffloadConfig | None = None,
        *,
        groups: Sequence[dict[str, Any]] | None = None,
        missed: dict[nn.Parameter, int] | None = None,
        state_on: StateOn | None = None,
    ) -> None:
        """See [Note: Changes between steps] in `engine.relayout`.

        Args:
            change: description of the change, for messages.
            config, groups: the new options and parameter groups; None: the present ones.
            missed: parameter → steps in which it was not updated; None: the previous values, and
                all steps for parameters that were never trained.
            state_on: new tier of the state, if nothing else changes.

        Raises:
            EngineError: between backward and `step()`.
            ModelError, HostMemoryError: the changed model cannot be trained; nothing changed.
        """
        if state_on is None and (self._division.size > 1 or self._split or self.config.skip_unused):
            raise ModelError(
                f"{change}: with several ranks, pipelines and skip_unused, what is trained cannot "
                "change between steps: close() the optimizer and offload the changed model"
            )
        engine, config, groups = self._engine, config or self.config, groups or self.param_groups
        config = config.replace(state_on=self._promotion.begin(state_on))
        engine.guard.require_between_steps(change)
        check_groups(self.model, groups, self._rule)
        # A forward in inference mode also triggers this.
        with torch.inference_mode(False):
            self.settle()
            if state_on is None:
                check_model(self.model, is_offloaded=True)
            missed = self._steps_missed(groups) if missed is None else missed
            earlier = Earlier(
                engine.residency.memory,
                self._blocks,
                self.state,
                self._keep,
                missed=missed,
                num_bytes=self.ledger.total(Tier.HOST),
            )
            rules = [rule_of(self._rule, group) for group in groups]
            parts, for_all = partition(self.model), (config, self._division)
            common = (*for_all, engine.lanes, missed)
            blocks, _ = make_blocks(parts, self.model, groups, rules, *common)
            # Memory limits and module names are checked: nothing raises from here on.
            least = available_bytes() + earlier.num_bytes
            check_room(lay_out(self.model, blocks, *for_all, least), least)
            self._missed, resources = missed, self._release.resources
            casts = engine.leave()
            earlier.prepare()
            # The new group may belong to new modules.
            while groups is not self.param_groups and casts:
                casts.pop().remove()
            self.param_groups[:] = groups
            disk, resources.disk = resources.disk, disk_arena(config, self.ledger)
            self._build(config, rules, earlier=earlier)
            earlier.finish()
            self._engine.residency.memory.allocate()
            self._engine.go_on_from(engine)
            disk.close()
            self._start(casts)
            for average in self.averages.values():
                average.follow()
            warn_of_turns(engine.reports.layouts - 1, self._engine.counter.steps)

    def _move_state(self, state_on: StateOn | None) -> None:
        """Create a new layout with the state in another tier, unless None; weights of a pending
        update (update mode "delayed") are pending afterwards."""
        if state_on is not None:
            weights = self._weights_in_use()
            self._relayout("state_on = 'auto'", state_on=state_on)
            self._delay_newest(weights)

    def _steps_missed(self, groups: Sequence[dict[str, Any]]) -> dict[nn.Parameter, int]:
        """Return trained parameter → number of steps that it has missed, if any."""
        trained = {p for group in groups for p in group["params"] if p.requires_grad}
        steps, before = self._engine.counter.steps, {slot.param for _, slot in self._slots()}
        of_frozen = {p: int(self.state.get(p, {}).get("step", 0)) for p in trained}
        late = {p: self._missed.get(p, 0) if p in before else steps - of_frozen[p] for p in trained}
        return {param: missed for param, missed in late.items() if missed}

    def _keep(self, param: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Copy the state of a frozen parameter to separate memory; {}: there is no state."""
        values = {name: tensor for name, tensor in state.items() if name != "step"}
        rows = [
            BufferSpec("state of frozen parameters", value.numel(), name_of(value.dtype))
            for value in values.values()
        ]
        arena = self._release.resources.arena
        memory = arena.map(rows)
        copies = {"step": torch.as_tensor(state.get("step", 0.0), device="cpu").clone()}
        for (name, value), flat in zip(values.items(), memory, strict=True):
            shaped = with_own_storage(flat).as_strided(value.shape, dense_stride(value))
            copies[name] = shaped.copy_(value)
        arena.release(self._frozen_state.pop(param, []))
        self._frozen_state[param], self.state[param] = memory, copies

    def _drop_frozen(self, param: nn.Parameter) -> None:
        self._release.resources.arena.release(self._frozen_state.pop(param))
        self.state.pop(param, None)

    def close(self) -> None:
        """Drain, remove the hooks from the model and release the host memory. Idempotent.

        An optimizer that goes out of scope does the same. The model keeps its working weights,
        except those in shards (`zero_stage` 3), whose parameters become empty: take
        `full_weights()` on all ranks before. Views from `state` must not be used any more.
        """
        try:
            self._engine.close()
            # Last, as the comm lane had collectives of these groups in flight.
            for ranks in (self.ranks, self._division.stages, self._division.parts):
                ranks.close()
        # Also if the GPU has failed: the host memory is released in any case.
        finally:
            # Views of memory that the finalizer is about to release.
            self.state.clear()
            self._handed_out.clear()
            self._release.finalizer()
            offloaded.pop(self.model, None)

    def _check(self) -> None:
        self._parameter_guard.check()
        self.take_over_writes()
        for rule, group in zip(self._engine.functions.rules, self.param_groups, strict=True):
            rule.check(group)
            for key in VARIANTS:
                if group.get(key) and key not in rule.defaults():
                    name = type(rule).__name__
                    raise ValueError(f"{key} = {group[key]!r}: {name} does not have it")

    def _warn_of_local_norm(self, caller: str) -> None:
        if "local norm" not in self._warned:
            self._warned |= {"local norm"}
            warn_of_local_norm(caller, self._division.size, self.ranks)

    def _fill_state(self) -> None:
        for bucket, slot in self._slots():
            step = self._engine.counter.shown[bucket.missed_steps]
            step = bucket.usage.steps_of(slot) if bucket.usage else step
            tensors = views(bucket, slot)
            if bucket.state_kind is Memory.STATE_FILE:
                # The user may write to them, which makes the disk's checksums invalid.
                self._engine.functions.disk.hand_out(tensors.values())
            self.state[slot.param] = {"step": step, **tensors}
        self._handed_out = self._state_values()

    def _state_values(self) -> list[Any]:
        # Unsorted: this runs at every step, and only identity with the last list matters.
        return [*chain.from_iterable(map(dict.values, self.state.values()))]

    def take_over_writes(self) -> None:
        """Update the state from values that were written into parameters or assigned to `state`.

        Raises:
            ModelError: parameters were written while an update may have run or was pending; or
                values are beyond the range of the working weights.
            EngineError: see `_take_over_state`.
            UpdateError: state was assigned, and Adam has run inside backward.
        """
        if self.phase is Phase.CLOSED:
            return
        if written := self._parameter_guard.written():
            # Includes parameters frozen since: the engine has their masters until the next layout.
            trained = {slot.param for _, slot in self._slots()}
            written = [param for param in written if param in trained]
        may_undo = self.phase is not Phase.FORWARD or self._engine.program.mode.waiting
        if written and self._is_delayed and may_undo:
            name = next(name for name, p in self.model.named_parameters() if p is written[0])
            raise ModelError(
                f"parameter '{name}' was written, and an update that waits (update = 'delayed') "
                "undoes it: call optimizer.synchronize() after step(), and then write"
            )
        if written:
            self.adopt_written_weights()
        self._take_over_state()

    @torch.no_grad()
    def _take_over_state(self) -> None:
        """Reset the state if user code has cleared `state`; copy the tensors assigned to it.

        Raises:
            EngineError: a part was deleted, or a tensor that is not a moment was assigned.
        """
        values = self._state_values()
        if len(values) == len(self._handed_out) and all(map(is_, values, self._handed_out)):
            return
        self._engine.synchronize()
        self._engine.program.mode.before_masters_change()
        slots = [*self._slots()]
        deleted = [slot.name for _, slot in slots if not self.state.get(slot.param)]
        if deleted and len(deleted) < len(slots):
            raise EngineError(
                f"state['{deleted[0]}'] was deleted, and all parameters share one step count. "
                "optimizer.reset_state([param]) makes the moments of some zero, and state.clear() "
                "begins anew"
            )
        for bucket, slot in () if deleted else slots:
            step = self._engine.counter.shown[bucket.missed_steps]
            copy_assigned(bucket, slot, self.state[slot.param], step)
        self._fill_state()
        if deleted:
            self.reset_state()
