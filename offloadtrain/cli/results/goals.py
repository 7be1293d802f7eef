"""The project's goals on a data-centre GPU, and the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from offloadtrain.cli.results.read import ResultsFile, Steps

_GIB = 1 << 30
_K = 1024


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal.

    Attributes:
        limit: the bound.
        measured: the figures of a results file to compare with it.
        at_most: the limit is an upper bound.
        percent: it is printed in percent.
    """

    what: str
    limit: float
    measured: Callable[[ResultsFile], Iterator[float]]
    at_most: bool = False
    percent: bool = False

    def worst(self, file: ResultsFile) -> float | None:
        """Return the worst figure; None: not measured."""
        figures = list(self.measured(file))
        if not figures:
            return None
        return max(figures) if self.at_most else min(figures)

    def is_met(self, value: float) -> bool:
        """Compare in the printed digits."""
        value, limit = round(value, 2), round(self.limit, 2)
        return value <= limit if self.at_most else value >= limit


def _over_resident(file: ResultsFile, least: int, most: float, **options: str) -> Iterator[float]:
    """Return our step over the resident one, 3B, for tokens per step in a range."""
    for ours in _ours(file):
        share = file.rate_over_resident(ours)
        is_this_case = ours.spec["size"] == "llama-3b" and dict(ours.spec["options"]) == options
        if share and is_this_case and least <= ours.tokens <= most:
            yield 1 / share


def _times_deepspeed(file: ResultsFile) -> Iterator[float]:
    for ours in _ours(file):
        for deepspeed in file.steps:
            if deepspeed.system == "deepspeed" and deepspeed.work == ours.work:
                if not ours.spec["options"]:
                    yield deepspeed.figures["step_s"] / ours.figures["step_s"]


def _times_exact(file: ResultsFile) -> Iterator[float]:
    """Return the gain of `speculative`, whether its guesses were right or not."""
    for guesses in _ours(file):
        if guesses.option("update", "exact") != "speculative" or guesses.tokens > 16 * _K:
            continue
        for exact in _ours(file):
            is_same = exact.work == guesses.work and _state(exact) == _state(guesses)
            if is_same and exact.option("update", "exact") == "exact":
                yield exact.figures["step_s"] / guesses.figures["step_s"]


def _state(steps: Steps) -> tuple[str, str]:
    return steps.option("state", "fp32"), steps.option("state_on", "host")


def _mfu_of_13b(file: ResultsFile) -> Iterator[float]:
    for result in _ours(file):
        is_capped = result.spec["gpu_memory"] == 32 * _GIB
        if result.spec["size"] == "gpt-13b" and is_capped and result.tokens >= 64 * _K:
            yield from [result.figures["mfu_6p"]] if result.figures["mfu_6p"] else []


def _bus_bytes(file: ResultsFile) -> Iterator[float]:
    for result in _one_microbatch(file):
        if result.option("working", "device") == "device":
            yield result.figures["bus_bytes_per_param"]


def _host_bytes(file: ResultsFile, state: str) -> Iterator[float]:
    for result in _one_microbatch(file):
        chosen = result.option("state", "fp32"), result.option("update", "exact")
        if chosen == (state, "exact") and result.option("activation", "recompute") != "offload":
            yield result.figures["host_bytes_per_param"]


def _one_microbatch(file: ResultsFile) -> Iterator[Steps]:
    for result in _ours(file):
        if result.spec["grad_accum_steps"] == 1 and result.option("state_on", "host") == "host":
            yield result


def _ours(file: ResultsFile) -> Iterator[Steps]:
    return (result for result in file.steps if result.system == "offloadtrain")


GOALS = (
    Goal(
        "step, offloaded over resident, 3B, from 32k tokens per step",
        1.10,
        partial(_over_resident, least=32 * _K, most=float("inf")),
        at_most=True,
    ),
    Goal(
        "the same at 8k tokens per step, `split16`",
        1.6,
        partial(_over_resident, least=1, most=8 * _K, state="split16"),
        at_most=True,
    ),
    Goal("tokens/s over DeepSpeed ZeRO-2 offload", 2.0, _times_deepspeed),
    Goal("`speculative` over `exact`, up to 16k tokens per step", 1.2, _times_exact),
    Goal(
        "MFU (6·P per token) of 13B under 32 GiB, from 64k tokens per step",
        0.30,
        _mfu_of_13b,
        percent=True,
    ),
    Goal("PCIe bytes per parameter per step, one microbatch", 4.0, _bus_bytes, at_most=True),
    *(
        Goal(
            f"host bytes per parameter, `{state}`, one microbatch, `exact`",
            limit,
            partial(_host_bytes, state=state),
            at_most=True,
        )
        for state, limit in (("fp32", 14.5), ("split16", 10.5), ("int8", 7.5))
    ),
)
