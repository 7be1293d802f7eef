"""`offloadtrain generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number


def generate(
    source: Path,
    /,
    *,
    prompt: str,
    chat: bool = False,
    max_tokens: Annotated[int, Parameter(validator=Number(gte=1))] = 200,
    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.8,
    top_k: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
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
    from offloadtrain.train.trained_model import answered, continued, open_model

    trained = open_model(source, resolve_device(device))
    chosen = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if chat:
        text = answered(trained, prompt, max_tokens, chosen)
    else:
        text = prompt + continued(trained, prompt, max_tokens, chosen)
    print(text)
