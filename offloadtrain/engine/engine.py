"""The engine: a step from the first forward hook to the last upload, over any module tree.

The order of operations is the program's: [Note: The program] in `step.program.program`.
`PhaseGuard` says which calls are legal in which part of a step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from offloadtrain.engine.autograd.forward_hooks import ForwardHooks
from offloadtrain.engine.autograd.hooks import Removable, outside_transforms
from offloadtrain.engine.autograd.selective import engine_code
from offloadtrain.engine.block import Block, Residency
from offloadtrain.engine.bucket import Slot
from offloadtrain.engine.gradients import GradientAccess, Gradients
from offloadtrain.engine.interpreter import Functions, Interpreter
from offloadtrain.engine.norm import EngineError, Norm, NormMeasure
from offloadtrain.engine.parameters import past_the_class
from offloadtrain.engine.saved_state import StateWriter
from offloadtrain.engine.step_report import Phase, Reporter, StepCounter, StepReport
from offloadtrain.runtime.lanes import Lanes
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.updates import Decision


class PhaseGuard:
    """Rejects calls that the phase of the step does not allow."""

    def __init__(self, gradients: Gradients, program: Program) -> None:
        self._gradients = gradients
        self._program = program
        self.closed = False
        self.salvaged = False
        """The device has failed, and the state on the host is that of a completed step."""
        self.in_flight = ""
        """What a `SplitSteps` leaves unfinished between its steps, and how to end it, for messages;
        "" if nothing is in flight."""
        self.delay_goes_on = False
        """Nothing is in flight, and the next step's forwards use older weights."""

    @property
    def is_over(self) -> bool:
        """True if nothing will be launched on the lanes any more."""
        return self.closed or self.salvaged

    @property
    def phase(self) -> Phase:
        if self.closed:
            return Phase.CLOSED
        if self._gradients.open:
            return Phase.BACKWARD
        return Phase.ACCUMULATED if self._gradients.micro_steps else Phase.FORWARD

    def require_open(self, what: str) -> None:
        if self.closed:
            raise EngineError(f"{what} after close(): offload the model again")

    def require_at_rest(self, what: str) -> None:
        self.require_open(what)
        if self.in_flight:
            raise EngineError(f"{what} while {self.in_flight}")

    def require_between_steps(self, what: str) -> None:
        self.require_at_rest(what)
        if self.phase is not Phase.FORWARD:
            raise EngineError(f"{what} between backward and step(): call zero_grad() or step()")

    def require_undecided(self, what: str) -> None:
        """Raises EngineError if the step can no longer be clipped or skipped."""
        if not self._program.mode.waits_for_norm:
            raise EngineError(
                f"{what} after Adam: with skip_nonfinite = False and no clip_norm, Adam runs "
                "inside backward. Offload with clip_norm, or with skip_nonfinite = True"
            )


