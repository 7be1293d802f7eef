"""The command line: `offloadtrain COMMAND`. stdout is for data, stderr for messages.

Commands are listed here and imported on use, so that help does not load torch.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from cyclopts import App, CycloptsError, UnknownOptionError

from offloadtrain.boundary.output import sanitized_output
from offloadtrain.boundary.safe_open import UnsafeFileError
from offloadtrain.boundary.sanitize import unfiltered
from offloadtrain.cli.commands.doctor import package_version
from offloadtrain.cli.exit_codes import DOES_NOT_FIT, DONE, FAILED, USAGE, of_error
from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.hardware import host_memory


class _OnUse:
    """Proxy of an object that is created on first use, because its import takes 0.1 s."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Any:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


_NO_DEFAULT = ('""', "()", "False")
"""Defaults that mean "not given", which help does not show."""
_SAYS_DEFAULT = re.compile(r"\b[Dd]efault[: ]")
"""Matches option texts that explain their default: help does not show the value as well."""


class _Unbroken(_OnUse):
    """cyclopts's help, without the line breaks of docstrings and without defaults that mean "not
    given"."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        from rich.text import Text

        for entry in panel.entries:
            text = getattr(entry.description, "primary_renderable", None)
            if isinstance(text, Text):
                entry.description.primary_renderable = Text(text.plain.replace("\n", " "))
            if entry.default in _NO_DEFAULT or _SAYS_DEFAULT.search(str(text)):
                entry.default = None
        self._made(console, options, panel)


class _Command:
    """A command: the location of its function, and its help.

    Attributes:
        function: "module:function", imported when the command is used.
        summary: its line in the list of commands.
        examples: command lines.
    """

    def __init__(self, function: str, summary: str, *examples: str) -> None:
        self.function, self.summary, self.examples = function, summary, examples


COMMANDS = {
    "train": _Command(
        "offloadtrain.cli.commands.train:train",
        "Train a job.",
        "offloadtrain train demo",
        "offloadtrain train my.toml --resume auto --set optim.lr=3e-4 train.steps=1000",
    ),
    "export": _Command(
        "offloadtrain.cli.commands.runs:export",
        "Write the weights of a run as a folder for transformers.",
        "offloadtrain export runs/latest out",
        "offloadtrain export runs/latest/checkpoints/step-00001000 out --dtype fp32",
    ),
    "checkpoints": _Command(
        "offloadtrain.cli.commands.runs:checkpoints",
        "List the checkpoints of a run, and verify them.",
        "offloadtrain checkpoints runs/latest",
        "offloadtrain checkpoints runs/latest --verify --json",
    ),
    "convert": _Command(
        "offloadtrain.cli.commands.convert:convert",
        "Convert checkpoints of torch, FSDP or DeepSpeed to a run, or a run to torch.",
        "offloadtrain convert ds_run/global_step1000 --job my.toml",
        "offloadtrain convert runs/latest state.pt --to torch",
    ),
    "generate": _Command(
        "offloadtrain.cli.commands.runs:generate",
        "Let a trained model continue a text.",
        'offloadtrain generate runs/latest --prompt "def main"',
        'offloadtrain generate out --prompt "def main" --temperature 0',
    ),
    "eval": _Command(
        "offloadtrain.cli.commands.runs:evaluate",
        "Compute loss and perplexity of a trained model over a token file.",
        "offloadtrain eval runs/latest --data data/val.bin",
        "offloadtrain eval out --data data/val.bin --seq-len 512 --json",
    ),
    "prepare": _Command(
        "offloadtrain.cli.commands.jobs:prepare",
        "Turn text into token files.",
        "offloadtrain prepare python-stdlib data/stdlib",
        "offloadtrain prepare corpus/ data/corpus --val-fraction 0.01",
    ),
    "ls": _Command(
        "offloadtrain.cli.commands.jobs:list_jobs",
        "List the shipped jobs.",
        "offloadtrain ls",
        "offloadtrain ls --json",
    ),
    "cp": _Command(
        "offloadtrain.cli.commands.jobs:copy_job",
        "Copy a shipped job into a file to edit.",
        "offloadtrain cp gpt2_124m",
        "offloadtrain cp demo jobs/mine.toml",
    ),
    "import-deepspeed": _Command(
        "offloadtrain.cli.commands.convert:import_deepspeed",
        "Translate a DeepSpeed configuration, and list what has no translation.",
        "offloadtrain import-deepspeed ds_config.json job.toml --trainer-args train.py",
        "offloadtrain import-deepspeed ds_config.json --to mixin",
    ),
    "plan": _Command(
        "offloadtrain.cli.commands.plan:plan",
        "Predict the memory and the speed of a job before it runs.",
        "offloadtrain plan my.toml --gpus 4 --gpu-memory 24GiB --host-memory 256GiB",
        "offloadtrain plan --fine-tune 8B --gpu 24GiB --host 64GiB",
    ),
    "doctor": _Command(
        "offloadtrain.cli.commands.doctor:doctor",
        "Check and benchmark this machine: PASS, WARN or FAIL per line, with the remedy.",
        "offloadtrain doctor",
        "offloadtrain doctor --folder /data/runs --save mine.toml",
    ),
    "report": _Command(
        "offloadtrain.cli.commands.bench:report",
        "Print tables of the GPU measurements.",
        "offloadtrain report",
        "offloadtrain report benchmarks/results",
    ),
    "trace": _Command(
        "offloadtrain.cli.commands.runs:trace",
        "Write a Chrome trace of the sampled steps of a run.",
        "offloadtrain trace runs/20261121-080000-demo",
        "offloadtrain trace runs/20261121-080000-demo --out /tmp/trace.json",
    ),
    # By name, because the trainer never imports the monitor.
    "tui": _Command(
        "offloadtrain_tui.command:tui",
        "Monitor runs in the terminal.",
        "offloadtrain tui",
        "offloadtrain tui runs/20261121-080000-demo --replay --speed 20",
    ),
    "status": _Command(
        "offloadtrain_tui.reports:status",
        "Print the status of a run.",
        "offloadtrain status --watch",
        "offloadtrain status runs/a --json",
    ),
    "runs": _Command(
        "offloadtrain_tui.reports:list_all",
        "List runs with their states and losses.",
        "offloadtrain runs",
        "offloadtrain runs /data/runs --json",
    ),
    "events": _Command(
        "offloadtrain_tui.reports:show_events",
        "Print the events of a run.",
        "offloadtrain events",
        "offloadtrain events runs/latest -f --json",
    ),
    "ctl": _Command(
        "offloadtrain_tui.reports:ctl",
        "Send a running job a request: checkpoint, stop, abort, note or acknowledge.",
        "offloadtrain ctl runs/latest checkpoint",
        "offloadtrain ctl runs/latest note 'disk replaced'",
    ),
    "version": _Command(
        "offloadtrain.cli.commands.doctor:version",
        "Print the versions to include in a bug report.",
        "offloadtrain version",
        "offloadtrain --version",
    ),
}

BENCHMARKS = {
    "adam": _Command(
        "offloadtrain.cli.commands.bench:adam",
        "Compare CPU Adam with the memory limit, torch and DeepSpeed.",
        "offloadtrain bench adam",
        "offloadtrain bench adam --n 16M --threads 1,2,4 --json > adam.json",
    ),
    "step": _Command(
        "offloadtrain.cli.commands.bench:step",
        "Compare a step with its schedule and with plain torch.",
        "offloadtrain bench step",
        "offloadtrain bench step --layers 32 --json > step.json",
    ),
    "scale": _Command(
        "offloadtrain.cli.commands.bench:scale",
        "Compare a step on 1, 2 and 4 ranks.",
        "offloadtrain bench scale",
        "offloadtrain bench scale --ranks 1,2,4,8 --json > scale.json",
    ),
    "disk": _Command(
        "offloadtrain.cli.commands.bench:disk",
        "Compare an update of state on the disk with the drive's own speed.",
        "offloadtrain bench disk",
        "offloadtrain bench disk --folder /nvme --size 4GiB --json > disk.json",
    ),
}


def _app(
    name: str, summary: str, *examples: str, commands: Mapping[str, _Command], **more: Any
) -> App:
    app = App(
        name=name,
        help=summary,
        help_format="plaintext",
        help_formatter=_Unbroken(lambda: import_module("cyclopts.help").DefaultFormatter()),
        help_epilogue=_epilogue(examples),
        **more,
    )
    for command_name, command in commands.items():
        app.command(
            command.function,
            name=command_name,
            help=command.summary,
            help_epilogue=_epilogue(command.examples),
        )
    return app


def _epilogue(examples: Iterable[str]) -> str:
    return "\n".join(("Examples:", *(f"  {line}" for line in examples)))


app = _app(
    "offloadtrain",
    "Train large models on small GPUs: optimizer state on the host, Adam on the CPU.",
    "offloadtrain train demo",
    "offloadtrain train --help",
    commands=COMMANDS,
    version=package_version,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.command(
    _app(
        "bench",
        "Run benchmarks on this machine.",
        "offloadtrain bench adam --n 16M",
        commands=BENCHMARKS,
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Its output contains no escape sequences from
    quoted names or messages."""
    with sanitized_output():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = bool(os.environ.get("OFFLOADTRAIN_DEBUG"))
    if "--debug" in arguments:
        arguments.remove("--debug")
        debug = True
    try:
        # Unfiltered, since help and usage errors have colors.
        bare = unfiltered(sys.stdout)
        help_console: Any = _OnUse(lambda: import_module("rich.console").Console(file=bare))
        code = app(arguments, console=help_console, print_error=False, exit_on_error=False)
        return int(code or DONE)
    except CycloptsError as error:
        print(_wrong_usage(error), file=sys.stderr)
        return USAGE
    except SystemExit as exit_request:  # the command has already printed the error
        return USAGE if exit_request.code else DONE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # stdout was closed (`offloadtrain ls | head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        return _failed(error, debug)


