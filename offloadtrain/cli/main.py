"""The command line: `offloadtrain COMMAND`. stdout is for data, stderr for messages.

Commands are named here and imported only on use, so that help does not load torch.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TextIO

from cyclopts import App, CycloptsError, CycloptsPanel

from offloadtrain.boundary.output import sanitized_output
from offloadtrain.boundary.safe_open import UnsafeFileError
from offloadtrain.boundary.sanitize import sanitize, unfiltered
from offloadtrain.cli.commands.version import package_version
from offloadtrain.cli.exit_codes import DONE, FAILED, USAGE, of_error
from offloadtrain.config.errors import OffloadTrainError


def _examples(*lines: str) -> str:
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))


def _wrong_usage(error: CycloptsError) -> object:
    """Return the argument parser's message, sanitized since it quotes the arguments."""
    return CycloptsPanel(sanitize(str(error)))


class _OwnTerminal:
    """Rich's console on a stream without the filter, for help and wrong usage, which have colors.
    Imported on use: it takes 0.1 s."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = unfiltered(stream)

    @cached_property
    def _console(self) -> Any:
        from rich.console import Console

        return Console(file=self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)


_NO_DEFAULT = ('""', "()", "False")
"""Defaults that are not shown: an option that is not given."""


class _Unbroken:
    """cyclopts's help, without the line breaks of the docstrings, and without defaults that say
    nothing. Imported on use."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        from rich.text import Text

        for entry in panel.entries:
            text = getattr(entry.description, "primary_renderable", None)
            if isinstance(text, Text):
                entry.description.primary_renderable = Text(text.plain.replace("\n", " "))
            if entry.default in _NO_DEFAULT:
                entry.default = None
        self._default(console, options, panel)

    @cached_property
    def _default(self) -> Any:
        from cyclopts.help import DefaultFormatter

        return DefaultFormatter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._default, name)


