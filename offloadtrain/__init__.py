"""offloadtrain: train models far larger than the GPU, with optimizer states in host memory.

    import offloadtrain as ot
    optimizer = ot.offload(model, ot.AdamW(lr=3e-4), clip_norm=1.0)

Names are loaded on first use, so `offloadtrain.events` and the command line import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offloadtrain.config.errors import (
        DeviceMemoryError,
        HostMemoryError,
        OffloadTrainError,
        PipelineError,
    )
    from offloadtrain.config.offload import (
        ActivationOptions,
        ComputeOptions,
        GradientOptions,
        MemoryOptions,
        OffloadConfig,
        ShardingOptions,
        StateOptions,
        WeightOptions,
    )
    from offloadtrain.engine import (
        EMA,
        GradientError,
        ModelError,
        OffloadOptimizer,
        ParameterWriteError,
        StaleGraphError,
        StepReport,
        offload,
    )
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
    from offloadtrain.parallel.expert_parallel import expert_parallel
    from offloadtrain.parallel.pipeline.api import pipeline
    from offloadtrain.parallel.pipeline.steps import Pipeline
    from offloadtrain.plan.plan_model import plan_model

__version__ = "0.1.0"

_HOMES = {
    "ActivationOptions": "offloadtrain.config.offload",
    "Adagrad": "offloadtrain.optim",
    "Adam": "offloadtrain.optim",
    "AdamW": "offloadtrain.optim",
    "ComputeOptions": "offloadtrain.config.offload",
    "DeviceMemoryError": "offloadtrain.config.errors",
    "ElementwiseRule": "offloadtrain.optim",
    "EMA": "offloadtrain.engine",
    "expert_parallel": "offloadtrain.parallel.expert_parallel",
    "from_pretrained": "offloadtrain.integrations.pretrained",
    "GradientError": "offloadtrain.engine",
    "GradientOptions": "offloadtrain.config.offload",
    "HostMemoryError": "offloadtrain.config.errors",
    "LAMB": "offloadtrain.optim",
    "Lion": "offloadtrain.optim",
    "MemoryOptions": "offloadtrain.config.offload",
    "ModelError": "offloadtrain.engine",
    "Muon": "offloadtrain.optim",
    "offload": "offloadtrain.engine",
    "OffloadConfig": "offloadtrain.config.offload",
    "OffloadOptimizer": "offloadtrain.engine",
    "OffloadTrainError": "offloadtrain.config.errors",
    "pipeline": "offloadtrain.parallel.pipeline.api",
    "Pipeline": "offloadtrain.parallel.pipeline.steps",
    "PipelineError": "offloadtrain.config.errors",
    "plan_model": "offloadtrain.plan.plan_model",
    "save_pretrained": "offloadtrain.integrations.pretrained",
    "SGD": "offloadtrain.optim",
    "ShardingOptions": "offloadtrain.config.offload",
    "ParameterWriteError": "offloadtrain.engine",
    "StaleGraphError": "offloadtrain.engine",
    "StateOptions": "offloadtrain.config.offload",
    "StepReport": "offloadtrain.engine",
    "UpdateRule": "offloadtrain.optim",
    "watch": "offloadtrain_tui.notebook",  # by name: the trainer never imports the monitor
    "WeightOptions": "offloadtrain.config.offload",
}

__all__ = [
    "EMA",
    "LAMB",
    "SGD",
    "ActivationOptions",
    "Adagrad",
    "Adam",
    "AdamW",
    "ComputeOptions",
    "DeviceMemoryError",
    "ElementwiseRule",
    "GradientError",
    "GradientOptions",
    "HostMemoryError",
    "Lion",
    "MemoryOptions",
    "ModelError",
    "Muon",
    "OffloadConfig",
    "OffloadOptimizer",
    "OffloadTrainError",
    "ParameterWriteError",
    "Pipeline",
    "PipelineError",
    "ShardingOptions",
    "StaleGraphError",
    "StateOptions",
    "StepReport",
    "UpdateRule",
    "WeightOptions",
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
