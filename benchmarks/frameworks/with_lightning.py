"""A LightningModule under Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import offloadtrain as ot
from benchmarks.frameworks import data
from benchmarks.frameworks.accelerated import ADAMW, BATCH, CLIP_NORM
from benchmarks.frameworks.trainers import Logged


def make(offload: Mapping[str, Any] | None, folder: Path, **trainer: Any) -> tuple[Any, Any]:
    """Return a Trainer and a module with the losses and norms of its run.

    Args:
        offload: options of `offload`; None: Lightning's own strategy.
    """
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = data.model()
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.validated: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch).loss
            # The mean over ranks; of one, its own.
            mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
            self.losses.append(float(mean))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.validated.append(self.net(**batch).loss.item())

        def configure_gradient_clipping(self, optimizer: Any, **clipping: Any) -> None:
            """The norm before clipping, for the table."""
            if offload is None:
                grads = [p.grad for p in self.parameters() if p.grad is not None]
                self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
            else:
                self.norms.append(float(optimizer.clip_grad_norm_(float("inf"))))
            self.clip_gradients(optimizer, **clipping)

        def configure_optimizers(self) -> Any:
            optimizer: Any = (
                torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], **ADAMW)
                if offload is None
                else self.trainer.strategy.offload(ot.AdamW(**ADAMW))
            )
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    if offload is not None:
        from offloadtrain.integrations.lightning import OffloadStrategy

        trainer["strategy"] = OffloadStrategy(**offload)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    own = dict(accelerator="cpu", devices=1, default_root_dir=folder, gradient_clip_val=CLIP_NORM)
    return lightning.Trainer(**{**quiet, **own, "max_steps": 6, **trainer}), Module()


def check_ranks(runner: Any, module: Any) -> None:
    """Nothing has wrapped the module, and each rank has had its share of the samples, once."""
    assert runner.strategy.model is module, type(runner.strategy.model)
    assert runner.world_size * len(runner.train_dataloader.sampler) == data.SAMPLES


def train(
    offload: Mapping[str, Any] | None,
    folder: Path,
    *,
    resume: Path | None = None,
    batch: int = BATCH,
    sampler: Any = None,
    **trainer: Any,
) -> Logged:
    """Losses of all microbatches, with the norms of all steps."""
    runner, module = make(offload, folder, **trainer)
    loader: Any = torch.utils.data.DataLoader(data.Texts(), batch, sampler=sampler)
    runner.fit(module, loader, ckpt_path=resume)
    check_ranks(runner, module)
    count, accum = int(runner.num_training_batches), runner.accumulate_grad_batches
    epochs = [module.losses[at : at + count] for at in range(0, len(module.losses), count)]
    steps = [losses[at : at + accum] for losses in epochs for at in range(0, len(losses), accum)]
    means = [sum(losses) / len(losses) for losses in steps]
    pairs = zip(means, module.norms, strict=True)
    return [(round(loss, 4), round(norm, 4)) for loss, norm in pairs]


def train_and_resume(
    offload: Mapping[str, Any] | None, folder: Path, ranks: int, batch: int, accum: int
) -> Logged:
    """Train on one of several ranks, and again from the checkpoint of an epoch.

    On several, Lightning shuffles and shares out the samples; the one has their order from torch.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data.distributed import DistributedSampler

    run: dict[str, Any] = dict(devices=ranks, batch=batch, accumulate_grad_batches=accum)
    run |= {"limit_train_batches": 2 * accum, "max_steps": 4}
    if ranks == 1:
        run["sampler"] = DistributedSampler(data.Texts(), 1, 0)
    kept = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    once = train(offload, folder, callbacks=[kept], **run)
    if offload is not None:
        again = train(offload, folder, resume=folder / "step=2.ckpt", **run)
        assert again == once[2:], f"resumed {again}, and once {once}"
    return once
