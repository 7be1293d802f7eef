"""One measurement: what is trained, by which system, how."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from offloadtrain.config.model_shape import SIZES, ModelShape

SYSTEMS = ("offloadtrain", "resident", "fsdp2", "torchao", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Steps of one model on one system.

    Attributes:
        size: a name of `model_shape.SIZES`.
        options: of `offload`, as JSON values.
        gpu_memory: bytes that stand in for a smaller card; 0: the whole of this one.
        steps: measured, after `warm`.
    """

    size: str
    system: str = "offloadtrain"
    seq_len: int = 1024
    micro_batch: int = 8
    grad_accum_steps: int = 1
    precision: str = "bf16"
    recompute: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    gpu_memory: int = 0
    warm: int = 2
    steps: int = 5

    @property
    def name(self) -> str:
        """Unique among different specs, and readable."""
        chosen = [f"{key}={value}" for key, value in sorted(self.options.items())]
        parts = [
            self.system,
            self.size,
            f"{self.micro_batch}x{self.seq_len}x{self.grad_accum_steps}",
            self.precision,
            *chosen,
            *([f"{self.gpu_memory >> 30}GiB"] if self.gpu_memory else []),
            *([] if self.recompute else ["keep"]),
        ]
        return " ".join(parts)

    @property
    def step_tokens(self) -> int:
        return self.micro_batch * self.seq_len * self.grad_accum_steps

    @property
    def shape(self) -> ModelShape:
        shape = SIZES[self.size]
        return replace(shape, max_seq_len=max(shape.max_seq_len, self.seq_len))

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Spec:
        return cls(**json.loads(text))
