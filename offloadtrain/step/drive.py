"""A program without a model: what a usual step tells it, and so what a usual step does."""

from __future__ import annotations

from offloadtrain.step.modes import Decision
from offloadtrain.step.operations import Kind, Operations
from offloadtrain.step.program import Program


def steps(program: Program, count: int) -> Operations:
    """The operations of so many steps, from the first on: blocks in the spec's order, a gradient
    for every parameter, no step skipped, nothing clipped, all guesses right.

    The user's own work on a block is a launch of `FORWARD` or `BACKWARD`, and each step has one
    `DECIDE`, where the norm is known.
    """
    micro_steps = program.spec.config.grad_accum_steps
    done: Operations = []
    for step in range(1, count + 1):
        for micro_step in range(micro_steps):
            last = micro_step + 1 == micro_steps
            done += _forward(program)
            done += _backward(program, step, last=last)
            if step == 1 and micro_step == 0 and not program.spec.is_single:
                done += program.first_sums()
        done += program.norm() + program.computes(Kind.DECIDE, "")
        order = [block.name for block in program.spec.blocks]
        done += program.norm_known(order, Decision(step))
        program.step_ends()
        done += program.pass_begins()
    return done


def _forward(program: Program) -> Operations:
    done = program.pass_begins()
    for block in program.spec.blocks:
        done += program.use(block.name)
        done += program.computes(Kind.FORWARD, block.name)
    return done


def _backward(program: Program, step: int, *, last: bool) -> Operations:
    done: Operations = []
    for block in reversed(program.spec.blocks):
        done += program.use(block.name, [block.name])
        done += program.computes(Kind.BACKWARD, block.name)
        delivered = {bucket.name: True for bucket in block.buckets}
        done += program.grads_ready(block.name, delivered, last=last)
        if last and step > 1:  # the first backward shows which blocks deliver as expected
            done += program.grads_complete(block.name, Decision(step))
            for name in program.behind:
                done += program.graph_freed(name)
    return done
