"""The options of `offload`: one frozen object that checks every contradiction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from offloadtrain.config.toml import nearest, shown

Precision: TypeAlias = Literal["auto", "bf16", "fp16", "fp32"]

StateOn: TypeAlias = Literal["auto", "host", "device", "disk"] | Mapping[str, float]
"""The tier of the state, or tier → share of it; what is left of the shares is on the host."""

Layer = TypeVar("Layer")

STATE_TIERS = ("device", "host", "disk")
"""Tiers that the state may have a share on."""

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Precision → dtype of working weights and gradients, by torch's name."""

STATE_PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "fp32": ("bf16", "fp16", "fp32"),
    "split16": ("bf16",),
    "int8": ("bf16", "fp16"),
}
"""State format → precisions whose weights it can store. A program may add its own
(`optim.register_state_format`)."""


OFFLOAD_SAVED_ABOVE = 1 << 20
"""Bytes: smaller tensors are not worth a copy of their own."""


class OptionError(ValueError):
    """Options are out of range or contradict each other.

    Attributes:
        problems: one sentence each, beginning with the option's name.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """The options of `offload`, which documents them, and the table `[offload]` of a job.

    Attributes:
        precision: "auto" is for jobs only, and is resolved before `offload`.
        state_on: "auto" is decided by the plan of a job, or by `device_memory_limit`.
        recompute_blocks: "auto" is for jobs only, and decided by their plan.
        sums_on: the same; `sums_down` applies if the plan decides on the device.
    """

    precision: Precision = "bf16"
    state: str = "fp32"
    state_on: StateOn = "host"
    scratch_dir: str | None = None
    scratch_in_memory: bool = False
    grad_on: Literal["host", "disk"] = "host"
    sums_on: Literal["auto", "host", "device"] = "host"
    sums_down: Literal["fp32", "working"] = "fp32"
    seed: int = 0
    update: Literal["exact", "speculative", "delayed"] = "exact"
    warmup_steps: int = 0
    clip_norm: float | None = None
    skip_nonfinite: bool = True
    loss_scale_hysteresis: int = 1
    grad_accum_steps: int = 1
    host_memory_limit: int | None = None
    checkpoint_spill: int = 0
    working: Literal["device", "host", "disk"] = "device"
    device_slots: int = 2
    resident_blocks: int | None = None
    device_memory_limit: int | None = None
    activation: Literal["keep", "recompute", "offload", "offload_saved"] = "keep"
    recompute_blocks: int | Literal["auto"] | None = None
    offload_saved_above: int = OFFLOAD_SAVED_ABOVE
    partition_activations: bool = False
    compile_blocks: bool = False
    zero_stage: int = 0
    keep_whole: tuple[str, ...] = ()
    reduction: Literal["working", "fp32"] = "working"
    cast_inputs: bool | None = None
    keep_fp32: tuple[str, ...] = ()
    skip_unused: tuple[str, ...] = ()
    pin_memory: bool = True

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each broken rule; each begins with the option's name."""
        out_of_range = [*self._unknown_choices(), *self._out_of_range()]
        yield from out_of_range or self._contradictions()

    def checked(self) -> OffloadConfig:
        """Return self.

        Raises:
            OptionError: with every problem.
        """
        if problems := tuple(self.problems()):
            raise OptionError(*problems)
        return self

    @property
    def device_share(self) -> float:
        """The share of the state that is asked for on the device; 0 for "auto"."""
        return self._share("device")

    @property
    def disk_share(self) -> float:
        """The share of the state that is asked for on the disk."""
        return self._share("disk")

    @property
    def recomputes(self) -> bool:
        """The forward of repeated blocks, of all or the first of them, runs again in backward."""
        return self.activation in ("recompute", "offload") and self.recompute_blocks != 0

    def recomputed_of(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Return those of a model's layers, in its order, whose forward runs again in backward. The
        others are the last ones: backward frees first what they keep.

        Raises:
            OptionError: their number is "auto".
        """
        if self.recompute_blocks == "auto":
            raise OptionError(
                "recompute_blocks = 'auto' is decided by the plan of a job; in offload() give the "
                "number of layers whose forward runs again, which plan_model(..., "
                "recompute_blocks='auto') tells, or leave it out for all of them"
            )
        return layers[: self.recompute_blocks] if self.recomputes else ()

    @property
    def moved_activations(self) -> str:
        """What the Ledger calls the activations that are moved to the host."""
        return "saved tensors" if self.activation == "offload_saved" else "block inputs"

    @property
    def uses_disk(self) -> bool:
        """State, gradients or weights are in a file of `scratch_dir`."""
        return self.disk_share > 0 or self.working == "disk"

    @property
    def offloads_weights(self) -> bool:
        """Streamed blocks lie on the host or the disk, and not in shards on the devices."""
        return self.working != "device"

    def _share(self, tier: str) -> float:
        if isinstance(self.state_on, str):
            return float(self.state_on == tier)
        return self.state_on.get(tier, 0.0)

    def zero_stage_among(self, ranks: int) -> int:
        """Return the ZeRO stage on `ranks` ranks; 0: one rank.

        Raises:
            OptionError: the stage contradicts `working`.
        """
        if ranks == 1:
            return 0
        if self.offloads_weights and self.zero_stage in (1, 2):
            raise OptionError(
                f"working = {self.working!r} and zero_stage = {self.zero_stage}: with {ranks} "
                "ranks each host holds a shard of the weights, gathered for each use: set "
                "zero_stage = 3"
            )
        return self.zero_stage or (3 if self.offloads_weights else 2)

    def streams_among(self, ranks: int) -> bool:
        """Return whether repeated blocks may be streamed, from host, disk or shards."""
        return self.offloads_weights or self.zero_stage_among(ranks) == 3

    @property
    def updates_early(self) -> bool:
        """In mode "exact": nothing global has to be known before a bucket is updated."""
        return self.update == "exact" and self.clip_norm is None and not self.skip_nonfinite

    def _unknown_choices(self) -> Iterator[str]:
        for key, allowed in {**_choices(), "state": tuple(STATE_PRECISIONS)}.items():
            if (value := getattr(self, key)) not in allowed:
                hint = nearest(value, allowed) if isinstance(value, str) else ""
                yield f"{key} = {shown(value)} is not one of {', '.join(map(repr, allowed))}{hint}"
        yield from self._wrong_shares()

    def _wrong_shares(self) -> Iterator[str]:
        """Yield what is wrong with `state_on`, which is a tier or a table of shares."""
        given = self.state_on
        if not isinstance(given, Mapping):
            allowed = ("auto", *STATE_TIERS)
            if given not in allowed:
                hint = nearest(given, allowed) if isinstance(given, str) else ""
                yield (
                    f"state_on = {shown(given)} is not one of {', '.join(map(repr, allowed))}, nor "
                    f"a table of shares such as {{device = 0.3}}{hint}"
                )
            return
        if unknown := [tier for tier in given if tier not in STATE_TIERS]:
            yield (
                f"state_on has a share on {shown(unknown[0])}, which is not one of "
                f"{', '.join(map(repr, STATE_TIERS))}"
            )
        elif not all(_is_share(one) for one in given.values()):
            yield f"state_on = {shown(dict(given))}: every share is from 0 to 1"
        elif sum(given.values()) > 1:
            yield f"state_on = {shown(dict(given))}: the shares are more than 1 together"

    def _out_of_range(self) -> Iterator[str]:
        may_be_none = {f.name for f in fields(self) if f.default is None}
        for key in (*_POSITIVE, *_NOT_NEGATIVE):
            value = getattr(self, key)
            if (value is None and key in may_be_none) or (key, value) in _WORDS:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool):
                yield f"{key} = {value!r} is not a number"
            elif key in _POSITIVE and not value > 0:
                yield f"{key} = {value} is not positive"
            elif value < 0:
                yield f"{key} = {value} is negative"
        if self.zero_stage not in (0, 1, 2, 3):
            yield f"zero_stage = {self.zero_stage} is not one of 0, 1, 2, 3"

    def _contradictions(self) -> Iterator[str]:
        if self.precision == "fp16" and not self.skip_nonfinite:
            yield (
                "skip_nonfinite = False and precision = 'fp16': dynamic loss scaling finds its "
                "scale by skipping steps that overflow. Use precision = 'bf16', or set it to True"
            )
        if self.loss_scale_hysteresis > 1 and self.precision != "fp16":
            yield (
                f"loss_scale_hysteresis = {self.loss_scale_hysteresis} and precision = "
                f"{self.precision!r}: only fp16 losses are scaled: leave it out, or set precision "
                "= 'fp16'"
            )
        if self.precision != "auto" and self.precision not in STATE_PRECISIONS[self.state]:
            yield _cannot_keep(self.state, self.precision)
        if self.warmup_steps and self.update != "delayed":
            yield (
                f"warmup_steps = {self.warmup_steps} and update = {self.update!r}: it counts the "
                "exact steps before the first delayed one: leave it out, or set update = 'delayed'"
            )
        if self.resident_blocks and self.working == "device" and self.zero_stage != 3:
            yield (
                f"resident_blocks = {self.resident_blocks} applies only with working = 'host' or "
                "zero_stage = 3: otherwise all blocks stay on the device"
            )
        yield from self._contradictions_of_activations()
        if self.keep_whole and self.working == "device" and self.zero_stage != 3:
            yield (
                f"keep_whole = {list(self.keep_whole)} applies only with zero_stage = 3, "
                "which shards modules outside of layers: leave it out"
            )
        if self.state_on == "device":
            yield from self._contradictions_of_resident()
        if self.uses_disk:
            yield from self._contradictions_of_disk()
        elif self.scratch_dir is not None:
            yield (
                f"scratch_dir = {shown(self.scratch_dir)} is for state on the disk, and state_on = "
                f"{shown(self.state_on)}: leave it out, or set state_on = 'disk'"
            )
        if self.sums_down == "working" and self.sums_on == "host":
            yield (
                "sums_down = 'working' and sums_on = 'host': every microbatch goes down in the "
                "working dtype, and is summed on the host: leave it out, or set sums_on = 'device'"
            )
        if self.grad_on == "disk":
            yield from self._contradictions_of_gradients()

    def _contradictions_of_activations(self) -> Iterator[str]:
        """Yield a sentence for each option of another choice of `activation`."""
        if self.partition_activations and not self.recomputes:
            yield (
                f"partition_activations = True and activation = {self.activation!r}, "
                f"recompute_blocks = {self.recompute_blocks}: only inputs that recompute starts "
                "from are divided: set activation = 'recompute' or 'offload'"
            )
        if self.recompute_blocks is not None and self.activation not in ("recompute", "offload"):
            yield (
                f"recompute_blocks = {shown(self.recompute_blocks)} and activation = "
                f"{self.activation!r}: it counts the layers whose forward runs again: leave it "
                "out, or set activation = 'recompute' or 'offload'"
            )
        if self.offload_saved_above != OFFLOAD_SAVED_ABOVE and self.activation != "offload_saved":
            yield (
                f"offload_saved_above = {self.offload_saved_above} and activation = "
                f"{self.activation!r}: only activation = 'offload_saved' looks at sizes: leave it "
                "out, or set that"
            )

    def _contradictions_of_resident(self) -> Iterator[str]:
        """Yield a sentence for each option that requires state on the host."""
        if self.offloads_weights:
            yield (
                f"working = {self.working!r} and state_on = 'device': streamed weights are "
                "updated on the host: set working = 'device', or a share, which resident blocks "
                "can have"
            )
        if self.checkpoint_spill:
            yield (
                f"checkpoint_spill = {self.checkpoint_spill} is host memory for state on the host, "
                "and with state_on = 'device' none is there: leave it out"
            )

    def _contradictions_of_disk(self) -> Iterator[str]:
        """Yield a sentence for each option that requires all in memory."""
        if self.update == "speculative":
            there = f"state_on = {shown(self.state_on)}" if self.disk_share else "working = 'disk'"
            yield (
                f"update = 'speculative' and {there}: speculation updates a second copy of the "
                "state in host memory: use update = 'exact' or 'delayed'"
            )
        if self.checkpoint_spill and self.state_on == "disk":
            yield (
                f"checkpoint_spill = {self.checkpoint_spill} copies state on the host, and with "
                "state_on = 'disk' none is there: leave it out"
            )

    def _contradictions_of_gradients(self) -> Iterator[str]:
        """Yield a sentence for each option that requires gradients in memory."""
        if not self.disk_share:
            yield (
                f"grad_on = 'disk' and state_on = {shown(self.state_on)}: a gradient is on the "
                "disk where its state is, as it waits for it: leave it out, or set state_on = "
                "'disk' or a share of it"
            )
        if self.update == "delayed":
            yield (
                "grad_on = 'disk' and update = 'delayed': a slot is free once its gradient is "
                "measured, and the host does that behind the update of the step before: use "
                "update = 'exact', or grad_on = 'host'"
            )


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


_POSITIVE = (
    "clip_norm",
    "grad_accum_steps",
    "loss_scale_hysteresis",
    "host_memory_limit",
    "device_slots",
    "device_memory_limit",
)
_NOT_NEGATIVE = (
    "warmup_steps",
    "resident_blocks",
    "recompute_blocks",
    "checkpoint_spill",
    "offload_saved_above",
)
_WORDS = {("recompute_blocks", "auto")}
"""Numbers that may be a word."""


@cache
def _choices() -> dict[str, tuple[Any, ...]]:
    """Option → its allowed values, for options with a fixed set."""
    kinds = get_type_hints(OffloadConfig)
    named = [field.name for field in fields(OffloadConfig)]
    return {key: get_args(kinds[key]) for key in named if get_origin(kinds[key]) is Literal}


def _cannot_keep(state: str, precision: Precision) -> str:
    if state not in ("split16", "int8"):
        kept = " or ".join(map(repr, STATE_PRECISIONS[state]))
        return f"state = '{state}' does not keep {precision} weights: use precision = {kept}"
    if precision == "fp32":
        return (
            f"state = '{state}' stores the upper half of each master as its 16-bit working weight, "
            "but precision is 'fp32': use state = 'fp32', or precision = 'bf16'"
        )
    return (
        f"state = '{state}' cannot store fp16 weights: the difference between an fp16 weight below "
        "2^-14 and its fp32 master does not fit in 16 bits. Use state = 'int8' or 'fp32', or "
        "precision = 'bf16'"
    )
