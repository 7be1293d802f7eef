"""The offload engine over arbitrary modules."""

from offloadtrain.offload.block import StaleGraphError
from offloadtrain.offload.checks import ModelError
from offloadtrain.offload.engine import Engine, EngineError, Phase, StepReport
from offloadtrain.offload.gradients import GradientError
from offloadtrain.offload.optimizer import OffloadOptimizer, offload

__all__ = [
    "Engine",
    "EngineError",
    "GradientError",
    "ModelError",
    "OffloadOptimizer",
    "Phase",
    "StaleGraphError",
    "StepReport",
    "offload",
]
