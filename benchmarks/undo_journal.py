"""How many bytes undo an update of AdamW: a journal of what rounding drops, for fp32 and split16.

    python -m benchmarks.undo_journal

After an update the state before it is guessed from the new state, the gradient and the step, in
fp64, and the journal is the difference of the two in units of the last place: guess and journal
together are the state before. Moments come first. With them the update of the master is known
exactly, and its guess is off by the rounding of the master only.

Printed: bits per value of masters and both moments, as the entropy of the differences; bytes per
parameter of the three together, and of a code of 2 bits per value (-1, 0, 1, or 4 bytes elsewhere).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offloadtrain.runtime.kernels import (
    AdamScalars,
    Fp32State,
    Layout,
    Split16State,
    State,
    read_master,
    set_master,
    update,
)

NUMEL, STEPS = 1 << 18, (2, 10, 300)
KINDS = ("even", "outliers", "sparse")
"""Gradients: of a size of its own per element; 1 % a hundred times larger; 95 % zero."""


def start(state: str, weights: Tensor) -> State:
    kinds = (torch.bfloat16, torch.int16, torch.bfloat16, torch.bfloat16)
    if state == "fp32":
        return Fp32State((weights.clone(), torch.zeros(NUMEL), torch.zeros(NUMEL)))
    split = Split16State(torch.zeros(NUMEL, dtype=kind) for kind in kinds)
    set_master(split, weights)
    return split


def values(state: State) -> list[Tensor]:
    """Return master, exp_avg and exp_avg_sq in fp32."""
    master = torch.empty(NUMEL)
    read_master(state.format, ("exp_avg", "exp_avg_sq"), state, master)
    return [master, *(moment.to(torch.float32, copy=True) for moment in state[-2:])]


def guessed_moments(
    new: Sequence[Tensor], grad: Tensor, s: AdamScalars, dtype: torch.dtype
) -> list[Tensor]:
    """Return the nearest moments before the update."""
    g = grad.double()
    exp_avg = (new[1].double() - (1 - s.beta1) * g) / s.beta1
    exp_avg_sq = (new[2].double() - (1 - s.beta2) * g * g) / s.beta2
    return [x.to(dtype).float() for x in (exp_avg, exp_avg_sq.clamp_(min=0))]


def guessed_master(new: Tensor, moments: Sequence[Tensor], grad: Tensor, s: AdamScalars) -> Tensor:
    """Return the nearest master before the update. `moments`: before it, exactly."""
    wide = Fp32State((torch.zeros(NUMEL), *(moment.clone() for moment in moments)))
    # Its master is minus the step that was taken.
    update(wide, grad, replace(s, weight_decay=0.0), layout=Layout.of_one(NUMEL))
    return ((new.double() - wide.master.double()) / (1 - s.lr * s.weight_decay)).float()


def places(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values' numbers among all of the dtype, in order."""
    bits = x.view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return ordered if dtype is torch.float32 else ordered >> 16


def entropy(difference: Tensor) -> float:
    shares = difference.unique(return_counts=True)[1].double() / NUMEL
    return abs(float(-(shares * shares.log2()).sum()))


def coded(difference: Tensor) -> float:
    """Return bits per value of the code of 2 bits."""
    return 2 + 32 * float((difference.abs() > 1).double().mean())


def gradient(kind: str, sizes: Tensor, source: torch.Generator) -> Tensor:
    grad = torch.randn(NUMEL, generator=source) * sizes
    drawn = torch.rand(NUMEL, generator=source)
    if kind == "outliers":
        grad = torch.where(drawn < 0.01, 100 * grad, grad)
    return (grad * (drawn < 0.05) if kind == "sparse" else grad).bfloat16()


def journals(state: str, kind: str) -> dict[int, list[Tensor]]:
    """Return step → the journals of master, exp_avg and exp_avg_sq."""
    source = torch.Generator().manual_seed(0)
    current = start(state, 0.02 * torch.randn(NUMEL, generator=source))
    sizes = (2 * torch.randn(NUMEL, generator=source) - 8).exp()
    dtype = torch.float32 if state == "fp32" else torch.bfloat16
    usual = AdamScalars(lr=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1)
    scalars = replace(usual, beta2=0.95) if kind == "sparse" else usual
    journal_of_step = {}
    for step in range(1, max(STEPS) + 1):
        grad = gradient(kind, sizes, source)
        s = replace(scalars, step=step)
        before = values(current)
        update(current, grad, s, layout=Layout.of_one(NUMEL))
        if step in STEPS:
            after = values(current)
            master = guessed_master(after[0], before[1:], grad, s)
            moments = guessed_moments(after, grad, s, dtype)
            pairs = zip(before[1:], moments, strict=True)
            journal_of_step[step] = [places(before[0]) - places(master)]
            journal_of_step[step] += [places(a, dtype) - places(b, dtype) for a, b in pairs]
    return journal_of_step


def main() -> None:
    print(
        "| state | gradients | step | bits of master, exp_avg, exp_avg_sq | entropy | 2-bit code |"
    )
    print("|---|---|---|---|---|---|")
    for state in ("fp32", "split16"):
        for kind in KINDS:
            for step, differences in journals(state, kind).items():
                bits = [entropy(difference) for difference in differences]
                code = sum(map(coded, differences)) / 8
                each = ", ".join(f"{value:.2f}" for value in bits)
                print(
                    f"| {state} | {kind} | {step} | {each} | {sum(bits) / 8:.2f} B | {code:.2f} B |"
                )


if __name__ == "__main__":
    main()
