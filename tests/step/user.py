"""A user of a program: what an engine tells it while somebody trains, in any way that is allowed.

What every forward must read and every update must have seen follows from what was told, and is
checked against `Contents` as it goes.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable

from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import (
    Event,
    HostWait,
    Kind,
    Lane,
    Launch,
    Leave,
    Operations,
    Record,
    Ref,
    Renew,
)
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.updates import Decision
from tests.step.contents import Contents, Version

ODD = {
    "blocks left out": 0.7,
    "an evaluation between micro-steps": 0.1,
    "an evaluation before the norm": 0.3,
    "a synchronization in a step": 0.1,
    "a drop after the norm": 0.05,
    "an evaluation between steps": 0.2,
    "a synchronization": 0.2,
    "masters set": 0.1,
    "a slot dropped": 0.2,
    "a drop in backward": 0.02,
    "a block used twice": 0.15,
    "a recompute": 0.1,
    "a gradient that is late or missing": 0.15,
    "a second gradient": 0.1,
    "the first sums before late gradients": 0.5,
    "a graph that stays": 0.3,
    "a skipped step": 0.2,
    "a clipped step": 0.3,
    "other hyperparameters": 0.1,
    "others pinned": 0.1,
    "another order of backward": 0.2,
    "another order of forward": 0.2,
    "another order of evaluation": 0.2,
    "another order of upload": 0.2,
}
"""What a user does beyond the usual, and how often of the times that it can be done."""


class User:
    """Trains.

    Attributes:
        done: every operation so far.
        told: what was done beyond the usual, for whoever asks whether it was tried at all.
    """

    def __init__(
        self,
        spec: StepSpec,
        rank: int,
        draw: random.Random,
        *,
        always: Collection[str] | None = None,
    ) -> None:
        """`always`: of `ODD`, what to do whenever it can be done; None: all of it by chance."""
        self.done: Operations = []
        self.tried: set[str] = set()
        self.program = Program(spec, rank)
        self._spec = spec
        self._contents = Contents(self.program, rank)
        self._draw = draw
        self._always = always
        self._names = [block.name for block in spec.blocks]
        self._buckets = {b.name: [x.name for x in b.buckets] for b in spec.blocks}
        self._bucket_names = {b.name: [x.name for x in b.all_buckets] for b in spec.blocks}
        self._read_weights: dict[str, list[Ref]] = {}
        """Weights of blocks that were used, until they are changed or leave the device."""
        self._trained = [bucket.name for bucket in spec.buckets]
        self._state: dict[str, Version] = dict.fromkeys(self._trained, ())
        self._device: dict[str, Version] = {}
        self._frozen: Version = ()
        self._sets = self._deliveries = self._steps = 0
        self._sent: dict[str, tuple[int, ...]] = dict.fromkeys(self._trained, ())
        self._shown = False
        """The first step has shown which blocks deliver as expected."""
        self._summed = spec.is_single
        self._begun = False
        self._updated = False
        self._again: list[str] = []
        self._late: list[str] = []
        self.set_masters()

    # Between steps.

    def set_masters(self) -> None:
        """Load state, as the first upload does."""
        self._sets += 1
        self.synchronize(between=True)
        version: Version = (self._sets,)
        self._contents.set_state(version)
        self._state = dict.fromkeys(self._trained, version)
        self._frozen = version
        self._run(self.program.upload_masters())
        self._device = dict(self._state)
        self.synchronize(between=True)

    def synchronize(self, *, between: bool) -> None:
        """Wait for every lane."""
        if between:
            self._run(self.program.flush())
            self._newest()
        for lane in Lane:
            event = Event(lane, ())
            self._run([Record(event), HostWait(event, "every lane is empty")])
        self.program.synchronized()
        for name in self._spec.streamed if self._spec.is_single else ():
            self._run(self.program.drop_slot(name))

    def evaluate(self) -> None:
        """A forward of some blocks, in any order."""
        self._run(self.program.begin_pass(self._pins(None)))
        left_out = self._odd("blocks left out")
        count = self._draw.randint(1, len(self._names)) if left_out else len(self._names)
        for name in self._order(self._names, "another order of evaluation")[:count]:
            self._compute(Kind.FORWARD, name, self._pins(name))

    def step(self) -> None:
        """A step; or what is left of one that is dropped in the middle."""
        for micro_step in range(self._spec.config.grad_accum_steps):
            if self._odd("an evaluation between micro-steps"):
                self.evaluate()
            if not self._micro_step(last=micro_step + 1 == self._spec.config.grad_accum_steps):
                self._drop()
                return
        if self._odd("an evaluation before the norm"):
            self.evaluate()
        if self._odd("a synchronization in a step"):
            self.synchronize(between=False)
        self._run(self.program.norm())
        assert self._contents.norms == self._sent
        if not self._updated and self._odd("a drop after the norm"):
            self._drop()
            return
        self._decide()
        self._shown = True
        self.program.end_step()
        self._forget()
        self._run(self.program.begin_pass())
        self.program.mode.verify()

    def between(self) -> None:
        """What may happen behind a step."""
        if self._odd("an evaluation between steps"):
            self.evaluate()
        if self._odd("a synchronization"):
            self.synchronize(between=True)
        if self._odd("masters set"):
            self.set_masters()
        if self._spec.streamed and self._odd("a slot dropped"):
            name = self._draw.choice(sorted(self._spec.streamed))
            self._run(self.program.drop_slot(name))

    def check_at_rest(self) -> None:
        """State and weights are what they were told to become."""
        self.synchronize(between=True)
        for name in self._trained:
            assert self._contents.state(name) == self._state[name]
        for name in self._names:
            self._compute(Kind.FORWARD, name, ())

    # In a step.

    def _micro_step(self, *, last: bool) -> bool:
        """False: given up before its end."""
        self._forward()
        self._late = []
        for name in self._order(reversed(self._names), "another order of backward"):
            if not self._updated and self._odd("a drop in backward"):
                return False
            self._backward(name, last=last)
        self._end_micro_step(last=last)
        return True

    def _forward(self) -> None:
        order = self._order(self._names, "another order of forward")
        if self._odd("a block used twice"):
            order.insert(self._draw.randrange(len(order)), self._draw.choice(order))
        self._run(self.program.begin_pass())
        for name in order:
            self._compute(Kind.FORWARD, name, self._pins(name))

    def _backward(self, name: str, *, last: bool) -> None:
        if self._odd("a recompute"):
            self._compute(Kind.FORWARD, name, self._pins(name))
        self._compute(Kind.BACKWARD, name, self._pins(name))
        if not self._buckets[name]:
            return
        if self._odd("a gradient that is late or missing"):
            self._late.append(name)
            return
        self._send(name, dict.fromkeys(self._buckets[name], True), last=last)
        if last and self._shown:
            self._run(self.program.grads_complete(name, self._decision()))
            self._updated |= self._spec.updates_early
        if not self._updated and self._odd("a second gradient"):
            self._compute(Kind.BACKWARD, name, self._pins(name))
            self.program.grads_repeated(name)
            self._again.append(name)
        self._free_graphs()

    def _end_micro_step(self, *, last: bool) -> None:
        if not self._summed and self._odd("the first sums before late gradients"):
            self._sum_first()
        for name in (*self._late, *self._again):
            buckets = self._draw.sample(
                self._buckets[name], self._draw.randint(0, len(self._buckets[name]))
            )
            self._send(name, {other: self._draw.random() < 0.5 for other in buckets}, last=last)
        self._again = []
        if not self._summed:
            self._sum_first()

    def _sum_first(self) -> None:
        self._summed = True
        self._run(self.program.wait_for_first_sums())

    def _free_graphs(self) -> None:
        for name in tuple(self.program.mode.waiting_for_graphs):
            if name not in self._again and not self._odd("a graph that stays"):
                self._run(self.program.graph_freed(name))
                self._begun = True
                self._newest([name])

    def _send(self, name: str, delivered: dict[str, bool], *, last: bool) -> None:
        self._deliveries += 1
        for bucket in delivered if self._spec.is_single else self._buckets[name]:
            self._sent[bucket] += (self._deliveries,)
        self._run(self.program.grads_ready(name, delivered, last=last), self._deliveries)

    def _decide(self) -> None:
        early, config = self._spec.updates_early, self._spec.config
        skipped = config.skip_nonfinite and self._odd("a skipped step")
        coef = 0.5 if not early and not skipped and self._odd("a clipped step") else 1.0
        used = "others" if not early and self._odd("other hyperparameters") else "given"
        decision = self._decision(skipped, coef, used)
        self._run(
            self.program.norm_known(self._order(self._names, "another order of upload"), decision)
        )
        delayed = config.update == "delayed"
        if delayed:
            self._newest()
        if skipped:
            return
        self._steps += 1
        for name in self._trained:
            self._state[name] += ((decision.step, coef / decision.scale, self._sent[name]),)
        if not delayed or decision.step <= config.warmup_steps:
            self._newest()

    def _decision(self, skipped: bool = False, coef: float = 1.0, used: str = "given") -> Decision:
        return Decision(self._steps + 1, skipped, coef, 8.0 * self._spec.ranks, used)

    def _drop(self) -> None:
        self._run(self.program.drop())
        if self._begun:  # of an update in mode "delayed"
            self._newest()
        self._forget()

    def _forget(self) -> None:
        self._sent = dict.fromkeys(self._trained, ())
        self._begun = self._updated = False
        self._again = []

    # Both.

    def _newest(self, blocks: Iterable[str] | None = None) -> None:
        """The device has the newest weights."""
        for name in self._names if blocks is None else blocks:
            for bucket in self._buckets[name]:
                self._device[bucket] = self._state[bucket]

    def _compute(self, kind: Kind, name: str, pinned: Collection[str]) -> None:
        """The program is told of the use, and not of what runs behind it."""
        self._run(self.program.use(name, pinned))
        refs = [self.program.buckets[other].working for other in self._bucket_names[name]]
        self._read_weights[name] = refs
        self._contents.read.clear()
        work = Launch(kind, Lane.COMPUTE, name, tuple(refs))
        self._contents.run([work])
        self.done.append(work)
        expected = {
            other: [self._device.get(other, self._frozen)] for other in self._bucket_names[name]
        }
        assert self._contents.read == expected

    def _pins(self, name: str | None) -> list[str]:
        """What others read meanwhile; they leave a slot to this one."""
        if not self._odd("others pinned"):
            return [] if name is None else [name]
        rest = [other for other in self.program.streaming.resident if other != name]
        layers = {block.name for block in self._spec.blocks if block.repeated}
        # The blocks outside of layers share one slot.
        in_layers = [other for other in rest if other in layers][: self._spec.slots - 1]
        if name is None or name in layers:
            in_layers += [other for other in rest if other not in layers]
        return in_layers + ([] if name is None else [name])

    def _order(self, names: Iterable[str], what: str) -> list[str]:
        order = list(names)
        if self._odd(what):
            self._draw.shuffle(order)
        return order

    def _odd(self, what: str) -> bool:
        """Whether to do it this time."""
        if self._always is not None:
            return what in self._always
        if self._draw.random() >= ODD[what]:
            return False
        self.tried.add(what)
        return True

    def _run(self, operations: Operations, delivery: int = -1) -> None:
        """Behind code of the user's that reads whatever it was given and nobody took back."""
        reads = tuple(ref for refs in self._read_weights.values() for ref in refs)
        self.done.append(Launch(Kind.FORWARD, Lane.COMPUTE, "", reads))
        self._contents.run(operations, delivery)
        self.done += operations
        for op in operations:
            if isinstance(op, Leave | Renew):
                self._read_weights.pop(op.block, None)
