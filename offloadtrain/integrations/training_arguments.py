"""Translate `TrainingArguments` of transformers to options of `offload`, or refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from offloadtrain.integrations.options import precision_of
from offloadtrain.optim import SGD, Adagrad, AdamW, Lion, UpdateRule

_REFUSED: dict[str, str] = {
    "deepspeed": "the engine shards and offloads itself; offloadtrain import-deepspeed translates "
    "its file",
    "fsdp": "the engine shards state, gradients and weights itself: offload = dict(zero_stage = 3)",
    "parallelism_config": "data parallelism is what the engine has",
    "torch_compile": "it compiles the model as a whole, whose weights move between calls: "
    "offload = dict(compile_blocks = True) compiles its layers",
    "auto_find_batch_size": "a step that ran out of memory cannot be repeated with the same "
    "optimizer: set the batch size",
    "optim_args": "the arguments of another optimizer",
    "optim_target_modules": "the arguments of another optimizer",
}
"""Argument → why any value but its default cannot be honoured."""


def refuse(args: Any) -> None:
    """Raises ValueError, with a line for each argument that cannot be honoured."""
    problems = [
        f"{name} = {getattr(args, name)!r}: {why}"
        for name, why in _REFUSED.items()
        if getattr(args, name, None)
    ]
    if _name(args.optim) not in _RULES:
        problems.append(
            f"optim = {_name(args.optim)!r}: the optimizers are {', '.join(_RULES)}; for state of "
            "8 bits, offload = dict(state = 'int8')"
        )
    for name, precision in (("fp16_full_eval", "fp16"), ("bf16_full_eval", "bf16")):
        if getattr(args, name) and mixed_precision(args) != precision:
            problems.append(
                f"{name} = True: it casts weights, which are of the training's precision"
            )
    if problems:
        raise ValueError("these TrainingArguments do not work offloaded:\n" + "\n".join(problems))


def mixed_precision(args: Any) -> str:
    """Return "fp16", "bf16" or "no"."""
    return "fp16" if args.fp16 else "bf16" if args.bf16 else "no"


def options_of(args: Any, model: nn.Module) -> dict[str, Any]:
    """Return the options of `offload` that the arguments determine."""
    return {
        "device": args.device,
        "precision": precision_of(mixed_precision(args), model),
        "clip_norm": args.max_grad_norm or None,
        "grad_accum_steps": args.gradient_accumulation_steps,
        "seed": args.seed,
    }


def rule_of(args: Any) -> UpdateRule:
    """Return the update rule of `optim`. Weight decay is that of the parameter groups."""
    return _RULES[_name(args.optim)](args)


def _name(optim: Any) -> str:
    return str(getattr(optim, "value", optim))


def _adamw(args: Any) -> UpdateRule:
    return AdamW(
        lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon
    )


def _lion(args: Any) -> UpdateRule:
    return Lion(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2))


_RULES: dict[str, Callable[[Any], UpdateRule]] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": _adamw,
    "lion_32bit": _lion,
    "sgd": lambda args: SGD(lr=args.learning_rate),
    "adagrad": lambda args: Adagrad(lr=args.learning_rate),
}
"""`optim` → its update rule."""
