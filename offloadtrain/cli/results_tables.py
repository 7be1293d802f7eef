"""Tables from results files of `python -m benchmarks.gpu`: every step, and the project's goals.

Nothing is measured here, and nothing about jobs is known; if no file has a figure, the table says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.config.errors import InputError
from offloadtrain.config.job import OFFLOAD
from offloadtrain.config.units import format_bytes, format_count
from offloadtrain.step.layout.formats import FORMATS

SCHEMA = 1
_MOST_BYTES = 16 << 20
_GIB = 1 << 30
_K = 1024

NOTHING = "Nothing has been measured on a GPU yet."

Rows = Iterable[Sequence[str]]


class ResultsError(InputError):
    """A results file cannot be read."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Measured steps of one system.

    Attributes:
        spec: fields of `benchmarks.gpu.spec.Spec`.
        group: group of the suite.
        figures: values by name.
        planned: the planned figures; empty if there are none.
    """

    name: str
    group: str
    spec: Mapping[str, Any]
    figures: Mapping[str, Any]
    planned: Mapping[str, Any]

    @property
    def system(self) -> str:
        return str(self.spec["system"])

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return int(self.figures["step_tokens"])

    @property
    def work(self) -> tuple[object, ...]:
        """The work of a step, equal for all compared systems."""
        keys = ("size", "micro_batch", "seq_len", "grad_accum_steps", "precision")
        return tuple(self.spec[key] for key in keys)

    @property
    def computation(self) -> tuple[object, ...]:
        """How layers compute; offloaded layer inputs do not change it."""
        options = self.spec["options"]
        mode = self.option("activation", "recompute" if self.spec["recompute"] else "keep")
        again = "recompute" if mode == "offload" else mode
        rest = (options.get(key) for key in ("activation_budget", "compile_blocks", "fp8"))
        return (again, *rest)

    @property
    def label(self) -> str:
        """The system and its options in words."""
        options = dict(self.spec["options"])
        if options.get("compile_blocks") and options.get("activation") == "selective":
            selective = OFFLOAD.replace(activation="selective").activations
            options.setdefault("activation_budget", selective.compiled_budget)
            del options["activation"]
        words = (_in_words(*option) for option in sorted(options.items()))
        cap = self.spec["gpu_memory"]
        caps = [f"cap of {format_bytes(cap)}"] if cap else []
        return ", ".join([_SYSTEMS.get(self.system, self.system), *words, *caps])

    def option(self, key: str, default: str) -> str:
        """Return an option of `offload` as text."""
        return str(self.spec["options"].get(key, default))


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """One results file, for one GPU.

    Attributes:
        note: remark of the person who committed the file, on machine and program.
        steps: steps of all systems, in file order.
        machine: measured rates; empty if there are none.
        summaries: other measurement → its result.
        missing: failed measurement → reason.
    """

    path: Path
    device: str
    note: str
    steps: tuple[Steps, ...]
    machine: Mapping[str, Any]
    summaries: Mapping[str, str]
    missing: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.path.name

    def resident(self, steps: Steps) -> Steps | None:
        """Return the resident run of the same model and tokens on an uncapped card, whose layers
        compute as these do; None if there is none."""
        resident = (other for other in self.steps if other.system == "resident")
        alike = steps.work, steps.computation
        return next((run for run in resident if (run.work, run.computation) == alike), None)

    def rate_over_resident(self, steps: Steps) -> float | None:
        """Return tokens/s relative to `resident`; None if that was not measured."""
        resident = self.resident(steps)
        if resident is None:
            return None
        return float(resident.figures["step_s"]) / float(steps.figures["step_s"])


def read(folder: Path) -> list[ResultsFile]:
    """Return the files measured on GPUs, sorted by name.

    Raises:
        ResultsError: a file is not JSON, or not in the format of `benchmarks.gpu`.
    """
    files = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = read_json(path, max_bytes=_MOST_BYTES, follow_link=True)
            is_ours = isinstance(values, dict) and values.get("schema") == SCHEMA
            if is_ours and values.get("machine", {}).get("gpu"):
                files.append(_file(path, values))
        except OSError as error:
            raise ResultsError(f"{path}: cannot be read as results: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ResultsError(f"{path}: not as make gpu writes it: {error!r}") from None
    return files


def _file(path: Path, values: Mapping[str, Any]) -> ResultsFile:
    measured: dict[str, dict[str, Any]] = values["measurements"]
    return ResultsFile(
        path=path,
        device=values["device"],
        note=str(values.get("note", "")),
        steps=tuple(
            Steps(
                name,
                measurement["group"],
                measurement["spec"],
                measurement["figures"],
                measurement.get("planned", {}),
            )
            for name, measurement in measured.items()
            if "spec" in measurement
        ),
        machine=measured.get("machine", {}),
        summaries={
            name: str(measurement["summary"])
            for name, measurement in measured.items()
            if "summary" in measurement
        },
        missing={
            name: str(why)
            for name, measurement in measured.items()
            if (why := measurement.get("missing") or measurement.get("error"))
        },
    )


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal.

    Attributes:
        limit: the bound.
        measured: yields the figures of a results file to compare with it.
        at_most: the limit is an upper bound.
        percent: figures are printed in percent.
    """

    what: str
    limit: float
    measured: Callable[[ResultsFile], Iterator[float]]
    at_most: bool = False
    percent: bool = False

    def worst(self, file: ResultsFile) -> float | None:
        """Return the worst figure; None if not measured."""
        figures = list(self.measured(file))
        if not figures:
            return None
        return max(figures) if self.at_most else min(figures)

    def is_met(self, value: float) -> bool:
        """Compare in the printed precision."""
        value, limit = round(value, 2), round(self.limit, 2)
        return value <= limit if self.at_most else value >= limit

    def shown(self, value: float) -> str:
        return f"{100 * value:.0f} %" if self.percent else f"{value:.2f}"


