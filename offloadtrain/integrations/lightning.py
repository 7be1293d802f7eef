"""Lightning: a strategy, on one device or on several.

    trainer = Trainer(strategy=OffloadStrategy(working="host"), precision="bf16-mixed", …)

    def configure_optimizers(self):             # of the LightningModule
        return self.trainer.strategy.offload(ot.AdamW(lr=3e-4))

Precision, `accumulate_grad_batches` and `gradient_clip_val` are set in the Trainer. Next to each
checkpoint NAME.ckpt is a folder NAME.ckpt.offload with the optimizer's state, one file per rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from offloadtrain.engine import OffloadOptimizer
from offloadtrain.integrations import checkpoint_files
from offloadtrain.integrations.framework_support import (
    Dtypes,
    offload_for,
    precision_of,
    state_dict_of,
)
from offloadtrain.optim import AnyRule

_MIXED = {"32-true": "no", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}
"""Precision of a Trainer → mixed precision of `precision_of`."""


class EnginePrecision(Precision):  # type: ignore[misc]
    """Backward and clipping by the engine, which casts as well: no autocast, no GradScaler."""

    engine: OffloadOptimizer | None = None

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kw: Any) -> None:
        assert self.engine is not None, "the strategy's setup has seen that there is one"
        if self.engine.working_dtype is torch.float16:
            self.engine.backward(tensor, divide=False)
        else:
            model.backward(tensor, *args, **kw)
            # The next forward may run only a part of the module, which does not notify the engine.
            self.engine.end_micro_step()

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self.engine is not None, "the strategy's setup has seen that there is one"
        self.engine.clip_grad_norm_(clip_val)


def _through_hooks(method: str) -> Any:
    """Return a step of the strategy that calls the module's method as its forward, so that the
    engine's hooks run."""

    def step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        module = strategy.lightning_module
        if method == "training_step":
            strategy._follow_trainer()
        return strategy._forward_redirection(module, module, method, *args, **kwargs)

    return step


class OffloadStrategy(DDPStrategy):  # type: ignore[misc]
    """One process per device; the engine reduces gradients and shards state: DDP wraps nothing."""

    _engine: OffloadOptimizer | None = None
    _original_dtypes: Dtypes | None = None
    _loaded = ""
    """Path of the checkpoint that was loaded last."""

    def __init__(self, **options: Any) -> None:
        """`options`: those of `offloadtrain.offload`."""
        self._options = options
        self._casts: Any = EnginePrecision()
        super().__init__()

    @property
    def precision_plugin(self) -> Any:
        return self._casts

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        """Take the name of the precision, but ignore the plugin, which would cast."""
        if plugin is not None:
            self._casts.precision = plugin.precision

    def offload(self, rule: AnyRule | None = None, *, params: Any = None) -> OffloadOptimizer:
        """Offload the LightningModule; call it in `configure_optimizers`.

        Args:
            rule, params: as for `offloadtrain.offload`.

        Raises:
            ValueError: an option of the strategy contradicts the Trainer.
        """
        module = self.lightning_module
        mixed = _MIXED.get(self._casts.precision, self._casts.precision)
        settings = {"device": self.root_device, "precision": precision_of(mixed, module)}
        if module.automatic_optimization:
            settings["grad_accum_steps"] = module.trainer.accumulate_grad_batches
        engine, self._original_dtypes = offload_for(
            "the Trainer", module, rule, self._options, settings, params=params
        )
        self._engine = self._casts.engine = engine
        return engine

    def setup(self, trainer: Any) -> None:
        """Offload instead of moving to the device; for a test or prediction the model is moved.

        Raises:
            ValueError: the Trainer is configured for what offloaded models do not support.
            TypeError: `configure_optimizers` returned another optimizer.
        """
        self.accelerator.setup(trainer)
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise ValueError("gradient_clip_algorithm = 'value': gradients are clipped by norm")
        if self._layer_sync:
            raise ValueError("sync_batchnorm: each rank keeps the statistics of its own batches")
        if self.world_size == 1:
            # Lightning would replace the loader's sampler by one that shuffles.
            trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            if self._engine is None or self.optimizers != [self._engine]:
                raise TypeError(
                    "configure_optimizers must return one optimizer: "
                    "self.trainer.strategy.offload(ot.AdamW(lr=…)), with a scheduler or without"
                )
        else:
            self.model_to_device()
        self.setup_precision_plugin()

    training_step = _through_hooks("training_step")
    validation_step = _through_hooks("validation_step")
    test_step = _through_hooks("test_step")
    predict_step = _through_hooks("predict_step")

    def _follow_trainer(self) -> None:
        """Read the number of microbatches per step from the Trainer, since callbacks change it."""
        module = self.lightning_module
        if self._engine is not None and module.automatic_optimization:
            self._engine.grad_accum_steps = module.trainer.accumulate_grad_batches

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        return state_dict_of(self.lightning_module, self._engine, self._original_dtypes)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {}: the state is saved in separate files."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._engine is not None and "optimizer_states" in checkpoint:
            checkpoint_files.save_state(self._engine, _offload_path(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero and _offload_path(filepath).exists():
            shutil.rmtree(_offload_path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded = checkpoint_path
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._engine is not None, "setup comes before"
        checkpoint_files.load_state(self._engine, _offload_path(self._loaded))

    def teardown(self) -> None:
        """Release the host memory; the module keeps its working weights."""
        if self._engine is not None:
            self._engine.close()
            self._engine = self._casts.engine = None
            self.optimizers: list[Any] = []
        super().teardown()


def _offload_path(checkpoint: Any) -> Path:
    return Path(f"{checkpoint}.offload")
