"""`offloadtrain import-deepspeed`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from offloadtrain.config.errors import OffloadTrainError


def import_deepspeed(
    config: Path,
    out: Path | None = None,
    /,
    *,
    to: Literal["job", "mixin"] = "job",
    trainer_args: Path | None = None,
) -> None:
    """Translate a DeepSpeed configuration, and list on stderr what has no translation.

    Parameters
    ----------
    config
        The JSON file.
    out
        File to write, which must not exist; default: stdout.
    to
        A job's TOML, or JSON with the options of OffloadMixin and the TrainingArguments.
    trainer_args
        JSON of TrainingArguments, or the script that makes them: what "auto" stands for.
    """
    from offloadtrain.convert import deepspeed_config

    loaded = deepspeed_config.load(config, trainer_args)
    text = loaded.job() if to == "job" else loaded.mixin()
    if out is None:
        print(text, end="")
    else:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise OffloadTrainError(f"{out} cannot be written: {error.strerror}") from error
        print(out)
    undecided = loaded.undecided_in_a_job() if to == "job" else {}
    for key, why in {**loaded.unmapped, **undecided}.items():
        print(f"not mapped: {key}: {why}", file=sys.stderr)
