"""The offload engine over arbitrary modules."""

from offloadtrain.engine.api import offload
from offloadtrain.engine.block import StaleGraphError
from offloadtrain.engine.checks import ModelError
from offloadtrain.engine.engine import Engine, EngineError
from offloadtrain.engine.gradients import GradientError
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.engine.step_report import Phase, StepReport

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