app = App(
    name="offloadtrain",
    help_formatter=_Unbroken(),
    help="Train large models on small GPUs: optimizer state on the host, Adam on the CPU.",
    help_format="plaintext",
    help_epilogue=_examples("offloadtrain train demo", "offloadtrain train --help"),
    version=package_version,
    error_formatter=_wrong_usage,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.command(
    "offloadtrain.cli.commands.train:train",
    name="train",
    help="Train a job.",
    help_epilogue=_examples(
        "offloadtrain train demo",
        "offloadtrain train my.toml --resume auto --set optim.lr=3e-4 train.steps=1000",
    ),
)
app.command(
    "offloadtrain.cli.commands.export:export",
    name="export",
    help="Write the weights of a run as a folder for transformers.",
    help_epilogue=_examples(
        "offloadtrain export runs/latest out",
        "offloadtrain export runs/latest/checkpoints/step-00001000 out --dtype fp32",
    ),
)
app.command(
    "offloadtrain.cli.commands.checkpoints:checkpoints",
    name="checkpoints",
    help="List the checkpoints of a run, and verify them.",
    help_epilogue=_examples(
        "offloadtrain checkpoints runs/latest",
        "offloadtrain checkpoints runs/latest --verify --json",
    ),
)
app.command(
    "offloadtrain.cli.commands.convert:convert",
    name="convert",
    help="Convert checkpoints of torch, FSDP or DeepSpeed to a run, or a run to torch.",
    help_epilogue=_examples(
        "offloadtrain convert ds_run/global_step1000 --job my.toml",
        "offloadtrain convert runs/latest state.pt --to torch",
    ),
)
app.command(
    "offloadtrain.cli.commands.generate:generate",
    name="generate",
    help="Let a trained model continue a text.",
    help_epilogue=_examples(
        'offloadtrain generate runs/latest --prompt "def main"',
        'offloadtrain generate out --prompt "def main" --temperature 0',
    ),
)
app.command(
    "offloadtrain.cli.commands.evaluate:evaluate",
    name="eval",
    help="Compute loss and perplexity of a trained model over a token file.",
    help_epilogue=_examples(
        "offloadtrain eval runs/latest --data data/val.bin",
        "offloadtrain eval out --data data/val.bin --seq-len 512 --json",
    ),
)
app.command(
    "offloadtrain.cli.commands.prepare:prepare",
    name="prepare",
    help="Turn text into token files.",
    help_epilogue=_examples(
        "offloadtrain prepare python-stdlib data/stdlib",
        "offloadtrain prepare corpus/ data/corpus --val-fraction 0.01",
    ),
)
app.command(
    "offloadtrain.cli.commands.jobs:list_jobs",
    name="ls",
    help="List the shipped jobs.",
    help_epilogue=_examples("offloadtrain ls", "offloadtrain ls --json"),
)
app.command(
    "offloadtrain.cli.commands.jobs:copy_job",
    name="cp",
    help="Copy a shipped job into a file to edit.",
    help_epilogue=_examples("offloadtrain cp gpt2_124m", "offloadtrain cp demo jobs/mine.toml"),
)
app.command(
    "offloadtrain.cli.commands.import_deepspeed:import_deepspeed",
    name="import-deepspeed",
    help="Translate a DeepSpeed configuration, and list what has no translation.",
    help_epilogue=_examples(
        "offloadtrain import-deepspeed ds_config.json job.toml --trainer-args train.py",
        "offloadtrain import-deepspeed ds_config.json --to mixin",
    ),
)
app.command(
    "offloadtrain.cli.commands.plan:plan",
    name="plan",
    help="Predict the memory and the speed of a job before it runs.",
    help_epilogue=_examples(
        "offloadtrain plan my.toml --gpus 4 --gpu-memory 24GiB --host-memory 256GiB",
        "offloadtrain plan --fine-tune 8B --gpu 24GiB --host 64GiB",
    ),
)
app.command(
    "offloadtrain.cli.commands.doctor:doctor",
    name="doctor",
    help="Check and benchmark this machine: PASS, WARN or FAIL per line, with the remedy.",
    help_epilogue=_examples(
        "offloadtrain doctor",
        "offloadtrain doctor --folder /data/runs --save mine.toml",
    ),
)
bench = App(
    name="bench",
    help_formatter=_Unbroken(),
    help="Run benchmarks on this machine.",
    help_format="plaintext",
    help_epilogue=_examples("offloadtrain bench adam --n 16M"),
)
bench.command(
    "offloadtrain.cli.commands.bench:adam",
    name="adam",
    help="Compare CPU Adam with the memory limit, torch and DeepSpeed.",
    help_epilogue=_examples(
        "offloadtrain bench adam",
        "offloadtrain bench adam --n 16M --threads 1,2,4 --json > adam.json",
    ),
)
bench.command(
    "offloadtrain.cli.commands.bench:step",
    name="step",
    help="Compare a step with its schedule and with plain torch.",
    help_epilogue=_examples(
        "offloadtrain bench step",
        "offloadtrain bench step --layers 32 --json > step.json",
    ),
)
bench.command(
    "offloadtrain.cli.commands.bench:scale",
    name="scale",
    help="Compare a step on 1, 2 and 4 ranks.",
    help_epilogue=_examples(
        "offloadtrain bench scale",
        "offloadtrain bench scale --ranks 1,2,4,8 --json > scale.json",
    ),
)
bench.command(
    "offloadtrain.cli.commands.bench:disk",
    name="disk",
    help="Compare an update of state on the disk with the drive's own speed.",
    help_epilogue=_examples(
        "offloadtrain bench disk",
        "offloadtrain bench disk --folder /nvme --size 4GiB --json > disk.json",
    ),
)
app.command(bench)
app.command(
    "offloadtrain.cli.commands.report:report",
    name="report",
    help="Print tables of the GPU measurements.",
    help_epilogue=_examples("offloadtrain report", "offloadtrain report benchmarks/results"),
)
app.command(
    "offloadtrain.cli.commands.trace:trace",
    name="trace",
    help="Write a Chrome trace of the sampled steps of a run.",
    help_epilogue=_examples(
        "offloadtrain trace runs/20261121-080000-demo",
        "offloadtrain trace runs/20261121-080000-demo --out /tmp/trace.json",
    ),
)
# By name: the trainer never imports the monitor.
app.command(
    "offloadtrain_tui.command:tui",
    name="tui",
    help="Monitor runs in the terminal.",
    help_epilogue=_examples(
        "offloadtrain tui",
        "offloadtrain tui runs/20261121-080000-demo --replay --speed 20",
    ),
)
app.command(
    "offloadtrain_tui.reports:status",
    name="status",
    help="Print the status of a run.",
    help_epilogue=_examples("offloadtrain status --watch", "offloadtrain status runs/a --json"),
)
app.command(
    "offloadtrain_tui.labels:tag",
    name="tag",
    help="Label a run with tags and a note, or pin it.",
    help_epilogue=_examples(
        "offloadtrain tag runs/latest baseline lr-3e-4 --note 'before the new data'",
        "offloadtrain tag runs/latest --pin",
    ),
)
app.command(
    "offloadtrain_tui.reports:list_all",
    name="runs",
    help="List runs with their states and losses.",
    help_epilogue=_examples("offloadtrain runs", "offloadtrain runs /data/runs --json"),
)
app.command(
    "offloadtrain_tui.reports:show_events",
    name="events",
    help="Print the events of a run.",
    help_epilogue=_examples("offloadtrain events", "offloadtrain events runs/latest -f --json"),
)
app.command(
    "offloadtrain_tui.reports:ctl",
    name="ctl",
    help="Send a running job a request: checkpoint, stop, abort, note or acknowledge.",
    help_epilogue=_examples(
        "offloadtrain ctl runs/latest checkpoint",
        "offloadtrain ctl runs/latest note 'disk replaced'",
    ),
)
app.command(
    "offloadtrain.cli.commands.version:version",
    name="version",
    help="Print the versions to include in a bug report.",
    help_epilogue=_examples("offloadtrain version", "offloadtrain --version"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. What it prints holds no escape sequences but ours,
    whatever names and messages it quotes."""
    with sanitized_output():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = bool(os.environ.get("OFFLOADTRAIN_DEBUG"))
    if "--debug" in arguments:
        arguments.remove("--debug")
        debug = True
    try:
        consoles: Any = {
            "console": _OwnTerminal(sys.stdout),
            "error_console": _OwnTerminal(sys.stderr),
        }
        return int(app(arguments, **consoles) or DONE)
    except SystemExit as exit_request:  # cyclopts has printed the error
        return USAGE if exit_request.code else DONE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # stdout was closed (`offloadtrain ls | head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        return _failed(error, debug)


def _failed(error: Exception, debug: bool) -> int:
    """Print a known error as one message, an unknown one with its traceback; return the code."""
    code = of_error(error)
    known = isinstance(error, OffloadTrainError | UnsafeFileError) or code != FAILED
    if not (debug or known) and isinstance(error, OSError) and error.strerror:
        # Of a disk, a network or permissions, where no command could say more.
        at = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        print(f"{at}{error.strerror} (--debug says where this was met)", file=sys.stderr)
    elif debug or not known:
        print("".join(traceback.format_exception(error)), end="", file=sys.stderr)
    else:
        print(str(error) or type(error).__name__, file=sys.stderr)
    return code
