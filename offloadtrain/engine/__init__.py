"""The offload engine over arbitrary modules.

It depends on no model, data or job. `partition.py` divides a model into blocks, `build.py`
allocates, `autograd/` hooks into the user's forward and backward, `gradients.py` and `block.py`
report events to the program of `step`, and `interpreter.py` runs its operations on lanes.
`state.py` and `weights.py` load and save. `division.py` declares the interface for models that are
divided among ranks.
Start at `api.offload`, then `engine.Engine`; docs/architecture.md walks a gradient's way.
"""

from offloadtrain.config.errors import ModelError
from offloadtrain.engine.api import offload, optimizer_of
from offloadtrain.engine.block import StaleGraphError
from offloadtrain.engine.ema import EMA
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.gradients import GradientError
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.engine.parameters import ParameterWriteError
from offloadtrain.engine.step_report import Phase, StepReport

__all__ = [
    "EMA",
    "Engine",
    "EngineError",
    "GradientError",
    "ModelError",
    "OffloadOptimizer",
    "ParameterWriteError",
    "Phase",
    "StaleGraphError",
    "StepReport",
    "offload",
    "optimizer_of",
]
