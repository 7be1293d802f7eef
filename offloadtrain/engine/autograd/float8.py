"""FP8: linear layers inside the model's list of layers multiply in 8 bits, through torchao.

[Note: FP8]
torchao's `Float8Linear` casts its input, its weight and the gradient of its output to FP8, with a
scale per tensor ("tensorwise") or per row ("rowwise"), in every forward and backward. Its
parameters stay in the working dtype: buckets, masters, gradients, checkpoints and streaming are
unaffected, and every placement gives the bits of a resident model that torchao has converted.
A converted module shares the attributes of the module that it replaces, including hooks and
parameters, so that the replacement can be undone at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from offloadtrain.config.errors import ModelError
from offloadtrain.config.offload import OptionError
from offloadtrain.engine.partition import layers_of
from offloadtrain.runtime.tensor_parts import is_distributed

_log = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16
"""FP8 products need sizes that are multiples of this number."""
_IN_16_BITS = {"gate", "router", "shared_expert_gate", "lora_A", "lora_B"}
"""Names of modules that stay in 16 bits: routers, for which rounding would choose other experts,
and the narrow matrices of adapters, for which the casts take longer than the product."""


class Float8Layers:
    """Linear layers inside the model's layers that compute in FP8 until `remove()`.

    It converts each `nn.Linear` in the layers of a list whose two sizes are multiples of 16.
    Embeddings, the head, norms, routers and LoRA adapters stay in 16 bits. On the CPU the products
    are emulated.
    """

    def __init__(
        self, model: nn.Module, recipe: str, device: torch.device, *, is_compiled: bool
    ) -> None:
        """Convert the layers that are not converted yet.

        Args:
            recipe: torchao's recipe, "tensorwise" or "rowwise".
            is_compiled: whether torch compiles the layers, which fuses the casts.

        Raises:
            OptionError: torchao is missing, or the GPU has no FP8 products.
            ModelError: no layer can be converted, or a module is divided among ranks.
        """
        option = f"fp8 = {recipe!r}"
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
            from torchao.float8.float8_linear import Float8Linear
        except ImportError as error:
            raise OptionError(f"{option} needs torchao: pip install 'offloadtrain[fp8]'") from error
        originals = dict(_linear_layers(model))
        self._places = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if child in originals
        ]
        """Parent, name in the parent, and original module."""
        self._converted: set[nn.Module] = set()
        if not originals and any(isinstance(m, Float8Linear) for m in model.modules()):
            return
        _check_device(option, device, is_compiled=is_compiled)
        _check_layers(option, model, originals)
        in_layers = sum(isinstance(m, nn.Linear) for x in layers_of(model) for m in x.modules())
        _log.info("%s: %d of %d linear layers multiply in it", option, len(originals), in_layers)
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(
            model,
            config=replace(config, emulate=device.type == "cpu", pad_inner_dim=True),
            module_filter_fn=lambda module, _: module in originals,
        )
        for parent, name, original in self._places:
            converted = parent.get_submodule(name)
            converted.__dict__.update(original.__dict__)
            # A function that initializes weights by class must recognise the original class.
            kind: Any = type(original)
            converted.__class__ = _class_of(Float8Linear, kind)
            self._converted.add(converted)

    def remove(self) -> None:
        """Put the original modules back, except where other code has replaced the converted
        module."""
        for parent, name, original in self._places:
            converted = getattr(parent, name, None)
            if converted in self._converted:
                original.train(converted.training)
                setattr(parent, name, original)
        self._places.clear()


@cache
def _class_of(converted: Any, original: Any) -> Any:
    """Return a subclass of torchao's class and the original class. Cached, so that equal layers
    have the same class: the compiler makes code per class."""
    if issubclass(converted, original):
        return converted

    def reduce(module: nn.Module, protocol: object) -> Any:
        # A pickle refers to a class by name; this class has no name in any module.
        return _instance, (converted, original), module.__dict__

    attributes = {"__reduce_ex__": reduce}
    return type(f"Float8{original.__name__}", (converted, original), attributes)


def _instance(converted: Any, original: Any) -> Any:
    """Return a converted module without attributes, for copies and pickles."""
    kind = _class_of(converted, original)
    return kind.__new__(kind)


@contextmanager
def converted_layers(
    model: nn.Module, recipe: str, device: torch.device, *, is_compiled: bool
) -> Iterator[list[Float8Layers]]:
    """Convert the layers, unless `recipe` is "off". If the body raises, restore the originals."""
    arguments = model, recipe, device
    converted = [] if recipe == "off" else [Float8Layers(*arguments, is_compiled=is_compiled)]
    try:
        yield converted
    except BaseException:
        for layers in converted:
            layers.remove()
        raise


def _check_layers(option: str, model: nn.Module, linear_layers: Mapping[nn.Linear, str]) -> None:
    """Raises ModelError if there is no layer to convert, or a layer that cannot be converted."""
    if not linear_layers:
        raise ModelError(
            f"{option}: no nn.Linear in a list of layers of {type(model).__name__} has an input "
            f"and an output size that are multiples of {_MULTIPLE}: leave fp8 out"
        )
    for module, name in linear_layers.items():
        if any(map(is_distributed, module.parameters())):
            raise ModelError(
                f"{option}: '{name}' is divided among ranks (DTensor): leave fp8 out, or tensor "
                "parallelism"
            )


def _check_device(option: str, device: torch.device, *, is_compiled: bool) -> None:
    """Raises OptionError for a GPU without FP8 products; warns of slow combinations."""
    if device.type == "cpu":
        _log.warning("%s on the CPU is emulated: it is slower than 16 bits, and for tests", option)
        return
    if device.type == "meta":  # a plan for a GPU
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise OptionError(
            f"{option}: {torch.cuda.get_device_name(device)} has no FP8 products, which begin with "
            "compute capability 8.9 (Ada, Hopper): leave fp8 out"
        )
    if not is_compiled:
        _log.warning(
            "%s without compile_blocks = True: each cast to FP8 is a kernel of its own, and the "
            "step may be slower than in 16 bits",
            option,
        )


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Linear, str]]:
    """Yield the modules to convert, with their names."""
    inside = {module for layer in layers_of(model) for module in layer.modules()}
    for name, module in model.named_modules():
        if (
            module in inside
            and isinstance(module, nn.Linear)
            and isinstance(module._parameters.get("weight"), nn.Parameter)  # not computed by a hook
            # A subclass or a replaced forward computes something else.
            and type(module).forward is nn.Linear.forward
            and "forward" not in module.__dict__
            and module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
            and _IN_16_BITS.isdisjoint(name.split("."))
        ):
            yield module, name
