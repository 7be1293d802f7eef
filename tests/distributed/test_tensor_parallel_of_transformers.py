"""Models of transformers in parts of their matrices, by the plan that each brings along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.distributed.test_tensor_parallel import whole

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def divided(model: Any, mesh: Any) -> None:
    """As docs/ranks.md says."""
    of_layer = {
        name.removeprefix("layers.*."): STYLES[kind]()
        for name, kind in model.config.base_model_tp_plan.items()
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, of_layer)


def trained(kind: str, parts: int, **options: Any) -> dict[str, Any]:
    """Three steps; what this rank has come to."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model, mesh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), None
    if parts > 1:
        mesh = init_device_mesh("cpu", (1, parts), mesh_dim_names=("dp", "tp"))
        divided(model, mesh["tp"])
    placed = {
        name: getattr(param.placements[0], "dim", None) if isinstance(param, DTensor) else None
        for name, param in model.named_parameters()
    }
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=1e-2),
        device="cpu",
        mesh=mesh,
        precision="fp32",
        clip_norm=0.5,
        **options,
    )
    generator, norms = torch.Generator().manual_seed(7), []
    for _ in range(3):
        tokens = torch.randint(0, 64, (4, 16), generator=generator)
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        optimizer.backward(loss)
        optimizer.step()
        norms.append((loss.item(), optimizer.grad_norm))
    masters = {name: value.clone().numpy() for name, value in optimizer.master_weights()}
    optimizer.close()
    return {"norms": norms, "masters": masters, "placed": placed}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma2"])
def test_two_parts_are_near_one_and_placements_change_no_bit(ranks: Run, kind: str) -> None:
    (one,) = ranks(1, trained, kind, 1)
    two = ranks(2, trained, kind, 2)
    masters = whole(two)
    matrices = sum(dim is not None for name, dim in two[0]["placed"].items() if "weight" in name)
    assert matrices == 3 * 7
    for name, value in one["masters"].items():
        worst = (masters[name] - torch.from_numpy(value)).abs().max()
        assert worst < 1e-3, name  # a tenth of what one step of lr moves
    for found, expected in zip(two[0]["norms"], one["norms"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    moved = ranks(2, trained, kind, 2, working="host", activation="recompute")
    for plain, other in zip(two, moved, strict=True):
        assert other["norms"] == plain["norms"]
        assert all((other["masters"][n] == m).all() for n, m in plain["masters"].items())
