"""A program driven without a model, by the events of a typical step."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import count, takewhile

from offloadtrain.step.block_spec import BlockSpec
from offloadtrain.step.modes import Decision
from offloadtrain.step.operations import Kind, Operations
from offloadtrain.step.program import Program
from offloadtrain.step.spec import StepSpec


def steps(
    program: Program, num_steps: int, input_bytes: int = 0, *, saved: Container[int] = ()
) -> Operations:
    """Return the operations of the first steps: blocks in the spec's order, a gradient for every
    parameter, no step skipped, nothing clipped, all speculation right.

    Args:
        input_bytes: what `activation` moves of a block that is recomputed; with "offload_saved" of
            a repeated block, or any block if none is repeated.
        saved: the steps after which a checkpoint is written.

    The user's own work on a block is a launch of `FORWARD` or `BACKWARD`, and each step has one
    `DECIDE`, where the norm is known.
    """
    micro_steps = program.spec.config.grad_accum_steps
    done: Operations = []
    inputs = Inputs(program, input_bytes)
    for step in range(1, num_steps + 1):
        for micro_step in range(micro_steps):
            last = micro_step + 1 == micro_steps
            done += _forward(program, inputs)
            done += _backward(program, inputs, step, last=last)
            if step == 1 and micro_step == 0 and not program.spec.is_single:
                done += program.first_sums()
        done += program.norm() + program.computes(Kind.DECIDE, "")
        order = [block.name for block in program.spec.blocks]
        done += program.norm_known(order, Decision(step))
        program.step_ends()
        done += program.pass_begins()
        if step in saved:
            done += program.save()
    return done


def _forward(program: Program, inputs: Inputs) -> Operations:
    done = program.pass_begins()
    for block in program.spec.blocks:
        done += program.use(block.name)
        done += inputs.save(block)
        done += program.computes(Kind.FORWARD, block.name)
    return done


def _backward(program: Program, inputs: Inputs, step: int, *, last: bool) -> Operations:
    done: Operations = []
    unread = unread_in_backward(program.spec)
    for block in reversed(program.spec.blocks):
        reads = block.name not in unread
        done += program.use(block.name, [block.name]) if reads else []
        done += inputs.need(block)
        done += program.computes(Kind.BACKWARD, block.name, reads=reads)
        done += inputs.drop(block)
        delivered = {bucket.name: True for bucket in block.buckets}
        done += program.grads_ready(block.name, delivered, last=last)
        # As the engine does: the first backward shows which blocks deliver as expected.
        if last and step > 1:
            done += program.grads_complete(block.name, Decision(step))
            for name in tuple(program.behind):
                done += program.graph_freed(name)
    return done


def unread_in_backward(spec: StepSpec) -> frozenset[str]:
    """Return the streamed blocks before the layers, whose backward reads no weights: their inputs
    are data, which gets no gradient."""
    ahead = takewhile(lambda block: block.leaf, spec.blocks)
    tables = [block.name for block in ahead]
    # Without a list of layers the modules of the only one are leaves, too.
    tables = tables if any(block.repeated for block in spec.blocks) else tables[:1]
    return spec.streamed.intersection(tables)


class Inputs:
    """What is moved to the host of repeated blocks until their backward needs it."""

    def __init__(self, program: Program, nbytes: int, numbers: Iterator[int] | None = None) -> None:
        """`numbers`: names of inputs that no other one has; None: from 0."""
        self._program = program
        self._nbytes = nbytes if program.spec.moves_inputs else 0
        self._numbers = numbers or count()
        self._saved: dict[str, int] = {}
        has_layers = any(block.repeated for block in program.spec.blocks)
        all_saved = program.spec.config.activation == "offload_saved"
        self._moved = {
            block.name
            for block in program.spec.blocks
            if block.recomputed or (all_saved and (block.repeated or not has_layers))
        }

    def save(self, block: BlockSpec) -> Operations:
        if not (self._nbytes and block.name in self._moved):
            return []
        self._saved[block.name] = next(self._numbers)
        return self._program.activation_saved(self._saved[block.name], self._nbytes, "uint8")

    def need(self, block: BlockSpec) -> Operations:
        if block.name not in self._saved:
            return []
        return self._program.activation_needed(self._saved[block.name])

    def drop(self, block: BlockSpec) -> Operations:
        if block.name not in self._saved:
            return []
        return self._program.activation_dropped(self._saved.pop(block.name))