def _over_resident(file: ResultsFile, least: int, most: float, **options: str) -> Iterator[float]:
    """Yield offloaded over resident step time of the 3B model, for tokens per step in a range."""
    for ours in _ours(file):
        share = file.rate_over_resident(ours)
        is_this_case = ours.spec["size"] == "llama-3b" and dict(ours.spec["options"]) == options
        if share and is_this_case and least <= ours.tokens <= most:
            yield 1 / share


def _speedup_over_deepspeed(file: ResultsFile) -> Iterator[float]:
    return (
        deepspeed.figures["step_s"] / ours.figures["step_s"]
        for ours in _ours(file)
        for deepspeed in file.steps
        if deepspeed.system == "deepspeed" and deepspeed.work == ours.work
        if not ours.spec["options"]
    )


def _speedup_over_exact(file: ResultsFile) -> Iterator[float]:
    """Yield the speedup of `speculative` over `exact` up to 16k tokens per step, whether or not
    predictions were right."""
    return (
        exact.figures["step_s"] / guesses.figures["step_s"]
        for guesses in _ours(file)
        if guesses.option("update", "exact") == "speculative" and guesses.tokens <= 16 * _K
        for exact in _ours(file)
        if exact.work == guesses.work and _state(exact) == _state(guesses)
        if exact.option("update", "exact") == "exact"
    )


def _state(steps: Steps) -> tuple[str, str]:
    return steps.option("state", "fp32"), steps.option("state_on", "host")


def _mfu_of_13b(file: ResultsFile) -> Iterator[float]:
    return (
        result.figures["mfu_6p"]
        for result in _ours(file)
        if result.spec["size"] == "gpt-13b" and result.spec["gpu_memory"] == 32 * _GIB
        if result.tokens >= 64 * _K and result.figures["mfu_6p"]
    )


def _bus_bytes(file: ResultsFile) -> Iterator[float]:
    return (
        result.figures["bus_bytes_per_param"]
        for result in _one_microbatch(file)
        if result.option("working", "device") == "device"
    )


def _host_bytes(file: ResultsFile, state: str) -> Iterator[float]:
    return (
        result.figures["host_bytes_per_param"]
        for result in _one_microbatch(file)
        if result.option("state", "fp32") == state
        if result.option("update", "exact") == "exact"
        if result.option("activation", "recompute") != "offload"
    )


