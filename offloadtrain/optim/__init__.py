"""Optimizers: the update of one bucket, loss scaling, learning rates.

An update rule knows its hyperparameters and calls kernels over flat tensors; the engine decides
when the rule runs and on which tensors. A custom rule or state format needs only this folder
(docs/extending.md).
Start at `rule.UpdateRule`; `kernel_rules.py` has the rules with kernels.
"""

from offloadtrain.optim.kernel_rules import SGD, Adagrad, Adam, AdamW, Lion
from offloadtrain.optim.lamb import LAMB
from offloadtrain.optim.loss_scaler import LossScaleError, LossScaler
from offloadtrain.optim.muon import Muon
from offloadtrain.optim.rule import (
    AnyRule,
    ElementwiseRule,
    MatrixRule,
    Rule,
    UpdateRule,
    keeps_whole,
    rule_of,
)
from offloadtrain.runtime.kernels import Draw, RegisteredFormat, StateCodec, register_state_format
from offloadtrain.step.layout.formats import Field, StateFormat

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AnyRule",
    "Draw",
    "ElementwiseRule",
    "Field",
    "Lion",
    "LossScaleError",
    "LossScaler",
    "MatrixRule",
    "Muon",
    "RegisteredFormat",
    "Rule",
    "StateCodec",
    "StateFormat",
    "UpdateRule",
    "keeps_whole",
    "register_state_format",
    "rule_of",
]
