"""This rank's stages of a transformers model, for a job with a pipeline."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from offloadtrain.config.job import Config
from offloadtrain.integrations import hf_job
from offloadtrain.integrations.chunked_loss import chunk_loss
from offloadtrain.model.transformer import LossTerms
from offloadtrain.parallel.mesh import Mesh
from offloadtrain.parallel.pipeline.language_model import (
    CausalLoss,
    PipelinedCausalLm,
    job_pipeline,
    stages_of,
)


def offload_stages(
    config: Config, num_layers: int, terms: LossTerms | None, mesh: Mesh, device: torch.device
) -> PipelinedCausalLm:
    """Build the job's model, without memory if possible, and offload this rank's stages.

    Args:
        config: the rank's part of the job; its `stage` is the first of the rank's stages.
        num_layers: layers of the complete model.
        terms: terms of a chunked loss; None: full logits.
    """
    assert config.hf is not None
    lm, weights = hf_job.whole_model(config.hf, seed=config.train.seed, terms=terms)
    if mesh.tensor is not None:
        hf_job.divide_matrices(lm.module, mesh.tensor, weights)
    sizes, loss = (lm.max_seq_len, lm.vocab_size), CausalLoss()
    more: dict[str, Any] = {"loss_fn": loss}
    if weights is not None:
        # Weights of other stages are not read.
        more |= {"param_init_fn": weights.fill, "init_in_order": False}
    made = job_pipeline(lm.module, config, mesh, device, **more)
    stages = stages_of(config, num_layers)
    if weights is not None:
        weights.close(partly=True)
    if terms is not None and stages[-1].is_last:
        chunk_loss(made.optimizers[-1].model, **asdict(terms))
    return PipelinedCausalLm(made, stages, *sizes, loss, lm.chunked)