def _one_microbatch(file: ResultsFile) -> Iterator[Steps]:
    return (
        result
        for result in _ours(file)
        if result.spec["grad_accum_steps"] == 1 and result.option("state_on", "host") == "host"
    )


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
    Goal("tokens/s over DeepSpeed ZeRO-2 offload", 2.0, _speedup_over_deepspeed),
    Goal("`speculative` over `exact`, up to 16k tokens per step", 1.2, _speedup_over_exact),
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


def summary(files: Sequence[ResultsFile]) -> str:
    """Return the README's tables: for each card the newest measurement of each step, by model and
    tokens, without steps that never clip, which nobody uses in training."""
    paragraphs = []
    for device in dict.fromkeys(file.device for file in files):
        of_device = [file for file in files if file.device == device]
        newest = {steps.name: (file, steps) for file in of_device for steps in file.steps}
        shown = [item for item in newest.values() if "clip_norm" not in item[1].spec["options"]]
        shown.sort(key=lambda item: _place(item[1]))
        if not shown:
            continue
        names = ", ".join(f"`{file.name}`" for file in of_device)
        head = ("model, tokens", "system", *_RATES)
        rows = [
            (f"{steps.spec['size']}, {steps.tokens // _K}k", steps.label, *_rates(file, steps))
            for file, steps in shown
        ]
        paragraphs.append(f"{names}: {of_device[-1].note or device}\n\n" + _table(head, rows))
    return "\n\n".join(paragraphs) or NOTHING


def _place(steps: Steps) -> tuple[object, ...]:
    order = ("resident", "offloadtrain", *_SYSTEMS)
    of_size = steps.figures["params"], steps.tokens
    return *of_size, order.index(steps.system), len(steps.spec["options"]), steps.name


_SYSTEMS = {
    "resident": "torch, all on the GPU",
    "deepspeed": "DeepSpeed ZeRO-2 offload",
    "fsdp2": "FSDP2 CPUOffloadPolicy",
    "torchao": "torchao CPUOffloadOptimizer (no fp32 masters, no clipping)",
}
_WORDS = {
    "activation": {
        "selective": "selective recompute",
        "offload": "inputs of layers on the host",
    },
    "compile_blocks": {"True": "compiled"},
    "state": {"split16": "16-bit state", "int8": "8-bit state"},
    "state_on": {"auto": "state on the GPU where there is room"},
    "working": {"host": "weights streamed"},
}
"""Option → value → a description for readers who do not know the options."""


def _in_words(key: str, value: object) -> str:
    match key:
        case "activation_budget":
            return f"keeps {100 * float(str(value)):.0f} % of activations"
        case "device_memory_limit":
            return f"within {format_bytes(int(str(value)))}"
        case "fp8":
            return f"FP8 {value}"
        case "update":
            return f"{value} updates"
    return _WORDS.get(key, {}).get(str(value), f"{key}={value}")


def everything(files: Sequence[ResultsFile]) -> str:
    """Return each file's note and tables: steps, plans, memory, goals, rates and failed
    measurements."""
    paragraphs = []
    for file in files:
        paragraphs.append(f"`{file.name}`: {file.note or file.device}")
        for title, head, rows_of in _SECTIONS:
            if rows := list(rows_of(file)):
                paragraphs.append(f"**{title}**\n\n" + _table(head, rows))
    return "\n\n".join(paragraphs) or NOTHING


def _table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _goal_rows(file: ResultsFile) -> Rows:
    for goal in GOALS:
        value = goal.worst(file)
        limit = ("≤ " if goal.at_most else "≥ ") + goal.shown(goal.limit)
        measured = "not measured" if value is None else goal.shown(value)
        met = "-" if value is None else "yes" if goal.is_met(value) else "no"
        yield goal.what, limit, measured, met


def _step_rows(file: ResultsFile) -> Rows:
    for result in file.steps:
        yield result.name, f"`{result.group}`", *_rates(file, result)


