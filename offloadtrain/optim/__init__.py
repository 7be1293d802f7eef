"""Optimizers: the update of one bucket, loss scaling, learning rates.

An update rule knows its hyperparameters and calls kernels over flat tensors; the engine decides
when it runs and on which tensors. A custom rule or state format needs this folder only
(docs/extending.md).
Start at `rule.UpdateRule`; `adam.py` is the one that ships.
"""

from offloadtrain.optim.adam import Adam, AdamW
from offloadtrain.optim.loss_scaler import LossScaleError, LossScaler
from offloadtrain.optim.rule import ElementwiseRule, UpdateRule
from offloadtrain.runtime.kernels import Draw, RegisteredFormat, StateCodec, register_state_format
from offloadtrain.step.formats import Field, StateFormat

__all__ = [
    "Adam",
    "AdamW",
    "Draw",
    "ElementwiseRule",
    "Field",
    "LossScaleError",
    "LossScaler",
    "RegisteredFormat",
    "StateCodec",
    "StateFormat",
    "UpdateRule",
    "register_state_format",
]
