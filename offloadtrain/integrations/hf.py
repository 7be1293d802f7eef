"""The Trainer of transformers, and trainers derived from it, with offloaded models.

    from offloadtrain.integrations.hf import OffloadTrainer as Trainer

    class Tuner(OffloadMixin, SFTTrainer):       # any trainer of TRL
        offload = {"working": "host"}

The model is offloaded when the trainer creates its optimizer, after PEFT has wrapped it.
`TrainingArguments` determine some options; docs/frameworks.md lists them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from offloadtrain.engine import OffloadOptimizer, optimizer_of
from offloadtrain.engine.step_report import Phase
from offloadtrain.integrations import accelerate, checkpoint_files, torch_optimizers
from offloadtrain.integrations.chunked_loss import chunk_loss, is_chunked
from offloadtrain.integrations.framework_support import (
    Dtypes,
    Options,
    liger_problem,
    offload_for,
    precision_of,
    state_dict_of,
)
from offloadtrain.optim import SGD, Adagrad, AdamW, AnyRule, Lion, UpdateRule

_log = logging.getLogger(__name__)


class OffloadMixin(Trainer):  # type: ignore[misc]
    """Mixin for trainer classes: `class Tuner(OffloadMixin, SFTTrainer)`.

    Attributes:
        offload: options of `offloadtrain.offload`, as a class attribute or the argument
            `offload=…`.
        chunked_loss: compute the loss of a causal language model in parts of the vocabulary in
            training; see `integrations.chunked_loss`. A class attribute or an argument. TRL's
            SFTTrainer does so by itself.
    """

    optimizer: Any
    offload: Options = {}  # noqa: RUF012  # never changed
    chunked_loss: bool = False
    _original_dtypes: Dtypes | None = None
    _driven: OffloadOptimizer | None = None
    _given_optimizer: torch.optim.Optimizer | None = None
    """A torch optimizer that was passed to the trainer; it is translated to an update rule."""
    _warned_of_reason = False

    def __init__(
        self,
        *args: Any,
        offload: Options | None = None,
        chunked_loss: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if offload is not None:
            self.offload = offload
        if chunked_loss is not None:
            self.chunked_loss = chunked_loss
        super().__init__(*args, **kwargs)
        # Translate now, so that an unsupported optimizer is refused before anything is loaded.
        if not isinstance(self.optimizer, OffloadOptimizer):
            self._given_optimizer = self.optimizer
            self._rule_and_groups([nn.Parameter(torch.zeros(1))])

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse unsupported arguments; `Trainer.__init__` calls this first."""
        refuse_arguments(self.args, chunked_loss=self.chunked_loss)
        for name, precision in (("fp16_full_eval", "fp16"), ("bf16_full_eval", "bf16")):
            if getattr(self.args, name):
                if mixed_precision(self.args) != precision:
                    _log.warning(
                        "%s = True: evaluation has the weights and the precision of training", name
                    )
                setattr(self.args, name, False)  # transformers would cast the model permanently
        if self.args.n_gpu > 1:
            _log.warning(
                "%d GPUs and one process: it trains on the first; torchrun starts one per GPU",
                self.args.n_gpu,
            )
            self.args._n_gpu = 1  # otherwise the model is wrapped in DataParallel
        super().create_accelerator_and_postprocess()
        accelerate.check(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the complete model may not fit on the device."""

    def create_optimizer(self, model: nn.Module | None = None) -> OffloadOptimizer:
        """Offload the model, once. Closes another trainer's optimizer of the same model.

        Raises:
            ValueError: options contradict the arguments, or each other.
            TypeError: the trainer was given an optimizer that cannot be translated.
        """
        model = self.model if model is None else model
        if self._driven is not None and self._driven.phase is Phase.CLOSED:
            if self._driven is self.optimizer and self._original_dtypes is not None:
                _log.warning(
                    "the optimizer of this trainer was closed, by hand or by another trainer of "
                    "the same model: a new one begins without its moments"
                )
                self.optimizer = None
            self._driven = None
        if not isinstance(self.optimizer, OffloadOptimizer):
            self._given_optimizer = self.optimizer or self._given_optimizer
            earlier = optimizer_of(model)
            for optimizer in (self._driven, earlier if _is_driven(earlier) else None):
                if optimizer is not None:
                    optimizer.close()
            rule, groups = self._rule_and_groups(self._groups(model))
            self.optimizer, self._original_dtypes = offload_for(
                "TrainingArguments",
                model,
                rule,
                self.offload,
                options_of(self.args, model),
                params=groups,
            )
            if self._given_optimizer is not None:
                torch_optimizers.take_over(self._given_optimizer, self.optimizer)
        elif self._driven is None:
            self._check_user_optimizer(self.optimizer)
        if self._driven is None or self._driven is not self.optimizer:
            self._driven = self._drive(model, self.optimizer)
        if self.chunked_loss:
            self._check_loss()
            if not is_chunked(model):
                chunk_loss(model)
        return self._driven

    def _check_loss(self) -> None:
        """Raise ValueError if the trainer computes the loss itself, from full logits."""
        for what in ("label_smoother", "compute_loss_func"):
            if getattr(self, what) is not None:
                raise ValueError(
                    f"chunked_loss = True: the trainer's {what} computes the loss from whole "
                    "logits. Leave one of them out; for label smoothing, call chunk_loss(model, "
                    "label_smoothing=…) instead"
                )

    def _check_user_optimizer(self, optimizer: Any) -> None:
        """Raise ValueError if options are set although the given optimizer has its own; warn of
        arguments that it does not follow."""
        if self.offload:
            raise ValueError(
                f"offload = {self.offload} beside optimizers = (…), which was made with "
                "options of its own: leave one of them out"
            )
        for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
            value, default = (
                getattr(self.args, name),
                type(self.args).__dataclass_fields__[name].default,
            )
            values = sorted({group.get(key) for group in optimizer.param_groups})
            if value != default and value not in values:
                _log.warning(
                    "TrainingArguments.%s = %s is not used: the given optimizer has %s",
                    *(name, value, ", ".join(map(str, values))),
                )

    def _drive(self, model: nn.Module, optimizer: OffloadOptimizer) -> OffloadOptimizer:
        settings = options_of(self.args, model)
        for name in ("precision", "clip_norm", "grad_accum_steps"):
            if (value := getattr(optimizer.config, name)) != settings[name]:
                raise ValueError(
                    f"the optimizer was made with {name} = {value!r}, and TrainingArguments have "
                    f"{settings[name]!r}"
                )
        sharded = optimizer.config.zero_stage_among(optimizer.ranks.size) == 3
        if sharded and self.args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end = True: weights in shards (zero_stage = 3) cannot load "
                "others once training has begun; use zero_stage = 2, or load the best one later"
            )
        accelerate.drive(self.accelerator, model, optimizer)
        return optimizer

    def _rule_and_groups(self, groups: list[Any]) -> tuple[AnyRule, list[Any]]:
        """Return (update rule, parameter groups): the given groups, unless an optimizer that was
        passed to the trainer has its own.

        Raises:
            TypeError, ValueError: the optimizer cannot be translated.
        """
        if self._given_optimizer is not None:
            return torch_optimizers.translated(self._given_optimizer, "optimizers")
        if self.optimizer_cls_and_kwargs is None:
            return rule_of(self.args), groups
        kind, hyperparameters = self.optimizer_cls_and_kwargs
        if issubclass(kind, torch.optim.Optimizer):
            torch_optimizer = kind(groups, **hyperparameters)
            return torch_optimizers.translated(torch_optimizer, "optimizer_cls_and_kwargs")
        return kind(**hyperparameters), groups

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the parameter groups of `Trainer.create_optimizer`."""
        names = set(self.get_decay_parameter_names(model))
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        decay = [param for name, param in named if name in names]
        rest = [param for name, param in named if name not in names]
        return [
            {"params": decay, "weight_decay": self.args.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip before the callbacks, which may read gradients; `step()` does not clip again."""
        return self.optimizer.clip_grad_norm_(self.args.max_grad_norm)  # type: ignore[no-any-return]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        """Return the norm from `_clip_grad_norm`; without it, the norm is known after `step()`."""
        return grad_norm

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Tensor | None, *args: Any, **kwargs: Any
    ) -> None:
        if grad_norm is None and self.optimizer is not None:
            grad_norm = self.optimizer.grad_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Offload first even before training, so that a model larger than the device is
        streamed."""
        current = optimizer_of(self.model)
        # Another trainer's optimizer still trains this model; it is used for evaluation as well.
        if current is self.optimizer or not _is_driven(current):
            self.create_optimizer()
        return super().evaluation_loop(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save weights in their original dtype: the masters if that is fp32."""
        if state_dict is not None or self._driven is None:
            super()._save(output_dir, state_dict)
            return
        weights = state_dict_of(self.model, self._driven, self._original_dtypes)
        floating = (x.dtype for x in weights.values() if x.is_floating_point())
        widest = max(floating, key=lambda dtype: dtype.itemsize)
        super()._save(output_dir, weights)  # clears the dict
        config = Path(output_dir or self.args.output_dir) / "config.json"
        if self.args.should_save and config.exists():
            # It has the dtype of the model in memory; set that of the saved weights.
            named = json.loads(config.read_text())
            named["dtype"] = str(widest).removeprefix("torch.")
            config.write_text(json.dumps(named, indent=2, sort_keys=True) + "\n")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, writes = self.create_optimizer(), self.args.should_save
        reason = checkpoint_files.reason_against_torch(optimizer)
        if reason is not None and writes and not self._warned_of_reason:
            self._warned_of_reason = True
            _log.warning(
                "the checkpoints resume with OffloadTrainer (or OffloadMixin) only, and the plain "
                "Trainer refuses their optimizer.pt: %s",
                reason,
            )
        fused = self.args.optim == "adamw_torch_fused"
        checkpoint_files.save_for_trainer(optimizer, output_dir, writes=writes, fused=fused)
        if writes:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load this rank's state, or that of a plain Trainer's optimizer."""
        if checkpoint is None or not checkpoint_files.load_for_trainer(
            self.create_optimizer(), checkpoint
        ):
            if checkpoint is not None:
                _log.warning("'%s' has no state of an optimizer: a new one begins", checkpoint)
            return
        schedule = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)


class OffloadTrainer(OffloadMixin):
    """`transformers.Trainer` over an offloaded model."""


def _is_driven(optimizer: OffloadOptimizer | None) -> bool:
    """Return True if a trainer has created or adopted this optimizer."""
    return optimizer is not None and optimizer._prepared


_REFUSED: dict[str, str] = {
    "deepspeed": "the engine shards and offloads itself; offloadtrain import-deepspeed translates "
    "its file",
    "fsdp": "the engine shards state, gradients and weights itself: offload = dict(zero_stage = 3)",
    "parallelism_config": "data parallelism is what the engine has",
    "torch_compile": "it compiles the model as a whole, whose weights move between calls: "
    "offload = dict(compile_blocks = True) compiles its layers",
    "optim_args": "the arguments of another optimizer",
    "optim_target_modules": "the arguments of another optimizer",
}
"""Argument → why values other than its default are not supported."""


def refuse_arguments(args: Any, *, chunked_loss: bool = False) -> None:
    """Raise ValueError with a line for each unsupported argument."""
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
    if args.auto_find_batch_size and args.world_size > 1:
        problems.append(
            f"auto_find_batch_size = True: {args.world_size} processes would go on with different "
            "batch sizes"
        )
    if args.use_liger_kernel and (why := _refuses_liger(args, chunked_loss)):
        problems.append(f"use_liger_kernel = True: {why}")
    if problems:
        raise ValueError("these TrainingArguments do not work offloaded:\n" + "\n".join(problems))


def _refuses_liger(args: Any, chunked_loss: bool) -> str:
    """Return why Liger's kernels cannot run in this training; "" if they can."""
    if why := liger_problem(args.device):
        return why
    if chunked_loss and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True):
        return (
            "its loss and chunked_loss = True both replace the model's: leave chunked_loss out, or "
            'set liger_kernel_config = {"fused_linear_cross_entropy": False}'
        )
    return ""


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
    """Return the update rule for `optim`; weight decay is set in the parameter groups."""
    return _RULES[_name(args.optim)](args)


def _name(optim: Any) -> str:
    return str(getattr(optim, "value", optim))


def _adamw(args: Any) -> UpdateRule:
    return AdamW(
        lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon
    )


_RULES: dict[str, Callable[[Any], UpdateRule]] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": _adamw,
    "lion_32bit": lambda args: Lion(
        lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2)
    ),
    "sgd": lambda args: SGD(lr=args.learning_rate),
    "adagrad": lambda args: Adagrad(lr=args.learning_rate),
}
"""Value of `optim` → its update rule."""