class StepGradients:
    """The gradients that have arrived in the present step: measures and clips them, and gives user
    code access to them. See [Note: Gradients of the user] in `engine.gradients`.

    Attributes:
        access: the user's views of the gradients.
        norm: their norm, if it was measured before step().
        reports: the count of steps, which another engine may take over.
        drain: waits until all lanes are idle.
    """

    def __init__(
        self,
        program: Program,
        gradients: Gradients,
        norm_measure: NormMeasure,
        guard: PhaseGuard,
        reports: Reporter,
        drain: Callable[[], None],
    ) -> None:
        self.program, self.gradients = program, gradients
        self.norm_measure, self._guard = norm_measure, guard
        self.reports, self.drain = reports, drain
        self.access = GradientAccess(program, self._begin_access)
        self.norm: Norm | None = None

    def clip(self, max_norm: float) -> float:
        """Clip the present step; returns the norm before clipping. See [Note: Clipping].

        Raises:
            EngineError: there was no backward, or Adam runs inside backward.
        """
        norm = self.measure("clip_grad_norm_", max_norm)
        before = norm.clipped
        norm.clip(max_norm)
        return before

    def measure(self, caller: str, max_norm: float | None = None) -> Norm:
        """Measure the norm of the present step, for a caller that may clip it; raises as `clip`."""
        self._guard.require_at_rest(caller)
        self._guard.require_undecided(f"{caller}()")
        self._adopt_changes()
        if max_norm is not None:
            self.access.clipped_to = min(max_norm, self.access.clipped_to)
        self.norm = self.norm or self.send_squares(caller, max_norm)()
        # Measuring launches zeros for parameters without a gradient, and copies of sums to the
        # host.
        self.gradients.in_transit = True
        return self.norm

    def norms_by_name(self) -> dict[str, float]:
        """Return the norm of each parameter's gradient; raises as `clip`, and EngineError if
        other processes train other parameters."""
        norms, names = self.measure("grad_norms").of_parameter, self.norm_measure.names
        if len(norms) != len(names):
            raise EngineError("grad_norms() of a model that is divided into stages")
        return {name: norm for name, norm in zip(names, norms, strict=True) if name}

    def by_name(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each trained parameter's gradient; see `OffloadOptimizer.gradients`."""
        norm = self.measure("gradients")
        access, ranks = self.access, self.norm_measure.ranks.everyone.size
        for bucket in self.norm_measure.buckets:
            self._wait_until_arrived()
            for slot in bucket.slots:
                yield (
                    slot.name,
                    access.of(bucket, slot)
                    if access.shows(bucket)
                    # Clipped as the step will be; the stored gradient is unchanged.
                    else access.copy(bucket, slot, ranks).mul_(norm.coef),
                )

    def take_assigned(self) -> None:
        """Send the gradients that user code has assigned to `.grad`: the step may have no
        others."""
        if self.access.has_assigned:
            self.access.has_assigned = False
            self.gradients.take_assigned()

    def _wait_until_arrived(self) -> None:
        """Wait until the gradients have arrived in their memory."""
        if self.gradients.in_transit:
            self.drain()
            self.gradients.in_transit = False

    def _begin_access(self) -> None:
        """The user is about to read gradients in place, or to write them."""
        self._wait_until_arrived()
        # Clipping only stores a coefficient. Code that reads the gradients afterwards expects
        # clipped values.
        norm, self.norm = self.norm, None
        if norm is not None and norm.coef != 1.0:
            self.drain()
            for bucket in filter(self.access.has_left, self.norm_measure.buckets):
                self.access.multiply(bucket, norm.coef)

    def _adopt_changes(self) -> None:
        """The step is about to be measured: register changes that user code made to its
        gradients."""
        self.take_assigned()
        if changed := self.access.take_changed():
            # Kernels of the user may still write.
            self.drain()
            self.program.gradients_changed(changed)

    def norm_of_step(self, *, skip: bool) -> Norm:
        """Return the norm for the decision of step(), measured unless it is known; raises as
        `Engine.step`."""
        self._adopt_changes()
        # clip_grad_norm_() has waited for the norm; ranks compare what has changed since.
        if self.norm is not None:
            steps, coef = self.reports.counter.steps, self.norm.coef
            self.norm_measure.check_after_clipping(steps, coef, skip=skip)
        # Otherwise the training thread waits here, its only wait for results in a step: the
        # decision to skip and the clip coefficient are arguments of every launch of Adam.
        return self.norm or self.send_squares("step", skip=skip)()

    def send_squares(
        self, caller: str, max_norm: float | None = None, *, skip: bool = False
    ) -> Callable[[], Norm]:
        """Wait for this engine's sums of squares, and send them to the other engines of the model;
        see `NormMeasure.send`."""
        counter = self.reports.counter
        return self.norm_measure.send(caller, counter.steps, counter.divisor, max_norm, skip=skip)


class Engine:
    """Drives blocks through steps. `OffloadOptimizer` is the interface for users."""

    def __init__(
        self,
        forward_hooks: ForwardHooks,
        *,
        lanes: Lanes,
        program: Program,
        interpreter: Interpreter,
        functions: Functions,
        gradients: Gradients,
        norm_measure: NormMeasure,
        residency: Residency,
    ) -> None:
        self.lanes = lanes
        self.program = program
        self._interpreter = interpreter
        self.functions = functions
        self.gradients = gradients
        self.residency = residency
        ranks = norm_measure.ranks
        self._ranks = None if ranks.is_single else ranks
        """Ranks that must upload in the same order; None for a single rank."""
        self.forward_hooks = forward_hooks
        forward_hooks.on_root = self._begin_forward
        forward_hooks.on_blocks = gradients.forward_begins
        if not ranks.is_single:
            residency.on_backward = gradients.backward_reached
        self.guard = PhaseGuard(gradients, program)
        self.reports = Reporter(lanes, ranks, program.spec)
        self.step_gradients = StepGradients(
            program, gradients, norm_measure, self.guard, self.reports, self.drain
        )
        self._has_stepped = False
        self.successor: Callable[[], Engine | None] = lambda: None
        """Called between two steps; returns the engine that replaces this one, or None."""
        self.attached: list[Removable] = []  # hooks of the model, removed by `close()`
        self.casts: list[Removable] = []  # hooks that the next engine takes over

    def _forward_order(self) -> list[str]:
        """Return the blocks in upload order, which is the order of forward; with several ranks, the
        order of rank 0's forward."""
        return self._used_order() if self._ranks is None else self._agreed_order

    def _used_order(self) -> list[str]:
        # Blocks that forward has never entered come last.
        used = (block.name for block in self.residency.forward_order)
        return list(dict.fromkeys((*used, *self.residency.blocks)))

    @cached_property
    def _agreed_order(self) -> list[str]:
        """Upload order of all ranks. The first access is a collective, in the first step."""
        assert self._ranks is not None, "a single rank has nothing to agree on"
        names = [*self.residency.blocks]
        numbers = [*map(names.index, self._used_order())]
        agreed = self._ranks.everyone.all_gather_host(numbers)[0].tolist()
        return [names[int(number)] for number in agreed]

    @property
    def counter(self) -> StepCounter:
        """The count of steps."""
        return self.reports.counter

    def deliver(self, block: Block, slot: Slot) -> None:
        """Post-accumulate-grad hook of a parameter.

        Raises:
            EngineError: after close(), after clip_grad_norm_(), or for a plain backward in fp16.
            GradientError: for a gradient that cannot be used.
        """
        if self.guard.closed:
            self.guard.require_open("backward")
        if self.reports.counter.scaler and not self.gradients.in_explicit_backward:
            raise EngineError(
                "loss scaling is on (precision = 'fp16'): call optimizer.backward(loss), not "
                "loss.backward(), whose gradients would be taken for scaled ones. If the loss is "
                "that of another model, whose backward passes through this one, as of a generator "
                "through its discriminator, call model.requires_grad_(False) on this one before "
                "its forward, and requires_grad_(True) after the backward"
            )
        norm = self.step_gradients.norm
        if norm is not None and norm.is_clipped:
            raise EngineError(
                "a backward between clip_grad_norm_() and step(): what it adds would not be "
                "clipped. Clip after the last backward of a step"
            )
        self.step_gradients.norm = None
        completed = self.gradients.deliver(block, slot)
        if completed is None:
            self.program.grads_repeated(block.name)
        elif completed and self.program.mode.follows_backward and self._has_stepped:
            early = self._decision()
            # Modes that update early launch Adam here, concurrently with the rest of backward. Not
            # in the first step, whose backward shows which blocks deliver twice.
            for completed_block in completed:
                self._interpreter.run(self.program.grads_complete, completed_block.name, early)
        # Mode "delayed": a block's new weights are uploaded, concurrently with backward, once no
        # graph holds its old weights. An earlier upload would overwrite weights that backward
        # reads.
        for name in tuple(self.program.mode.waiting_for_graphs):
            if self.residency.blocks[name].is_unread:
                self._interpreter.run_update(self.program.graph_freed, name)

    @engine_code
    @outside_transforms
    def read_without_a_call(self, block: Block, slot: Slot, *, in_graph: bool) -> Tensor | None:
        """Let compute read a parameter outside of its module's forward.

        Args:
            in_graph: autograd may save it for a backward.

        Returns:
            A copy of a streamed block's weights; None: the parameter's memory can be read directly.
        """
        in_forward = self.forward_hooks.is_running
        # Not in inference mode: copies made during an evaluation also need version counters.
        normal = torch.inference_mode(False)
        with self._interpreter.lock, normal, torch.no_grad(), past_the_class():
            return block.source.read(block, slot, in_graph=in_graph, in_forward=in_forward)

    def scaled(self, loss: torch.Tensor, *, divide: bool = True) -> torch.Tensor:
        """Return the loss divided by the number of microbatches, times the loss scale."""
        microbatches = self.program.spec.config.grad_accum_steps
        if divide and microbatches > 1:
            loss = loss / microbatches
        return loss if self.counter.scaler is None else loss * self.counter.loss_scale

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """See `OffloadOptimizer.micro_step`; the loss must come from `scaled`."""
        self.guard.require_open("backward")
        # A plain backward before this one may have left its micro-step open.
        self.gradients.end_micro_step()
        self.gradients.in_explicit_backward = True
        try:
            yield
        except BaseException:
            # Not with other microbatches in flight: only close() is possible then.
            if not self.guard.in_flight:
                self.drop_gradients()
            raise
        finally:
            self.gradients.in_explicit_backward = False
        self.gradients.end_micro_step()
        self.residency.end_backward()

    def end_micro_step(self) -> None:
        """The backward of a microbatch is over."""
        self.guard.require_open("end_micro_step")
        self.gradients.end_micro_step()

    def step(self, *, skip: bool = False) -> StepReport:
        """Measure the norm, skip or clip, then launch Adam and uploads; returns before they are
        complete.

        Args:
            skip: skip the step in any case.

        Raises:
            EngineError: no backward since the last step, or `skip` while Adam runs inside
                backward.
            RankError: ranks disagree about the step.
            UpdateError: hyperparameters changed after updates inside backward.
        """
        self.guard.require_at_rest("step")
        if skip:
            self.guard.require_undecided("step(skip=True)")
        norm = self.step_gradients.norm_of_step(skip=skip)
        micro_steps, clipped_to = self.gradients.micro_steps, self.step_gradients.access.clipped_to
        self.step_gradients.access.end_step()
        decision = self.launch_update(norm, skip=skip, clipped_to=clipped_to)
        self.gradients.drop()
        self.program.end_step()
        # Launches the loads of the first streamed blocks, during Adam of the others.
        self.residency.restart()
        return self.conclude(norm, decision, micro_steps)

    def launch_update(self, norm: Norm, *, skip: bool, clipped_to: float = math.inf) -> Decision:
        """Decide whether the step is skipped and how it is clipped; launch the rest of its update,
        and the uploads.

        Args:
            clipped_to: the smallest norm that the gradients were clipped to before step().
        """
        config = self.program.spec.config
        if config.clip_norm is not None and config.clip_norm < clipped_to:
            norm.clip(config.clip_norm)
        overflow = config.skip_nonfinite and not math.isfinite(norm.value)
        skipped = skip or overflow
        decision = self._decision(skipped, 1.0 if skipped else norm.coef)
        order = self._forward_order()
        # From here on the step counts: the lanes, or `salvage`, will complete it.
        self._interpreter.require_intact()
        self._interpreter.journal.decide()
        self.counter.decide(skipped=skipped, overflow=overflow)
        if not skipped:
            self.step_gradients.norm_measure.count_steps()
        # Launches only: Adam and uploads run during the next forward, whose blocks wait for theirs.
        self._interpreter.run_update(self.program.norm_known, order, decision)
        self.step_gradients.norm = None
        return decision

    def conclude(self, norm: Norm, decision: Decision, micro_steps: int) -> StepReport:
        """Report a step whose update is launched, and update the loss scale.

        Raises:
            UpdateError: hyperparameters changed after updates inside backward.
            LossScaleError: see `LossScaler.update`.
        """
        report = self.reports.report(norm, decision, micro_steps, self.program.speculation)
        self._has_stepped = True
        # After the step is complete and reported: an earlier error would leave it half done.
        self.program.mode.verify()
        self.reports.end_step(report)
        return report

    def publish_weights(self) -> None:
        """The first forward of a step is about to begin: parameters become the newest weights."""
        self._interpreter.run_update(self.program.flush)

    def detach_weights(self) -> None:
        """Prepare for a caller that sets the state and, separately, the weights that forward uses;
        waits until the lanes are idle."""
        self._interpreter.run_update(self.program.detach_weights)
        self.drain()

    def switch_version(self, *, to_previous: bool) -> None:
        """Switch parameters to the previous weights, or back to the newest."""
        self._interpreter.run_update(self.program.switch_version, to_previous=to_previous)

    def salvage(self, failure: BaseException) -> None:
        """After a failure of the device: make the host state that of `step_count`, without
        touching the device; see [Note: Salvage] in `engine.interpreter`. Afterwards only reading
        the state and closing are useful.

        Raises:
            SalvageError: the state is between two steps, or not on the host.
        """
        self._interpreter.salvage(failure)
        self.counter.update_scale()
        self.guard.salvaged = True
        # The lanes are idle: nothing writes this memory any more.
        for block in self.residency.streamed:
            block.views.show_host()

    def emit(self, *, delayed: bool = False) -> None:
        """Replace the working weights by the rounded masters; waits until this is complete.

        Args:
            delayed: upload only after the next backward, as update mode "delayed" does; the caller
                has set the older weights for the next forward.

        Raises:
            EngineError: between backward and step().
        """
        self.guard.require_between_steps("replace the weights")
        self._interpreter.journal.forget()
        self.guard.delay_goes_on = delayed
        event = self.program.resume_delay if delayed else self.program.upload_masters
        self._interpreter.run_update(event)
        # The caller may read parameters, or write masters again, without any hook that waits.
        self.drain()

    def write_state(self, writer: StateWriter) -> None:
        """Launch the writes of the state after the last step; they run during the next steps.

        Raises:
            EngineError: between backward and step().
        """
        self.guard.require_between_steps("write the state")
        self.functions.writer = writer
        # The caller may have written state or frozen weights on the device, which no launch
        # declares.
        self.lanes.follow_caller()
        self._interpreter.run(self.program.save)

    def average(self, update: Callable[..., None]) -> None:
        """Launch calls of `update` with the name and the state of each bucket after the last step;
        they run on the lanes, during the next step.

        Raises:
            EngineError: between backward and step().
        """
        self.guard.require_between_steps("update an average of the weights")
        self.lanes.follow_caller()  # see write_state
        with self.functions.average(update):
            self._interpreter.run(self.program.average)

    def finish_averages(self) -> None:
        """Wait until the calls that `average` has launched are complete."""
        if not self.guard.is_over:
            self._interpreter.run(self.program.wait_for_averages)

    def finish_writing(self) -> None:
        """Wait until the state is written."""
        self._interpreter.run(self.program.wait_for_writes)

    def drop_gradients(self) -> None:
        """Drop the gradients since the last step.

        Raises:
            EngineError: microbatches are in flight, whose gradients belong to a step that was
                requested.
        """
        self.guard.require_at_rest("zero_grad()")
        self.forward_hooks.end_interrupted()
        self.step_gradients.norm = None
        # After an exception within a step: the lanes restart before anything is launched.
        if self._interpreter.failure is not None and not self._interpreter.is_inconsistent:
            # First, as operations in flight still use the memory that is released below.
            self.lanes.synchronize()
            self.forward_hooks.reset()
            self.program.reset()
            self.residency.reset()
            self._interpreter.failure = None
        self.step_gradients.access.end_step()
        self.gradients.drop()
        # Copies to the host in flight need no wait: later copies into this memory run after them.
        self._interpreter.run_update(self.program.drop)

    def synchronize(self) -> None:
        """Wait until all lanes are idle and the state is complete; between steps, parameters then
        hold the newest weights."""
        if not self.guard.is_over:
            self.end_delay()
            self.drain()

    def end_delay(self) -> None:
        """Between steps, launch the uploads that mode "delayed" postpones."""
        if not self.guard.is_over:
            self.guard.require_at_rest("reading the newest weights")
            self.forward_hooks.end_interrupted()
            # Within a step they stay postponed: backward may need the old weights.
            if self.guard.phase is Phase.FORWARD:
                self.publish_weights()

    def drain(self) -> None:
        """Wait until all lanes are idle; parameters then hold the weights that forward uses."""
        # The caller reads or writes state outside the lanes: nothing may be in flight. Later
        # launches wait for nothing before this point, and the disk's checksums may become outdated.
        with self._interpreter.lock:
            self.lanes.synchronize()
            self.program.synchronized()
            self.functions.disk.drop_checksums()
            self.residency.show_host_weights()

    def _begin_forward(self) -> ForwardHooks | None:
        self.gradients.begin_root_forward()
        between_steps = self.guard.phase is Phase.FORWARD and not self.guard.salvaged
        engine = self.successor() if between_steps else None
        return None if engine is None else engine.forward_hooks

    def go_on_from(self, other: Engine) -> None:
        """Take over the count of steps and the reports of an engine of the same model, before the
        first step."""
        self.reports = self.step_gradients.reports = other.reports.begin_layout(self.program.spec)
        self.functions.seed = other.functions.seed
        self.program.mode.take_over(other.program.mode)

    def leave(self) -> list[Removable]:
        """Detach from the model and give it its weights; another engine will use the lanes.
        Returns the cast hooks, which stay on the model: a forward may be running."""
        casts, self.casts = self.casts, []
        self._leave(self.lanes.synchronize, has_successor=True)
        return casts

    def close(self) -> None:
        """Remove the hooks from the model and give it its weights. Idempotent; not a collective."""
        if not self.guard.closed:
            self._leave(self.lanes.close)

    def _leave(self, drain: Callable[[], None], *, has_successor: bool = False) -> None:
        self.guard.closed = True
        # First, and also if the GPU has failed: the model becomes an ordinary module again.
        self.forward_hooks.close()
        # Reference cycles through this engine end here.
        self.forward_hooks.on_root = self.step_gradients.drain = lambda: None
        self.attached += self.casts
        while self.attached:
            self.attached.pop().remove()
        # Drains: next, weights are copied out of host memory, which the caller then releases.
        drain()
        self._interpreter.failure = None
        self.step_gradients.access.end_step()
        self.residency.close(has_successor=has_successor)
        self.functions.close()

    def _decision(self, skipped: bool = False, coef: float = 1.0) -> Decision:
        used = self.functions.hyperparameters() if self.program.mode.updates_in_backward else None
        return Decision(self.counter.steps + 1, skipped, coef, self.counter.divisor, used)


def hook_parameters(engine: Engine) -> list[Any]:
    """Report the gradient of every trained parameter to the engine, which the hooks reference
    weakly; returns the handles of the hooks."""
    alive = weakref.ref(engine)
    return [
        slot.param.register_post_accumulate_grad_hook(partial(_deliver, alive, block, slot))
        for block in engine.residency.blocks.values()
        for bucket in block.buckets
        for slot in bucket.slots
    ]


def _deliver(engine: weakref.ref[Engine], block: Block, slot: Slot, param: Tensor) -> None:
    alive = engine()
    if alive is not None:
        with past_the_class():
            alive.deliver(block, slot)