def _wrong_usage(error: CycloptsError) -> str:
    if isinstance(error, UnknownOptionError):
        positional = [name for a in error.argument_collection for name in a.names if name.isupper()]
        option = (error.token.keyword or error.token.value).partition("=")[0]
        if option.removeprefix("--").upper() in positional:
            usage = " ".join(["offloadtrain", *(error.command_chain or ()), *positional])
            return f"Unknown option: {option}. Arguments are given without names: {usage}"
    return str(error)


def _failed(error: Exception, debug: bool) -> int:
    """Print a known error as one message, an unknown one with its traceback; return the code."""
    if host_memory.is_out_of_memory(error) and not debug:
        print(host_memory.refusal(error), file=sys.stderr)
        return DOES_NOT_FIT
    code = of_error(error)
    known = isinstance(error, OffloadTrainError | UnsafeFileError)
    if not (debug or known) and isinstance(error, OSError) and error.strerror:
        # An error of a disk, a network or permissions, to which a command could add nothing.
        at = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        print(f"{at}{error.strerror} (--debug says where this was met)", file=sys.stderr)
    elif debug or (not known and code == FAILED):
        print("".join(traceback.format_exception(error)), end="", file=sys.stderr)
    else:
        print(str(error) or type(error).__name__, file=sys.stderr)
    return code
