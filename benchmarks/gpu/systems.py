"""The systems that are compared, each as two calls: a microbatch, and the end of a step.

Every one keeps fp32 masters and moments, clips the global norm to 1 and trains the same model on
the same tokens. Peers are set as their documentation recommends for training from host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.spec import Spec
from offloadtrain.config.job import OFFLOAD
from offloadtrain.engine import OffloadOptimizer, offload
from offloadtrain.engine.autograd.compiled import CompiledForward
from offloadtrain.engine.autograd.float8 import Float8Layers
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import AdamW
from offloadtrain.runtime.dtypes import PRECISIONS

CLIP_NORM, LR = 1.0, 1e-4
_PATTERN = 1 << 22
"""Elements of random weights, repeated: drawing all of 13B takes minutes."""


class MissingError(Exception):
    """The system is not installed, or cannot run here."""


@dataclass(frozen=True, slots=True)
class System:
    """What a measurement drives.

    Attributes:
        micro: (inputs, targets) → the loss, after forward and backward of one microbatch.
        step: what follows the last of them.
        optimizer: of offloadtrain, for what it tells.
    """

    micro: Callable[[Tensor, Tensor], Tensor]
    step: Callable[[], object]
    optimizer: OffloadOptimizer | None = None
    close: Callable[[], object] = lambda: None


def here() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def precision_of(device: torch.device) -> str:
    """bf16, but for a GPU that has no arithmetic for it."""
    is_old = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return "fp16" if is_old else "bf16"


def cap(gpu_memory: int, device: torch.device) -> None:
    """Hold this process to so many bytes of the GPU, as a smaller card would; 0: all of it."""
    if gpu_memory and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(gpu_memory / total, 1.0), device)


def make(spec: Spec, device: torch.device) -> System:
    """Build the model and the system around it.

    Raises:
        MissingError: it is not installed, or cannot run here.
    """
    makers = {
        "offloadtrain": _offloadtrain,
        "resident": _resident,
        "fsdp2": _fsdp2,
        "torchao": _torchao,
        "deepspeed": _deepspeed,
    }
    return makers[spec.system](spec, device)


def _offloadtrain(spec: Spec, device: torch.device) -> System:
    with torch.device("meta"):
        model = Transformer(spec.shape)
    options: dict[str, Any] = {"precision": spec.precision, "clip_norm": CLIP_NORM}
    if spec.recompute:
        options["activation"] = "recompute"
    optimizer = offload(
        model,
        AdamW(lr=LR),
        device=device,
        grad_accum_steps=spec.grad_accum_steps,
        param_init_fn=fill,
        **options | spec.options,
    )

    def micro(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(inputs, targets)
        optimizer.backward(loss)
        return loss.detach()

    return System(micro, optimizer.step, optimizer, optimizer.close)


def _resident(spec: Spec, device: torch.device) -> System:
    """Plain torch: fp32 masters under the fused AdamW, gradients summed in the working dtype.

    Of `spec.options` those count that change how layers compute: `compile_blocks`, `fp8`, and
    `activation` with its budget.
    """
    model = _on_device(spec, device)
    masters = [param.detach().float() for param in model.parameters()]
    adam = torch.optim.AdamW(masters, lr=LR, fused=True)

    def step() -> None:
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP_NORM)
        adam.step()
        adam.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)

    return System(_backward(model, spec), step)


def _fsdp2(spec: Spec, device: torch.device) -> System:
    """`fully_shard` over one rank with CPUOffloadPolicy: parameters, gradients, Adam on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _group_of_one(device)
    with torch.device("meta"):
        model = Transformer(spec.shape)
    model.to_empty(device="cpu")
    model.apply(fill)
    _recompute(model, spec, device)
    policy = MixedPrecisionPolicy(param_dtype=PRECISIONS[spec.precision])
    kwargs: dict[str, Any] = {"mp_policy": policy, "offload_policy": CPUOffloadPolicy()}
    if device.type != "cuda":
        from torch.distributed.device_mesh import init_device_mesh

        kwargs["mesh"] = init_device_mesh("cpu", (1,))
        kwargs.pop("offload_policy")
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    adam = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        adam.step()
        adam.zero_grad()

    return System(_backward(model, spec), step, close=dist.destroy_process_group)


