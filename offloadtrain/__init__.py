"""offloadtrain: train models far larger than the GPU, with optimizer states in host memory.

    import offloadtrain as ot
    optimizer = ot.offload(model, ot.AdamW(lr=3e-4), clip_norm=1.0)

Names are loaded on first use, so `offloadtrain.events` and the command line import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offloadtrain.config.errors import DeviceMemoryError, HostMemoryError, OffloadTrainError
    from offloadtrain.config.offload import OffloadConfig
    from offloadtrain.engine import (
        GradientError,
        ModelError,
        OffloadOptimizer,
        PipelineError,
        StaleGraphError,
        StepReport,
        offload,
    )
    from offloadtrain.engine.pipeline.pipeline import pipeline
    from offloadtrain.engine.pipeline.pipeline_steps import Pipeline
    from offloadtrain.integrations.expert_parallel import expert_parallel
    from offloadtrain.integrations.pretrained import from_pretrained, save_pretrained
    from offloadtrain.optim import (
        LAMB,
        SGD,
        Adagrad,
        Adam,
        AdamW,
        ElementwiseRule,
        Lion,
        Muon,
        UpdateRule,
    )
    from offloadtrain.sizing.plan_model import plan_model

__version__ = "0.1.0"

_HOMES = {
    "Adagrad": "offloadtrain.optim",
    "Adam": "offloadtrain.optim",
    "AdamW": "offloadtrain.optim",
    "DeviceMemoryError": "offloadtrain.config.errors",
    "ElementwiseRule": "offloadtrain.optim",
    "GradientError": "offloadtrain.engine",
    "HostMemoryError": "offloadtrain.config.errors",
    "LAMB": "offloadtrain.optim",
    "Lion": "offloadtrain.optim",
    "ModelError": "offloadtrain.engine",
    "Muon": "offloadtrain.optim",
    "OffloadConfig": "offloadtrain.config.offload",
    "OffloadOptimizer": "offloadtrain.engine",
    "OffloadTrainError": "offloadtrain.config.errors",
    "Pipeline": "offloadtrain.engine.pipeline.pipeline_steps",
    "PipelineError": "offloadtrain.engine",
    "SGD": "offloadtrain.optim",
    "StaleGraphError": "offloadtrain.engine",
    "StepReport": "offloadtrain.engine",
    "expert_parallel": "offloadtrain.integrations.expert_parallel",
    "from_pretrained": "offloadtrain.integrations.pretrained",
    "UpdateRule": "offloadtrain.optim",
    "offload": "offloadtrain.engine",
    "pipeline": "offloadtrain.engine.pipeline.pipeline",
    "plan_model": "offloadtrain.sizing.plan_model",
    "save_pretrained": "offloadtrain.integrations.pretrained",
    "watch": "offloadtrain_tui.notebook",  # by name: the trainer never imports the monitor
}

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "DeviceMemoryError",
    "ElementwiseRule",
    "GradientError",
    "HostMemoryError",
    "Lion",
    "ModelError",
    "Muon",
    "OffloadConfig",
    "OffloadOptimizer",
    "OffloadTrainError",
    "Pipeline",
    "PipelineError",
    "StaleGraphError",
    "StepReport",
    "UpdateRule",
    "__version__",
    "expert_parallel",
    "from_pretrained",
    "offload",
    "pipeline",
    "plan_model",
    "save_pretrained",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'offloadtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
