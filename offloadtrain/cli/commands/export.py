"""`offloadtrain export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def export(
    source: Path,
    out: Path,
    /,
    *,
    dtype: Literal["bf16", "fp32", "fp16"] | None = None,
    merge: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> None:
    """Write a run's weights as a folder for transformers and print its name.

    The weights are the fp32 master weights, rounded once. Needs `pip install offloadtrain[hf]`.

    Parameters
    ----------
    source
        A run folder (its newest valid checkpoint is used), or one checkpoint.
    out
        Folder to write: new or empty. It appears when it is complete.
    dtype
        Dtype of the written weights. Default: bf16, and fp32 of adapters.
    merge
        For a model trained with model.lora: write the base with the adapters merged in, instead of
        the adapters alone.
    """
    from offloadtrain.cli.interrupts import ends_as_interrupted
    from offloadtrain.config.errors import ConfigError
    from offloadtrain.train.trained_model import export as write
    from offloadtrain.train.trained_model import open_saved

    saved = open_saved(source)
    try:
        with ends_as_interrupted():
            written = write(saved, out, dtype=dtype, merge=merge)
    except FileExistsError as error:
        raise ConfigError(str(error)) from None
    print(f"{saved.found.path.name} as {written}", file=sys.stderr)
    print(out)