def _torchao(spec: Spec, device: torch.device) -> System:
    """`CPUOffloadOptimizer` with gradients offloaded: 16-bit weights and moments, no clipping,
    which it cannot."""
    if find_spec("torchao") is None:
        raise MissingError("torchao is not installed")
    if device.type != "cuda":
        raise MissingError("torchao's CPUOffloadOptimizer needs a GPU")
    from torchao.optim import CPUOffloadOptimizer

    model = _on_device(spec, device)
    accumulates = spec.grad_accum_steps > 1  # it cannot free gradients that are summed
    adam = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=not accumulates, fused=True, lr=LR
    )

    def step() -> None:
        adam.step()
        adam.zero_grad()

    return System(_backward(model, spec), step)


def _deepspeed(spec: Spec, device: torch.device) -> System:
    """ZeRO-2 with the optimizer on the CPU, pinned, overlapped, as its tutorial has it."""
    if find_spec("deepspeed") is None:
        raise MissingError("deepspeed is not installed")
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", "0")  # it wants a launcher's word for it
    _group_of_one(device)
    model = _on_device(spec, device)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": spec.micro_batch,
            "gradient_accumulation_steps": spec.grad_accum_steps,
            "gradient_clipping": CLIP_NORM,
            "bf16": {"enabled": spec.precision == "bf16"},
            "fp16": {"enabled": spec.precision == "fp16"},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
            },
        },
    )

    def micro(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(inputs, targets)
        engine.backward(loss)
        engine.step()  # updates at the end of accumulation only
        return loss.detach()

    return System(micro, lambda: None)


def _group_of_one(device: torch.device) -> None:
    """torch.distributed over this process alone, without a launcher and without a port."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _on_device(spec: Spec, device: torch.device) -> Transformer:
    """Working weights on the device, layers recomputed if asked for."""
    with torch.device("meta"):
        model = Transformer(spec.shape)
    model.to(PRECISIONS[spec.precision]).to_empty(device=device)
    model.apply(fill)
    _recompute(model, spec, device)
    return model


def _recompute(model: Transformer, spec: Spec, device: torch.device) -> None:
    """Compile and recompute layers as `offload` does with the same options."""
    activation = "recompute" if spec.recompute else "keep"
    config = OFFLOAD.replace(**{"activation": activation} | spec.options)
    budget, compiles = config.activations.compiled_budget, config.compute.compile_blocks
    if config.activations.mode == "selective" and not compiles:
        raise MissingError("eager layers that select what they keep are measured offloaded only")
    if config.compute.fp8 != "off":
        Float8Layers(model, config.compute.fp8, device, is_compiled=compiles)
    for block in model.blocks:
        if compiles:
            CompiledForward(block, budget).put()
        if config.activations.recomputes and budget is None:
            block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False)

    return run


def _backward(model: nn.Module, spec: Spec) -> Callable[[Tensor, Tensor], Tensor]:
    def micro(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(inputs, targets)
        (loss / spec.grad_accum_steps).backward()
        return loss.detach()

    return micro


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Values for what a module owns: norms at one, biases at zero, small numbers elsewhere.

    They are exact in 16 bits, so that masters begin with the same values in every system."""
    for name, param in module.named_parameters(recurse=False):
        if param.ndim < 2:
            param.fill_(0.0 if name == "bias" else 1.0)
            continue
        generator = torch.Generator().manual_seed(param.shape[0])
        pattern = 0.02 * torch.randn(min(_PATTERN, param.numel()), generator=generator)
        flat, pattern = param.view(-1), pattern.bfloat16().to(param)
        for lo in range(0, flat.numel(), pattern.numel()):
            piece = flat[lo : lo + pattern.numel()]
            piece.copy_(pattern[: piece.numel()])
