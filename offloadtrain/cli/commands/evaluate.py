"""`offloadtrain eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number


def evaluate(
    source: Path,
    /,
    *,
    data: Path,
    seq_len: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    micro_batch: Annotated[int, Parameter(validator=Number(gte=1))] = 8,
    max_tokens: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Print loss and perplexity of a model over a token file.

    A run is evaluated in the precision of its training, a folder in the dtype that it was saved in.

    Parameters
    ----------
    source
        A run folder (its newest valid checkpoint is used), one checkpoint, or a folder for
        transformers, as `offloadtrain export` writes it.
    data
        A token file made by `offloadtrain prepare`.
    seq_len
        Tokens per sequence. Default: as in the run's training; of a folder at most 1024.
    micro_batch
        Sequences per forward.
    max_tokens
        Number of tokens to evaluate, spread over the file; 0: all.
    device
        Device to compute on; auto: a GPU if there is one.
    as_json
        Print one JSON object.
    """
    from offloadtrain.runtime.device import resolve_device
    from offloadtrain.train import trained_model
    from offloadtrain.train.log.console import ProgressBar

    trained = trained_model.open_model(source, resolve_device(device))
    with ProgressBar("evaluating") as bar:
        result = trained_model.evaluate(
            trained,
            data,
            seq_len=seq_len or trained.seq_len,
            batch=micro_batch,
            most_tokens=max_tokens,
            progress=bar.show,
        )
    if as_json:
        facts = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
        print(json.dumps(facts))
    else:
        print(f"loss {result.loss:.6f}, perplexity {result.perplexity:.6g}, {result.tokens} tokens")
    if result.left_out:
        print(f"left out: the last {result.left_out} tokens fill no sequence", file=sys.stderr)
