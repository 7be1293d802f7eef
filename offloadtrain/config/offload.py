"""The options of `offload`: one frozen object that checks all contradictions.

Each option is declared once, as a field with its type, default, range and docs. Options of
placement and format are grouped by the data that they place: `config.weights.tier`. Each option
also has a flat name, `working` for this example: the keyword of `offload()` and the key of the
table `[offload]` of a job. `OPTIONS` lists them by this name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack

from offloadtrain.config.errors import broken
from offloadtrain.config.option import Needs, Option, declared_in, option
from offloadtrain.config.toml import nearest, shown

Precision: TypeAlias = Literal["auto", "bf16", "fp16", "fp32"]
Fp8Recipe: TypeAlias = Literal["off", "tensorwise", "rowwise"]

UpdateMode: TypeAlias = Literal["exact", "speculative", "delayed", "auto"]

WeightTier: TypeAlias = Literal["device", "host", "disk"]

ActivationMode: TypeAlias = Literal["keep", "recompute", "selective", "offload", "offload_saved"]

ActivationPolicy: TypeAlias = Callable[..., Any]
"""A policy for torch's `create_selective_checkpoint_contexts`."""

StateOn: TypeAlias = Literal["auto", "host", "device", "disk"] | Mapping[str, float]
"""The tier of the state, or a table of its shares by tier; the remaining share is on the host."""

SumsOn: TypeAlias = Literal["auto", "host", "device"] | Mapping[str, float]
"""The tier of the sums of microbatches, or a table of their shares by tier, as in `StateOn`."""

Layer = TypeVar("Layer")

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Maps a precision to torch's name for the dtype of working weights and gradients."""

STATE_PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "fp32": ("bf16", "fp16", "fp32"),
    "split16": ("bf16",),
    "int8": ("bf16", "fp16"),
}
"""Maps a state format to the precisions of the weights that it can store. A program may add its own
formats (`optim.register_state_format`)."""

OFFLOAD_SAVED_ABOVE = 1 << 20
"""Bytes. Smaller tensors are not copied, because the copy costs more than it saves."""


class OptionError(ValueError):
    """Options are out of range or contradict each other.

    Attributes:
        problems: one sentence per problem, which begins with the name of the option.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Shares(dict[str, float]):
    """Shares by tier. It has a hash because frozen configs need one; do not change it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _freeze(options: Any) -> None:
    """Copy lists of names to tuples and tables to `Shares`, because a frozen object has a hash."""
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(field.default, tuple):
            object.__setattr__(options, field.name, tuple(value))
        elif isinstance(value, Mapping):
            object.__setattr__(options, field.name, Shares(value))


class OptionGroup:
    """Options of one subject: the computation of layers, or the placement of one kind of memory."""

    __slots__ = ()

    def __post_init__(self) -> None:
        _freeze(self)


