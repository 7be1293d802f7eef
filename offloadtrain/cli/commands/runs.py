"""Commands over a run folder: `offloadtrain checkpoints`, `export`, `generate`, `eval`, `trace`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from offloadtrain.boundary.safe_write import replace_file
from offloadtrain.cli.exit_codes import DONE, FAILED, ends_as_interrupted
from offloadtrain.cli.options import Count, CountOrNone, Flag, Json
from offloadtrain.config.errors import ConfigError, OffloadTrainError, require_path
from offloadtrain.config.sections import Packing

MOST_PRINTED = 20
"""Most problems printed to stderr; `--json` prints all."""


def checkpoints(
    run: Path,
    /,
    *,
    verify: Flag = False,
    as_json: Json = False,
) -> int:
    """List the checkpoints of a run, the newest first: name, state, size, ranks.

    Exit code 1 if one of them is damaged.

    Parameters
    ----------
    run
        A run folder.
    verify
        Read every byte and compare it with its hash.
    as_json
        Print one JSON object per line.
    """
    from offloadtrain.config.units import format_bytes
    from offloadtrain.train.checkpoint import checkpoint

    require_path(run)
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(f"{run} is not a run folder: it has no folder checkpoints")
    damaged, problems = False, 0
    if not as_json:
        print(f"{'checkpoint':<16}  {'state':<8}  {'size':>9}  ranks")
    for path in checkpoint.find(folder):
        row = _row(path, verify=verify)
        damaged = damaged or row["state"] == "damaged"
        size, ranks = format_bytes(row["num_bytes"]), row["ranks"]
        line = f"{row['name']:<16}  {row['state']:<8}  {size:>9}  {ranks:>5}"
        print(json.dumps(row) if as_json else line, flush=True)
        problems += bool(row["problem"])
        if row["problem"] and problems <= MOST_PRINTED:
            print(row["problem"], file=sys.stderr)
    if problems > MOST_PRINTED:
        print(f"{problems - MOST_PRINTED} more problems: --json has them all", file=sys.stderr)
    return FAILED if damaged else DONE


def _row(path: Path, *, verify: bool) -> dict[str, Any]:
    """Return the facts about a checkpoint. Its `state` is "listed" (its files exist), "verified"
    (all bytes were read), "damaged" or "newer" (of a later format version); `ranks` is the number
    of ranks that wrote it."""
    from offloadtrain.train.checkpoint import checkpoint
    from offloadtrain.train.checkpoint.manifest import CheckpointError, DamagedCheckpointError

    sizes = {"num_bytes": 0, "ranks": 0}
    state, problem = "verified" if verify else "listed", ""
    try:
        manifest = (checkpoint.verify if verify else checkpoint.open_checkpoint)(path).manifest
        sizes = {"num_bytes": manifest.num_bytes, "ranks": len(manifest.sizes)}
    except CheckpointError as error:
        state = "damaged" if isinstance(error, DamagedCheckpointError) else "newer"
        problem = str(error)
    return {"name": path.name, "state": state, **sizes, "problem": problem}


def export(
    source: Path,
    out: Path,
    /,
    *,
    dtype: Literal["bf16", "fp32", "fp16"] | None = None,
    merge: Flag = False,
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
    from offloadtrain.integrations.export import require_new
    from offloadtrain.train.trained_model import export as write
    from offloadtrain.train.trained_model import open_saved

    try:
        require_new(out)  # before the checkpoint is verified and transformers is imported
        saved = open_saved(source)
        with ends_as_interrupted():
            written = write(saved, out, dtype=dtype, merge=merge)
    except FileExistsError as error:
        raise ConfigError(str(error)) from None
    print(f"{saved.checkpoint.path.name} as {written}", file=sys.stderr)
    print(out)


def generate(
    source: Path,
    /,
    *,
    prompt: str,
    chat: bool = False,
    max_tokens: Count = 200,
    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.8,
    top_k: CountOrNone = 0,
    top_p: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 1.0,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Print the prompt and the model's continuation of it, or with --chat its answer.

    The continuation ends where the model ends a document, or after --max-tokens.

    Parameters
    ----------
    source
        A run folder (its newest valid checkpoint is used), one checkpoint, or a folder for
        transformers, as `offloadtrain export` writes it.
    prompt
        Text to continue.
    chat
        The prompt is a user's message: render it with the tokenizer's chat template (or the run's
        data.chat_template), and print the answer alone.
    max_tokens
        Largest number of tokens to generate.
    temperature
        Divides the logits; 0 takes the likeliest token.
    top_k
        Sample among this many of the likeliest tokens; 0: among all.
    top_p
        Sample among the fewest of these tokens whose probabilities add up to this.
    seed
        The same seed gives the same text.
    device
        Device to compute on; auto: a GPU if there is one.
    """
    from offloadtrain.model.language_model import Sampling
    from offloadtrain.runtime.device import resolve_device
    from offloadtrain.train.trained_model import generate as generate_text
    from offloadtrain.train.trained_model import open_model

    trained = open_model(source, resolve_device(device))
    chosen = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    text = generate_text(trained, prompt, max_tokens, chosen, chat=chat)
    print(text if chat else prompt + text)


def evaluate(
    source: Path,
    /,
    *,
    data: Path,
    seq_len: CountOrNone = 0,
    packing: Packing | None = None,
    micro_batch: Count = 8,
    max_tokens: CountOrNone = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    as_json: Json = False,
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
    packing
        How documents fill sequences, as data.packing of a job. Default: as in the run's training;
        of a folder "padded" for conversations, "stream" for text.
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
    from offloadtrain.runtime.heartbeat import HEARTBEAT
    from offloadtrain.train import trained_model
    from offloadtrain.train.log.console import Console

    trained = trained_model.open_model(source, resolve_device(device))
    with Console().never_silent("evaluating"):
        result = trained_model.evaluate(
            trained,
            data,
            seq_len=seq_len or trained.seq_len,
            packing=packing,
            batch=micro_batch,
            most_tokens=max_tokens,
            progress=partial(HEARTBEAT.advance, "evaluating"),
        )
    if as_json:
        facts = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
        print(json.dumps(facts))
    else:
        print(f"loss {result.loss:.6f}, perplexity {result.perplexity:.6g}, {result.tokens} tokens")
    if result.left_out:
        print(f"left out: the last {result.left_out} tokens fill no sequence", file=sys.stderr)


def trace(run: Path, out: Path | None = None) -> None:
    """Write the timeline of each lane in the sampled steps as a Chrome trace.

    Parameters
    ----------
    run
        A run folder.
    out
        The file to write. Default: trace.json in the run folder.
    """
    from offloadtrain.events.chrome_trace import chrome_trace, read_run

    target = out or run / "trace.json"
    text = json.dumps(chrome_trace(read_run(run)))
    try:
        replace_file(target, text)
    except OSError as error:
        raise OffloadTrainError(f"{target} cannot be written: {error.strerror}") from error
    print(target)
    print("open it in https://ui.perfetto.dev or chrome://tracing", file=sys.stderr)
