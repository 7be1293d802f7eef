"""A program driven without a model, by the events of a typical step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import count, takewhile

from offloadtrain.step.layout.block_spec import Reading, readings_of
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import Kind, Operations
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.updates import Decision


def steps(
    program: Program,
    num_steps: int,
    input_bytes: int = 0,
    *,
    saved: Container[int] = (),
    averaged: Container[int] = (),
    clipped: bool = False,
) -> Operations:
    """Return the operations of the first steps: blocks in their order, a gradient for every
    parameter, no step skipped.

    Args:
        clipped: every gradient is clipped, so that all speculation is wrong; otherwise none is.
        input_bytes: bytes that `activation` moves per recomputed block; with "offload_saved" per
            repeated block, or per block if none is repeated.
        saved: the steps after which a checkpoint is written.
        averaged: the steps after which a moving average of the weights is updated.

    The user's work on a block is a launch of `FORWARD` or `BACKWARD`, and each step has one
    `DECIDE`, at the point where the norm is known.
    """
    micro_steps = program.spec.config.grad_accum_steps
    done: Operations = []
    inputs, readings = Inputs(program, input_bytes), readings_of(program.spec.blocks)
    for step in range(1, num_steps + 1):
        for micro_step in range(micro_steps):
            last = micro_step + 1 == micro_steps
            done += forward(program, readings, inputs)
            done += backward(program, readings, inputs, step, last=last)
            if step == 1 and micro_step == 0 and not program.spec.is_single:
                done += program.wait_for_first_sums()
        done += program.norm() + program.computes(Kind.DECIDE, "")
        order = [block.name for block in program.spec.blocks]
        done += program.norm_known(order, Decision(step, coef=0.5 if clipped else 1.0))
        program.end_step()
        done += program.begin_pass()
        if step in averaged:
            done += program.average()
        if step in saved:
            done += program.save()
    return done


def forward(program: Program, readings: Sequence[Reading], inputs: Inputs) -> Operations:
    """Return the operations of a microbatch's forward."""
    done = program.begin_pass()
    for reading in readings:
        done += program.use(reading.block)
        done += inputs.save(reading)
        done += program.computes(Kind.FORWARD, reading.block, owner=reading.owner)
    return done


def backward(
    program: Program, readings: Sequence[Reading], inputs: Inputs, step: int, *, last: bool
) -> Operations:
    """Return the operations of a microbatch's backward; `step` is 1-based.

    Args:
        last: this is the last microbatch of the step.
    """
    done: Operations = []
    blocks = {block.name: block for block in program.spec.blocks}
    unread = unread_in_backward(program.spec)
    for reading in reversed(readings):
        block, reads = blocks[reading.block], reading not in unread
        done += program.use(block.name, [block.name]) if reads else []
        done += inputs.need(reading)
        done += program.computes(Kind.BACKWARD, block.name, reads=reads, owner=reading.owner)
        done += inputs.drop(reading)
        if reading.again:
            continue  # a tied weight's gradient is complete after its first reading's backward
        delivered = {bucket.name: True for bucket in block.buckets}
        done += program.grads_ready(block.name, delivered, last=last)
        # As in the engine: the first backward shows which blocks deliver as expected.
        if last and step > 1:
            done += program.grads_complete(block.name, Decision(step))
            for name in tuple(program.mode.waiting_for_graphs):
                done += program.graph_freed(name)
    return done


def loads_outside(spec: StepSpec) -> Counter[str]:
    """Return block → number of its loads into the slot outside of layers, in a typical step."""
    outside = {block.name for block in spec.streamed_blocks if not block.repeated}
    unread, readings = unread_in_backward(spec), readings_of(spec.blocks)
    passes = [*readings, *(reading for reading in reversed(readings) if reading not in unread)]
    used = [reading.block for reading in passes if reading.block in outside]
    loads = Counter[str]()
    # A step starts with new weights, a later microbatch with the block that the previous one left.
    for times, there in ((1, ""), (spec.config.grad_accum_steps - 1, "".join(used[-1:]))):
        for name in used:
            loads[name] += times if name != there else 0
            there = name
    return loads


def unread_in_backward(spec: StepSpec) -> frozenset[Reading]:
    """Return the readings of streamed blocks before the layers whose backward reads no weights:
    their inputs are data, which gets no gradient."""
    ahead = takewhile(lambda block: block.leaf, spec.blocks)
    tables = [block.name for block in ahead]
    # Without a list of layers later modules may be leaves, too: only the first reads data.
    tables = tables if any(block.repeated for block in spec.blocks) else tables[:1]
    return frozenset(Reading(name) for name in spec.streamed.intersection(tables))


class Inputs:
    """The inputs, or all saved tensors, of repeated blocks that are moved to the host until their
    backward needs them. Launches nothing for a reading that moves nothing."""

    def __init__(self, program: Program, nbytes: int, numbers: Iterator[int] | None = None) -> None:
        """`numbers`: unique numbers of inputs; None: from 0."""
        self._program = program
        self._nbytes = nbytes if program.spec.moves_inputs else 0
        self._numbers = numbers or count()
        self._saved: dict[Reading, int] = {}
        has_layers = any(block.repeated for block in program.spec.blocks)
        all_saved = program.spec.offloads_saved
        self._moved = {
            Reading(block.name)
            for block in program.spec.blocks
            if block.recomputed or (all_saved and (block.repeated or not has_layers))
        }

    def save(self, reading: Reading) -> Operations:
        """The forward of a reading begins."""
        if not (self._nbytes and reading in self._moved):
            return []
        self._saved[reading] = next(self._numbers)
        return self._program.activation_saved(self._saved[reading], self._nbytes, "uint8")

    def need(self, reading: Reading) -> Operations:
        """The backward of a reading is about to run."""
        return (
            self._program.activation_needed(self._saved[reading]) if reading in self._saved else []
        )

    def drop(self, reading: Reading) -> Operations:
        """The graph of a reading was freed."""
        if reading not in self._saved:
            return []
        return self._program.activation_dropped(self._saved.pop(reading))
