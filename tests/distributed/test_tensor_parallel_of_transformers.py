"""Models of transformers in parts of their matrices, by the plan that each brings along."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import offloadtrain as ot
from offloadtrain.config.errors import ConfigError
from offloadtrain.engine.local_part import LocalPart
from offloadtrain.parallel.tensor.transformers_plan import check_plan, divide
from offloadtrain.runtime.tensor_parts import Share, is_distributed, shares_of
from tests.distributed.conftest import Run
from tests.distributed.test_pipeline_misuse import told
from tests.distributed.test_pipeline_of_transformers import batches
from tests.distributed.test_pipeline_of_transformers import small as small_of
from tests.distributed.test_tensor_parallel import whole

os.environ["HF_HUB_OFFLINE"] = "1"
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
MORE: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "GPT2": {"n_inner": 64},
}
BY_HAND = ("Llama", "Qwen2", "Gemma2")
"""Divided by torch's styles, as docs/ranks.md says; others by `divide`."""
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
    config = getattr(transformers, f"{kind}Config")(**SIZES | MORE.get(kind, {}))
    model, mesh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), None
    if parts > 1:
        mesh = init_device_mesh("cpu", (1, parts), mesh_dim_names=("dp", "tp"))
        divided(model, mesh["tp"]) if kind in BY_HAND else divide(model, mesh["tp"])
    shares = {} if kind in BY_HAND else shares_of(model)  # torch's are no ranges of the whole
    held = {name: shares[param] for name, param in model.named_parameters() if param in shares}
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
    return {"norms": norms, "masters": masters, "placed": placed, "shares": held}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", pytest.param("Qwen2", marks=pytest.mark.long), "Gemma2"])
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


def assembled(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The masters of all parts, each element by where its part says it is in the whole."""
    found = {}
    for name in of_ranks[0]["masters"]:
        parts = [torch.from_numpy(one["masters"][name]) for one in of_ranks]
        share: Share | None = of_ranks[0]["shares"].get(name)
        if share is None:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} drifts apart"
            found[name] = parts[0]
            continue
        flat = torch.full((len(parts) * parts[0].numel(),), torch.nan)[: numel(share)]
        for one, part in zip(of_ranks, parts, strict=True):
            mine: Share = one["shares"][name]
            own = in_memory_order(part, mine)
            for piece in mine.ranges:
                flat[piece.at : piece.at + piece.length] = own[piece.lo : piece.lo + piece.length]
        found[name] = flat.as_strided(share.shape, share.stride).clone()
    return found


def numel(share: Share) -> int:
    return torch.Size(share.shape).numel()


def in_memory_order(part: Tensor, share: Share) -> Tensor:
    """A part, flat, with its dimensions in the order that the whole one has."""
    order = sorted(range(part.ndim), key=lambda axis: -share.stride[axis])
    return part.permute(order).reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["Phi3", "Mixtral", *(pytest.param(one, marks=pytest.mark.long) for one in ("Olmo2", "GPT2"))],
)
def test_plans_of_other_kinds(ranks: Run, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Gathered outputs and cut inputs, packed experts, and no plan; near one process, with the same
    bits in every placement."""
    (one,) = ranks(1, trained, kind, 1)
    two = ranks(2, trained, kind, 2)
    assert any(dim is not None for dim in two[0]["placed"].values())
    masters = assembled(two)
    worst = max(
        float((masters[name] - torch.from_numpy(value)).abs().max())
        for name, value in one["masters"].items()
    )
    with capsys.disabled():
        print(f"\n{kind}: worst difference of a master to one process after 3 steps: {worst:.2g}")
    assert worst < 1e-3  # a tenth of what one step of lr moves
    for found, expected in zip(two[0]["norms"], one["norms"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    for placed in (
        {"working": "host", "activation": "recompute"},
        {"update": "speculative", "activation": "offload"},
    ):
        moved = ranks(2, trained, kind, 2, **placed)
        for plain, other in zip(two, moved, strict=True):
            assert other["norms"] == plain["norms"]
            assert all((other["masters"][n] == m).all() for n, m in plain["masters"].items())


def of_loss(model: nn.Module) -> float:
    """Backward of a loss that tells logits apart."""
    torch.manual_seed(3)
    logits = model(input_ids=batches()[0][0], use_cache=False).logits.float()
    loss = (logits * torch.linspace(-1.0, 1.0, logits.shape[-1])).sin().mean()
    loss.backward()
    return loss.item()


def gradients_apart(model: nn.Module, mesh: Any) -> float:
    """The largest difference of a gradient in two parts to that of the whole model, over the
    norm of the latter."""
    generator, worst = torch.Generator().manual_seed(5), 0.0
    with torch.no_grad():  # norms and biases are all alike otherwise
        for param in model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=generator))
    divided = copy.deepcopy(model)
    divide(divided, mesh)
    assert of_loss(divided) == pytest.approx(of_loss(model), abs=1e-5)
    shares, whole_ones = shares_of(divided), dict(model.named_parameters())
    for name, param in divided.named_parameters():
        expected = whole_ones[name].grad
        assert (param.grad is None) == (expected is None), name
        if expected is None or (norm := expected.norm()) < 1e-7:
            continue
        found = param.grad
        if is_distributed(param):
            found = in_memory_order(LocalPart(param).of_gradient(param.grad), shares[param])
            expected = shares[param].of(expected)
        worst = max(worst, float((found - expected).norm() / norm))
    return worst


def judged(kind: str) -> str | float | None:
    """How far the gradients of a small model in two parts are from its own, or why it is refused;
    None: these sizes make no small one."""
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), small_of(kind)
    if model is None:
        return None
    model.config.get_text_config().attention_dropout = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    try:
        check_plan(model, 2)
    except ConfigError as error:
        return str(error)
    return gradients_apart(model, mesh)