def _rates(file: ResultsFile, result: Steps) -> Sequence[str]:
    figures = result.figures
    return (
        _seconds(figures["step_s"]),
        format_count(figures["tokens_per_s"]),
        _percent(file.rate_over_resident(result)),
        _percent(figures.get("mfu")),
        _bytes(figures, "device_peak_bytes"),
        _bytes(figures, "host_bytes"),
    )


def _plan_rows(file: ResultsFile) -> Rows:
    for result in file.steps:
        if result.planned:
            planned_s, measured_s = result.planned["step_s"], result.figures["step_s"]
            ratio = f"{measured_s / planned_s:.2f}"
            exposed = _exposed(result.figures)
            right = _percent(result.figures.get("right_guesses"))
            yield result.name, _seconds(planned_s), _seconds(measured_s), ratio, exposed, right


def _host_rows(file: ResultsFile) -> Rows:
    for result in file.steps:
        if "anonymous_bytes" in result.figures:
            ledger, process = result.figures["host_bytes"], result.figures["anonymous_bytes"]
            sizes = format_bytes(ledger), format_bytes(process)
            yield result.name, *sizes, f"{process / ledger:.2f}"


def _machine_rows(file: ResultsFile) -> Rows:
    bus = file.machine.get("bus_gbps", {})
    rates = file.machine.get("machine", {})
    for name in ("h2d", "d2h", "both"):
        if name in bus:
            yield f"pinned copies, {name}", f"{bus[name]:.1f} GB/s"
    if rates:
        yield "DRAM, streamed by all cores", f"{rates['dram_gbps']:.1f} GB/s"
    for threads, by_state in file.machine.get("adam_gparams", {}).items():
        text = ", ".join(f"{state} {rate:.2f}" for state, rate in by_state.items())
        yield f"Adam, threads: {threads}", f"{text} Gparam/s"
    for key, name in (("", "alone"), ("_copying", "while pinned copies run both ways")):
        measured = {state: rates.get(f"{state}{key}_gparams") for state in FORMATS}
        text = ", ".join(f"{state} {rate:.2f}" for state, rate in measured.items() if rate)
        if text:
            yield f"Adam of an update, {name}", f"{text} Gparam/s"


def _missing_rows(file: ResultsFile) -> Rows:
    for name, why in file.missing.items():
        yield name, why.splitlines()[-1].replace("|", "\\|")


def _seconds(step_s: float) -> str:
    return f"{step_s:.3f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _bytes(figures: Any, key: str) -> str:
    value = figures.get(key)
    return "-" if value is None else format_bytes(value)


def _exposed(figures: Any) -> str:
    """Format "12 ms (h2d 9, host 3)" without lanes below half a millisecond."""
    if "exposed_ms" not in figures:
        return "-"
    lanes = sorted(figures["exposed_by_lane"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{lane} {spent:.0f}" for lane, spent in lanes if spent >= 0.5)
    return f"{figures['exposed_ms']:.0f} ms" + (f" ({named})" if named else "")


_RATES = ("step", "tokens/s", "of resident", "MFU", "GPU memory", "host memory")
_SECTIONS: Sequence[tuple[str, Sequence[str], Callable[[ResultsFile], Rows]]] = (
    (
        "Steps, with the rate as a share of the same model, computed alike, resident on the same "
        "card",
        ("what", "group", *_RATES),
        _step_rows,
    ),
    (
        "Planned with the machine's measured rates",
        ("what", "planned", "measured", "measured / planned", "compute waited", "right guesses"),
        _plan_rows,
    ),
    (
        "Host memory: the Ledger, and the most anonymous memory that the process added",
        ("what", "Ledger", "process", "process / Ledger"),
        _host_rows,
    ),
    ("Goals", ("goal", "wanted", "measured", "met"), _goal_rows),
    ("The machine", ("what", "rate"), _machine_rows),
    ("Other measurements", ("what", "result"), lambda file: file.summaries.items()),
    ("Not measured", ("what", "why"), _missing_rows),
)
"""Title, column heads, and rows of each table of a file."""
