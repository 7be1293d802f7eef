"""The generated pages of the documentation, for mkdocs-gen-files: nothing is written twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import cleandoc
from typing import Any, get_type_hints

import mkdocs_gen_files
from docstring_parser import parse

import offloadtrain as ot
from offloadtrain.cli import exit_codes
from offloadtrain.cli.main import app
from offloadtrain.config.hf_model import HF_KEYS, HfModel, Lora
from offloadtrain.config.job import OFFLOAD, OFFLOAD_KEYS, Config
from offloadtrain.config.model_shape import SIZES, ModelShape, num_params
from offloadtrain.config.offload import OPTIONS, OffloadConfig, OptionGroup
from offloadtrain.config.option import Option
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.config.sections import (
    DataConfig,
    DeviceConfig,
    LogConfig,
    OptimConfig,
    TrainConfig,
)
from offloadtrain.config.units import format_count
from offloadtrain.events import schema

TABLES: dict[str, tuple[type, object | None]] = {
    "model": (ModelShape, None),
    "model, with hf": (HfModel, None),
    "model.lora": (Lora, None),
    "device": (DeviceConfig, None),
    "offload": (OffloadConfig, None),
    "optim": (OptimConfig, None),
    "data": (DataConfig, None),
    "train": (TrainConfig, None),
    "log": (LogConfig, None),
    "ranks": (RanksConfig, None),
}
"""Table of a job → its class, and an instance with other defaults."""


def keys_page() -> Iterator[str]:
    yield "# Job keys\n"
    yield "Every key can be given as `--set TABLE.KEY=VALUE`. Keys without a default must be set.\n"
    yield "## Above the tables\n\n| key | type | default | meaning |\n|---|---|---|---|"
    hints, meant = get_type_hints(Config), _meanings(Config)
    for one in fields(Config):
        if hints[one.name] is str:
            yield _row(one, hints[one.name], None, meant.get(one.name, ""))
    yield ""
    for table, (kind, defaults) in TABLES.items():
        yield f"## [{table}]\n\n{_summary(kind)}\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        if kind is OffloadConfig:
            yield from (_option_row(option, OFFLOAD) for option in OFFLOAD_KEYS.values())
            yield ""
            continue
        hints, meant = get_type_hints(kind), _meanings(kind)
        for one in fields(kind):
            if kind is HfModel and one.name not in HF_KEYS:
                continue  # what reading the folder has found
            yield _row(one, hints[one.name], defaults, meant.get(one.name, ""))
        if kind is ModelShape:
            yield "| `size` | `str` | | all of these by one [name](sizes.md); keys beside it win |"
        yield ""


def _row(one: Field[Any], hint: object, defaults: object | None, meaning: str) -> str:
    default = getattr(defaults, one.name) if defaults is not None else one.default
    shown = "" if default is MISSING else f"`{default!r}`"
    return f"| `{one.name}` | `{_type(hint)}` | {shown} | {meaning} |"


def _option_row(option: Option, defaults: OffloadConfig) -> str:
    default = option.of(defaults)
    return f"| `{option.name}` | `{_type(option.kind)}` | `{default!r}` | {option.doc} |"


def _options_section() -> Iterator[str]:
    """The options of `offload()`, group by group."""
    yield "#### Options of `offload`\n"
    yield (
        "Keyword arguments of `offload`, `pipeline` and `plan_model`, and of `OffloadConfig`, "
        'which also takes them in groups: `OffloadConfig(state=StateOptions(format="int8"))`.\n'
    )
    yield "| option | in the config | type | default | meaning |\n|---|---|---|---|---|"
    for option in OPTIONS.values():
        yield (
            f"| `{option.name}` | `config.{'.'.join(option.path)}` | `{_type(option.kind)}` | "
            f"`{option.default!r}` | {option.doc} |"
        )
    yield ""


def _type(hint: object) -> str:
    text = getattr(hint, "__name__", None) if isinstance(hint, type) else None
    plain = re.sub(r"typing\.|Literal\[([^]]*)\]", lambda m: m[1] or "", text or str(hint))
    return plain.replace(" | ", " or ").replace("|", "\\|")


def _summary(kind: type) -> str:
    return parse(kind.__doc__ or "").short_description or ""


def _meanings(kind: type) -> dict[str, str]:
    """The docstring's word on each attribute; several may share one."""
    found = {}
    for attribute in parse(kind.__doc__ or "").params:
        for name in attribute.arg_name.split(","):
            found[name.strip()] = " ".join((attribute.description or "").split())
    return found


def sizes_page() -> Iterator[str]:
    yield "# Model sizes\n\n`model.size` in a job; keys beside it replace its own.\n"
    yield "| size | parameters | layers | width | heads |\n|---|---|---|---|---|"
    for name, shape in SIZES.items():
        yield (
            f"| `{name}` | {format_count(num_params(shape))} | {shape.num_layers} | "
            f"{shape.d_model} | {shape.num_heads} |"
        )


def exit_codes_page() -> Iterator[str]:
    yield "# Exit codes\n\n| code | name |\n|---|---|"
    for name, code in vars(exit_codes).items():
        if name.isupper() and isinstance(code, int):
            yield f"| {code} | {name.lower().replace('_', ' ')} |"
    yield "\nWhat to do: [troubleshooting](../troubleshooting.md)."


def events_page() -> Iterator[str]:
    """Every kind of record of a run's log, and the dataclasses that its fields hold."""
    yield f"# Events of the run log\n\nSchema version {schema.SCHEMA}.\n"
    yield cleandoc(schema.__doc__ or "").partition("\n\n")[2] + "\n"
    named = [one for name, one in vars(schema).items() if not name.startswith("_")]
    kinds = [one for one in named if isinstance(one, type) and is_dataclass(one)]
    for kind in sorted(kinds, key=lambda one: not issubclass(one, schema.Event)):
        name = getattr(kind, "KIND", kind.__name__)
        yield f"## {name}\n\n{_summary(kind)}\n"
        yield "| field | type | default | meaning |\n|---|---|---|---|"
        hints, meant = get_type_hints(kind), _meanings(kind)
        for one in fields(kind):
            yield _row(one, hints[one.name], None, meant.get(one.name, ""))
        yield ""


def python_page() -> Iterator[str]:
    yield "# Python\n\n`import offloadtrain as ot`\n"
    for name in ot.__all__:
        target = getattr(ot, name)
        if not callable(target):
            continue
        yield f"::: {target.__module__}.{target.__qualname__}"
        if target is OffloadConfig:
            yield "    options:\n      members: [replace, options, value, problems, checked]"
        elif isinstance(target, type) and issubclass(target, OptionGroup):
            yield "    options:\n      members: false"
        yield ""
        if target is ot.offload:
            yield from _options_section()


PAGES = {
    "keys": keys_page,
    "sizes": sizes_page,
    "exit_codes": exit_codes_page,
    "events": events_page,
    "python": python_page,
}
for page, lines in PAGES.items():
    with mkdocs_gen_files.open(f"reference/{page}.md", "w") as file:
        print(*lines(), sep="\n", file=file)
with mkdocs_gen_files.open("reference/cli.md", "w") as file:
    file.write(app.generate_docs(output_format="markdown"))