@pytest.mark.long
def test_every_decoder_has_the_gradients_of_one_process_or_is_refused(
    ranks: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of transformers: none is silently different."""
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = {kind: ranks(2, judged, kind) for kind in kinds}
    one = {kind: both[0] for kind, both in found.items() if both[0] is not None}
    refused = {kind: why for kind, why in one.items() if isinstance(why, str)}
    apart = {kind: max(found[kind]) for kind in one if kind not in refused}
    with capsys.disabled():
        print(f"\nin two parts near one process: {len(apart)} of {len(one)}")
        print(", ".join(f"{kind} {value:.0e}" for kind, value in apart.items()))
        for kind, why in refused.items():
            print(f"{kind}: {why}")
    assert max(apart.values()) < 1e-3
    assert len(apart) > 110


def of_latent_attention(kind: str) -> float:
    """`judged` of a model whose keys and values are made of few numbers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    latent = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    latent |= {"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    groups = dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1)
    config = transformers.CONFIG_MAPPING[kind](**SIZES | latent | experts | groups)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    check_plan(model, 2)
    return gradients_apart(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("deepseek_v2", marks=pytest.mark.long), "deepseek_v3"]
)
def test_latent_attention_has_the_gradients_of_one_process(ranks: Run, kind: str) -> None:
    assert max(ranks(2, of_latent_attention, kind)) < 1e-5


def untied(*, again: bool) -> str:
    config = transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": True})
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    whole = {"input_layouts": Replicate()}, {"output_layouts": Replicate()}
    parallelize_module(model.model.embed_tokens, mesh["tp"], RowwiseParallel(**whole[0]))
    parallelize_module(model.lm_head, mesh["tp"], ColwiseParallel(**whole[1]))
    if again:
        model.lm_head.weight = model.model.embed_tokens.weight
    return told(lambda: ot.offload(model, device="cpu", mesh=mesh).close())


@pytest.mark.slow
def test_a_head_that_was_untied_is_refused(ranks: Run) -> None:
    for said in ranks(2, untied, again=False):
        assert "the head and the embedding of the model are two parameters" in said
    assert ranks(2, untied, again=True) == ["nothing", "nothing"]