def _share_on(tier: str, placed: str | Mapping[str, float]) -> float:
    """Return the share on a tier: `placed` is a tier, "auto" (0), or a table of shares by tier."""
    return float(placed == tier) if isinstance(placed, str) else placed.get(tier, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions(OptionGroup):
    """Options for forward and backward of the layers in a list."""

    compile_blocks: bool = option(
        False,
        """`torch.compile` the forward of each layer of a list, at its first call. Layers alike
        share one code. Results differ from uncompiled ones by rounding, and are the same in every
        placement. Not with tensor or expert parallel.""",
    )
    fp8: Fp8Recipe = option(
        "off",
        """linear layers inside the layers of a list multiply in FP8, through torchao, with a scale
        per tensor ("tensorwise") or row ("rowwise"). Needs compute capability 8.9, and is fast with
        `compile_blocks`; on the CPU it is emulated. What stays in bf16: docs/loop.md.""",
        needs=Needs("precision", ("bf16", "auto"), "FP8 products stand in for those of bf16"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions(OptionGroup):
    """Placement of the working weights, which forward and backward use."""

    tier: WeightTier = option(
        "device",
        """residence of the working weights. "device"; "host": repeated blocks (the layers of a
        list) are streamed, loaded ahead of their use in forward and in backward. Embedding, final
        norm and head stay on the device; among ranks see `zero_stage`. "disk": as "host", from a
        file in `scratch_dir`.""",
        name="working",
    )
    device_slots: int = option(
        2, "how many streamed blocks are on the device at once.", positive=True
    )
    resident_blocks: int | None = option(
        None,
        """how many of the repeated blocks stay on the device. None: as many as
        `device_memory_limit` leaves room for; without one, none.""",
        not_negative=True,
    )
    keep_fp32: tuple[str, ...] = option(
        (),
        """names of parameters, or shell patterns of them such as "*norm*", whose working weights
        stay fp32. A scale near 1 moves in steps of 0.008 in bf16; where that is too coarse
        (contrastive losses), fp32 norms follow their masters as under autocast, at the price of
        fp32 inputs and outputs of these norms.""",
    )

    @property
    def offloaded(self) -> bool:
        """True if streamed blocks are on the host or the disk, and not in shards on the devices."""
        return self.tier != "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions(OptionGroup):
    """Placement of gradients before their update, and of the sums of microbatches."""

    tier: Literal["host", "disk"] = option(
        "host",
        """"disk": gradients of buckets whose state is on the disk wait there for their update, too;
        a few are on the host at a time. Microbatches are then read, added and written. Not in
        update mode "delayed". The same bits.""",
        name="grad_on",
    )
    sums_tier: SumsOn = option(
        "host",
        """where microbatches are summed, in fp32, if the state is on the host. "device": 4 bytes
        per parameter there; one copy goes down per step, in fp32, whatever the number of
        microbatches; a share such as {"device": 0.4}: the sums of so many parameters are there,
        those of embedding, head and layers spread over the model, and the others on the host. The
        same bits. "auto" is decided by the plan of a job: what it has room for, if that is
        faster.""",
        name="sums_on",
        shares=("device", "host"),
    )
    sums_dtype: Literal["fp32", "working"] = option(
        "fp32",
        """with sums on the device, the dtype in which they go down. "working": rounded once, before
        the norm is taken: half the bytes, on the bus and in `gradients`; as exact as a gradient of
        one microbatch. With a share of the sums on the device, the others stay fp32. With
        `sums_on="auto"` it applies if the plan decides on the device.""",
        name="sums_down",
        needs=Needs(
            "sums_on",
            ("device", "auto"),
            "every microbatch goes down in the working dtype, and is summed on the host",
        ),
    )

    @property
    def device_share(self) -> float:
        """Configured share of the sums on the device; 0 for "auto"."""
        return _share_on("device", self.sums_tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions(OptionGroup):
    """Format and tier of the optimizer state: fp32 master weights and moments."""

    format: str = option(
        "fp32",
        """format of the host state: "fp32" (12 bytes per parameter), "split16" (8; bf16 only) or
        "int8" (5), or one of your own (docs/extending.md). Gradients take 2 more, or 4 where
        microbatches are summed.""",
        name="state",
        choices=STATE_PRECISIONS,
    )
    tier: StateOn = option(
        "host",
        """where gradients, masters and moments are, and Adam runs. "host"; "device": nothing is
        offloaded; a share such as {"device": 0.3}: that of the first blocks of the forward is on
        the device, and the next forward runs over them while the host updates the others; "auto":
        the largest share that `device_memory_limit` holds, without it the share that the GPU has
        room for once a few steps were measured, in a job what its plan decides. Streamed weights
        have their state on the host. "disk", or a share: masters and moments are in a file, and a
        few buckets on the host while it updates them. The same bits everywhere on the CPU.""",
        name="state_on",
        shares=("device", "host", "disk"),
    )
    seed: int = option(0, 'seed of stochastic rounding in "split16" and "int8".')

    @property
    def device_share(self) -> float:
        """Configured share of the state on the device; 0 for "auto"."""
        return _share_on("device", self.tier)

    @property
    def disk_share(self) -> float:
        """Configured share of the state on the disk."""
        return _share_on("disk", self.tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOptions(OptionGroup):
    """Activations that backward needs: kept, recomputed or moved to the host."""

    mode: ActivationMode = option(
        "keep",
        """the activations of the layers of a list. "keep": all stay on the device; "recompute":
        inputs stay, and forward runs again in backward (dropout draws the same); "selective": as
        "recompute", but results of products and attention stay, too, and what is cheap runs again
        (docs/speed.md); "offload": as "recompute", with the inputs in host memory; "offload_saved":
        what the model's forward saves for backward goes to host memory and comes back, of any
        model, and nothing runs again. A loss outside of the model keeps what it saves.""",
        name="activation",
    )
    recompute_blocks: int | Literal["auto"] | None = option(
        None,
        """with "recompute", "selective" and "offload" how many layers' forward runs again: the
        first ones; the last ones, whose activations backward frees first, keep all of theirs. None:
        all. In a pipeline it counts in each stage. "auto" is decided by the plan of a job.""",
        not_negative=True,
        needs=Needs(
            "activation",
            ("recompute", "selective", "offload"),
            "it counts the layers whose forward runs again",
        ),
    )
    policy: ActivationPolicy | None = option(
        None,
        """with "selective" which results stay: a function as torch's
        `create_selective_checkpoint_contexts` takes it, (context, operation, *args, **kwargs) → a
        `CheckpointPolicy` or True, asked about each operation of a layer that makes a new tensor.
        None: products, convolutions and fused attention. Not in jobs.""",
        name="activation_policy",
        needs=Needs("activation", ("selective",), "it chooses among the operations of a layer"),
    )
    budget: float | None = option(
        None,
        """with `compile_blocks` and "selective" or "offload_saved", the share (0 to 1) of what
        compiled layers would save that they save; the compiler chooses what backward computes
        again. None: 0.5 with "selective", 1 with "offload_saved". 0: inputs only.""",
        name="activation_budget",
        not_negative=True,
        needs=Needs(
            "activation", ("selective", "offload_saved"), "it divides what compiled layers save"
        ),
    )
    offload_saved_above: int = option(
        OFFLOAD_SAVED_ABOVE,
        """bytes; with "offload_saved" smaller memory stays on the device.""",
        not_negative=True,
        size=True,
        needs=Needs(
            "activation", ("offload_saved",), "only activation = 'offload_saved' looks at sizes"
        ),
    )
    partition: bool = option(
        False,
        """with tensor parallel, each rank of the axis "tp" keeps its part of the inputs that
        recompute starts from, on the device ("recompute") or on the host ("offload"); they are
        gathered for backward. Not with sequence parallel, whose inputs are divided already.""",
        name="partition_activations",
    )
    cast_inputs: bool | None = option(
        None,
        """None: an fp32 input is cast where torch would refuse its product with a 16-bit matrix.
        True: every floating-point input is cast at the model's entrance. False: none.""",
    )

    @property
    def recomputes(self) -> bool:
        """True if backward recomputes the forward of all or the first repeated blocks."""
        modes = ("recompute", "selective", "offload")
        return self.mode in modes and self.recompute_blocks != 0

    def recomputed_of(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Return the layers, in the order of the model, whose forward is recomputed in backward.
        These are the first layers, because backward frees the activations of the last layers first.

        Raises:
            OptionError: if their number is "auto".
        """
        if self.recompute_blocks == "auto":
            raise OptionError(
                "recompute_blocks = 'auto' is decided by the plan of a job; in offload() give the "
                "number of layers whose forward runs again, which plan_model(..., "
                "recompute_blocks='auto') tells, or leave it out for all of them"
            )
        return layers[: self.recompute_blocks] if self.recomputes else ()

    @property
    def compiled_budget(self) -> float | None:
        """Share of the activations that compiled layers save; None: all."""
        return 0.5 if self.budget is None and self.mode == "selective" else self.budget

    @property
    def moved(self) -> str:
        """Name in the Ledger of the activations that are moved to the host."""
        return "saved tensors" if self.mode == "offload_saved" else "block inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions(OptionGroup):
    """Division of memory among data-parallel ranks, and their sum of gradients."""

    zero_stage: int = option(
        0,
        """what ranks share out: 1: the optimizer state; 2: and gradients; 3: and the weights,
        gathered for their use; 0: 3 with working = "host", which needs it, else 2. In stage 3
        modules outside of layers stay whole where sharding them saves no memory: small ones, and a
        tied embedding, which would need a slot as large as itself.""",
        choices=(0, 1, 2, 3),
    )
    keep_whole: tuple[str, ...] = option(
        (),
        """in stage 3, names of modules outside of layers, or shell patterns of them, that stay
        whole on every rank: those whose weights are read without calling them, and those that two
        others need at once.""",
    )
    reduction: Literal["working", "fp32"] = option(
        "working",
        """dtype in which gradients are summed over ranks: "working", that of the weights, or
        "fp32", at twice the traffic.""",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions(OptionGroup):
    """Limits of memory, and the folder for data on the disk."""

    host_limit: int | None = option(
        None,
        """bytes that the engine may hold on the host; decides how many blocks "speculative" can
        speculate on. None: nine tenths of what is available.""",
        name="host_memory_limit",
        positive=True,
        size=True,
    )
    device_limit: int | None = option(
        None,
        """bytes that the engine may hold on the device: weights, slots and gradient staging.
        Activations and gradients on their way are torch's.""",
        name="device_memory_limit",
        positive=True,
        size=True,
    )
    pin: bool = option(True, "pin host memory where the device is a GPU.", name="pin_memory")
    scratch_dir: str | None = option(
        None,
        """folder of the file for what is on the disk, on a local drive. The file has no name and
        ends with the process.""",
    )
    scratch_in_memory: bool = option(
        False, "accept a `scratch_dir` on tmpfs, which is host memory: for tests."
    )
    checkpoint_spill: int = option(
        0,
        """bytes of host memory into which a save copies the state that it writes last, so that the
        next updates need not wait for the disk there; at most the state's.""",
        not_negative=True,
    )


class OffloadOptions(TypedDict, total=False):
    """The keywords of `OffloadConfig` and `offload()`, for editors and type checkers.

    The fields of `OffloadConfig` and of its groups declare them; a test compares both.
    """

    precision: Precision
    update: UpdateMode
    warmup_steps: int
    clip_norm: float | None
    skip_nonfinite: bool
    loss_scale_hysteresis: int
    grad_accum_steps: int
    skip_unused: Sequence[str]

    compute: ComputeOptions
    compile_blocks: bool
    fp8: Fp8Recipe

    weights: WeightOptions
    working: WeightTier
    device_slots: int
    resident_blocks: int | None
    keep_fp32: Sequence[str]

    gradients: GradientOptions
    grad_on: Literal["host", "disk"]
    sums_on: SumsOn
    sums_down: Literal["fp32", "working"]

    state: str | StateOptions
    state_on: StateOn
    seed: int

    activations: ActivationOptions
    activation: ActivationMode
    recompute_blocks: int | Literal["auto"] | None
    activation_policy: ActivationPolicy | None
    activation_budget: float | None
    offload_saved_above: int
    partition_activations: bool
    cast_inputs: bool | None

    sharding: ShardingOptions
    zero_stage: int
    keep_whole: Sequence[str]
    reduction: Literal["working", "fp32"]

    memory: MemoryOptions
    host_memory_limit: int | None
    device_memory_limit: int | None
    pin_memory: bool
    scratch_dir: str | None
    scratch_in_memory: bool
    checkpoint_spill: int


@dataclass(frozen=True, slots=True, init=False)
class OffloadConfig:
    """The options of `offload`, and the table `[offload]` of a job.

    The constructor takes groups, `OffloadConfig(state=StateOptions(format="int8"))`, or the flat
    names of options, `OffloadConfig(state="int8")`. `replace` changes options by these keywords.
    """

    precision: Precision = option(
        "bf16",
        """dtype of working weights and gradients: "bf16", "fp16" (dynamic loss scaling), "fp32".
        "auto" is for jobs only.""",
    )
    update: UpdateMode = option(
        "exact",
        """update mode. "exact": the update of a resident run. "speculative": the same bits; Adam
        runs inside backward on the assumption that nothing is clipped or skipped, into a second
        copy of the state, of as many blocks as the host has room for. "delayed": one step of
        staleness, Adam concurrently with the next step. "auto" is for jobs only:
        "speculative" where it is faster by the plan and then by the first steps, else "exact".""",
    )
    warmup_steps: int = option(
        0,
        'in mode "delayed", exact steps before the first delayed one.',
        not_negative=True,
        needs=Needs(
            "update", ("delayed",), "it counts the exact steps before the first delayed one"
        ),
    )
    clip_norm: float | None = option(
        None,
        "largest global gradient norm; None: only `clip_grad_norm_` of the optimizer clips.",
        positive=True,
    )
    skip_nonfinite: bool = option(
        True,
        """skip a step whose gradient norm is not finite; three in a row log a warning. If False and
        nothing is clipped, Adam of mode "exact" runs inside backward.""",
    )
    loss_scale_hysteresis: int = option(
        1,
        """with "fp16", the overflow since the loss scale last grew that first halves it; 1, every
        one does, as in torch's GradScaler.""",
        positive=True,
        needs=Needs("precision", ("fp16",), "only fp16 losses are scaled"),
    )
    grad_accum_steps: int = option(
        1,
        "microbatches per step, summed in fp32 on the host; `backward` divides by it, see above.",
        positive=True,
    )
    skip_unused: tuple[str, ...] = option(
        (),
        """names of parameters, or shell patterns of them such as "*.experts.*": a step in which an
        expert got no gradient leaves its weights, moments and step count, as torch skips a
        parameter whose `.grad` is None. A tensor with three or more axes holds an expert per index
        of the first one. Named parameters are updated in `step()` in every update mode
        (docs/experts.md).""",
    )
    compute: ComputeOptions = ComputeOptions()
    weights: WeightOptions = WeightOptions()
    gradients: GradientOptions = GradientOptions()
    state: StateOptions = StateOptions()
    activations: ActivationOptions = ActivationOptions()
    sharding: ShardingOptions = ShardingOptions()
    memory: MemoryOptions = MemoryOptions()

    def __init__(self, **options: Unpack[OffloadOptions]) -> None:
        """Create options from groups or from flat names.

        Raises:
            TypeError: if a name is unknown.
            ValueError: if an option has a value by its flat name and groups are also given.
        """
        groups, named = _divided(options)
        if groups and (inner := [name for name in named if len(OPTIONS[name].path) > 1]):
            name = inner[0]
            raise ValueError(
                f"{name} = {named[name]!r} and {', '.join(groups)} = ... are both given: set "
                f"{'.'.join(OPTIONS[name].path)} in its group instead. To change an option of a "
                f"config: config.replace({name}={named[name]!r})"
            )
        self._set({**_DEFAULTS, **groups}, named)

    def replace(self, **options: Unpack[OffloadOptions]) -> OffloadConfig:
        """Return a copy with new values of some options, by the keywords of `offload()`.

        Raises:
            TypeError: if a name is unknown.
        """
        groups, named = _divided(options)
        changed = object.__new__(OffloadConfig)
        current = {field.name: getattr(self, field.name) for field in fields(self)}
        changed._set({**current, **groups}, named)
        return changed

    def _set(self, values: dict[str, Any], named: Mapping[str, Any]) -> None:
        """Set every field to `values`, and then the options in `named` by their flat names."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in named.items():
            *group, key = OPTIONS[name].path
            if group:
                changes.setdefault(group[0], {})[key] = value
            else:
                values[key] = value
        for owner, keys in changes.items():
            values[owner] = replace(values[owner], **keys)
        for key, value in values.items():
            object.__setattr__(self, key, value)
        _freeze(self)

    def value(self, name: str) -> Any:
        """Return the value of the option with this keyword of `offload()`."""
        return OPTIONS[name].of(self)

    def options(self, *, changed: bool = False) -> dict[str, Any]:
        """Return the values of options by the keywords of `offload()`: all options, or with
        `changed` only the options that differ from their defaults."""
        values = {name: option.of(self) for name, option in OPTIONS.items()}
        if not changed:
            return values
        return {name: value for name, value in values.items() if value != OPTIONS[name].default}

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each broken rule; each sentence begins with the option's name."""
        out_of_range = [
            problem for option in OPTIONS.values() for problem in option.problems(option.of(self))
        ]
        yield from out_of_range or self._contradictions()

    def checked(self) -> OffloadConfig:
        """Return self after a check of all rules.

        Raises:
            OptionError: with every problem.
        """
        if problems := tuple(self.problems()):
            raise OptionError(*problems)
        return self

    @property
    def uses_disk(self) -> bool:
        """True if state, gradients or weights are in a file of `scratch_dir`."""
        return self.state.disk_share > 0 or self.weights.tier == "disk"

    def zero_stage_among(self, ranks: int) -> int:
        """Return the ZeRO stage on `ranks` ranks; 0: one rank.

        Raises:
            OptionError: if the stage contradicts `working`.
        """
        stage = self.sharding.zero_stage
        if ranks == 1:
            return 0
        if self.weights.offloaded and stage in (1, 2):
            raise OptionError(
                f"working = {self.weights.tier!r} and zero_stage = {stage}: with {ranks} "
                "ranks each host holds a shard of the weights, gathered for each use: set "
                "zero_stage = 3"
            )
        return stage or (3 if self.weights.offloaded else 2)

    def streams_among(self, ranks: int) -> bool:
        """Return True if repeated blocks may be streamed, from host, disk or shards."""
        return self.weights.offloaded or self.zero_stage_among(ranks) == 3

    @property
    def updates_early(self) -> bool:
        """True in mode "exact" if a bucket can be updated before anything global is known."""
        return self.update == "exact" and self.clip_norm is None and not self.skip_nonfinite

    def _contradictions(self) -> Iterator[str]:
        for declared in OPTIONS.values():
            if (needs := declared.needs) is not None:
                yield from declared.without_effect(declared.of(self), self.value(needs.option))
        keeps = STATE_PRECISIONS[self.state.format]
        yield from broken(
            (
                self.precision == "fp16" and not self.skip_nonfinite,
                "skip_nonfinite = False and precision = 'fp16': dynamic loss scaling finds its "
                "scale by skipping steps that overflow. Use precision = 'bf16', or set it to True",
            ),
            (
                self.precision not in ("auto", *keeps),
                _cannot_keep(self.state.format, self.precision),
            ),
            *self._contradictions_of_placement(),
            *self._contradictions_of_disk(),
        )

    def _contradictions_of_placement(self) -> Iterator[tuple[object, str]]:
        """Yield the rules of `broken` about the placement of weights, activations and state."""
        state_on, spill, working = self.state.tier, self.memory.checkpoint_spill, self.weights.tier
        shards_weights = self.weights.offloaded or self.sharding.zero_stage == 3
        yield from (
            (
                self.weights.resident_blocks and not shards_weights,
                f"resident_blocks = {self.weights.resident_blocks} applies only with working = "
                "'host' or zero_stage = 3: otherwise all blocks stay on the device",
            ),
            (
                self.sharding.keep_whole and not shards_weights,
                f"keep_whole = {list(self.sharding.keep_whole)} applies only with zero_stage = 3, "
                "which shards modules outside of layers: leave it out",
            ),
            (
                self.activations.partition and not self.activations.recomputes,
                f"partition_activations = True and activation = {self.activations.mode!r}, "
                f"recompute_blocks = {self.activations.recompute_blocks}: only inputs that "
                "recompute starts from are divided: set activation = 'recompute' or 'offload'",
            ),
            (
                not (self.activations.policy is None or callable(self.activations.policy)),
                f"activation_policy = {self.activations.policy!r} is no function",
            ),
            (
                self.activations.policy is not None and self.compute.compile_blocks,
                "activation_policy and compile_blocks = True: in compiled layers the compiler "
                "chooses what backward computes again: set activation_budget instead",
            ),
            (
                self.activations.budget is not None and not self.compute.compile_blocks,
                f"activation_budget = {self.activations.budget} and compile_blocks = False: it "
                "divides what compiled layers save: set compile_blocks = True, or give an "
                "activation_policy",
            ),
            (
                (self.activations.budget or 0.0) > 1,
                f"activation_budget = {self.activations.budget} is more than 1",
            ),
            (
                state_on == "device" and self.weights.offloaded,
                f"working = {working!r} and state_on = 'device': streamed weights are updated on "
                "the host: set working = 'device', or a share, which resident blocks can have",
            ),
            (
                state_on in ("device", "disk") and spill,
                f"checkpoint_spill = {spill} is host memory for state on the host, and with "
                f"state_on = {state_on!r} none is there: leave it out",
            ),
        )

    def _contradictions_of_disk(self) -> Iterator[tuple[object, str]]:
        """Yield the rules of `broken` about the file in `scratch_dir`."""
        state_on = self.state.tier
        yield from (
            (
                self.memory.scratch_dir is not None and not self.uses_disk,
                f"scratch_dir = {shown(self.memory.scratch_dir)} is for state on the disk, and "
                f"state_on = {shown(state_on)}: leave it out, or set state_on = 'disk'",
            ),
            (
                self.update == "speculative" and self.uses_disk,
                "update = 'speculative' and "
                + (f"state_on = {shown(state_on)}" if self.state.disk_share else "working = 'disk'")
                + ": speculation updates a second copy of the state in host memory: use update = "
                "'exact' or 'delayed'",
            ),
            (
                self.gradients.tier == "disk" and not self.state.disk_share,
                f"grad_on = 'disk' and state_on = {shown(state_on)}: a gradient is on the disk "
                "where its state is, as it waits for it: leave it out, or set state_on = 'disk' "
                "or a share of it",
            ),
            (
                self.gradients.tier == "disk" and self.update == "delayed",
                "grad_on = 'disk' and update = 'delayed': a slot is free once its gradient is "
                "measured, and the host does that after the update of the previous step: use "
                "update = 'exact', or grad_on = 'host'",
            ),
        )


_GROUPS: dict[str, type[OptionGroup]] = {
    "compute": ComputeOptions,
    "weights": WeightOptions,
    "gradients": GradientOptions,
    "state": StateOptions,
    "activations": ActivationOptions,
    "sharding": ShardingOptions,
    "memory": MemoryOptions,
}

_DEFAULTS = {field.name: field.default for field in fields(OffloadConfig)}


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in chain(
        declared_in(OffloadConfig),
        *(declared_in(kind, group) for group, kind in _GROUPS.items()),
    )
}
"""Maps a keyword of `offload()`, which is also the key of the table `[offload]`, to its option."""


def chosen_options(config: OffloadConfig | None, options: OffloadOptions) -> OffloadConfig:
    """Return the options of a function that takes `config=None, **options`.

    Raises:
        TypeError: if `config` is not an OffloadConfig, or an option is unknown.
        ValueError: if both are given.
    """
    if config is None:
        return OffloadConfig(**options)
    if not isinstance(config, OffloadConfig):
        raise TypeError(f"config is a {type(config).__name__}: give an OffloadConfig")
    if options:
        listed = ", ".join(f"{name} = {value!r}" for name, value in options.items())
        keywords = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"config and {listed} are both given: put it into the config "
            f"(config.replace({keywords})), or leave the config out"
        )
    return config


def _divided(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keyword arguments into groups and options by flat names.

    Raises:
        TypeError: if a name is unknown, or a group has a wrong type.
    """
    groups, named = {}, {}
    for key, value in options.items():
        if key in _GROUPS and isinstance(value, _GROUPS[key]):
            groups[key] = value
        elif key in OPTIONS:
            named[key] = value
        elif key in _GROUPS:
            raise TypeError(f"{key} = {value!r} must be a {_GROUPS[key].__name__}")
        else:
            group = [name for name, o in OPTIONS.items() if key.startswith(f"{o.path[0]}_")]
            raise TypeError(f"unknown option {key!r}{nearest(key, group or [*OPTIONS, *_GROUPS])}")
    return groups, named


def _cannot_keep(state: str, precision: Precision) -> str:
    if state not in ("split16", "int8"):
        precisions = " or ".join(map(repr, STATE_PRECISIONS[state]))
        return f"state = '{state}' does not keep {precision} weights: use precision = {precisions}"
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
