"""The loss of transformers' causal language models in parts, against their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import offloadtrain as ot
from offloadtrain.config import loss_parts
from offloadtrain.integrations.chunked_loss import chunk_loss

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

VOCAB = 300
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "use_cache": False} | {
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False} | {
    key: 0.0 for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop")
}
MOE = (
    SMALL
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {
        "output_router_logits": True,
        "head_dim": 16,
    }
)

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "gpt2, tied": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "phi, a bias": lambda: transformers.PhiForCausalLM(
        transformers.PhiConfig(**SMALL, resid_pdrop=0.0)
    ),
    "qwen3 experts": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE)),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 128 classes of 300."""
    monkeypatch.setattr(loss_parts, "PART_BYTES_CPU", 1)


def made(name: str) -> Any:
    torch.manual_seed(5)
    return MODELS[name]()


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (3, 17), generator=generator)
    labels = tokens.clone()
    labels[:, :4] = -100
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize(
    "name",
    [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_loss_and_gradients_are_the_models_own(name: str) -> None:
    model, plain = made(name), made(name)
    chunk_loss(model)
    for count in (None, torch.tensor(77)):
        output = model(**batch(), num_items_in_batch=count)
        wanted = plain(**batch(), num_items_in_batch=count)
        assert output.logits is None and "logits" not in output and wanted.logits is not None
        torch.testing.assert_close(output.loss, wanted.loss, rtol=1e-6, atol=0)
        output.loss.backward()
        wanted.loss.backward()
    for (key, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-4, atol=1e-7, msg=key)


@pytest.mark.parametrize(
    ("options", "when"),
    [({}, "before"), ({"working": "host", "activation": "recompute"}, "after")],
)
def test_it_trains_under_offload(options: dict[str, Any], when: str) -> None:
    model, plain = made("gpt2, tied"), made("gpt2, tied")
    if when == "before":
        chunk_loss(model)
    optimizer = ot.offload(
        model, ot.AdamW(lr=1e-2), device="cpu", precision="fp32", clip_norm=0.5, **options
    )
    if when == "after":
        chunk_loss(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for seed in range(4):
        loss = model(**batch(seed)).loss
        optimizer.backward(loss)
        optimizer.step()
        wanted = plain(**batch(seed)).loss
        reference.zero_grad()
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        torch.testing.assert_close(loss, wanted, rtol=2e-6, atol=0)
    optimizer.close()


def test_without_labels_or_gradients_nothing_changes() -> None:
    model, plain = made("llama"), made("llama")
    chunk_loss(model)
    tokens = batch()["input_ids"]
    assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    with torch.no_grad():
        output, wanted = model(**batch()), plain(**batch())
    assert torch.equal(output.logits, wanted.logits) and output.loss == wanted.loss
    made_by = [
        m.generate(tokens[:1, :3], max_new_tokens=4, do_sample=False) for m in (model, plain)
    ]
    assert torch.equal(*made_by)


def test_adapters_of_peft_over_it() -> None:
    peft = pytest.importorskip("peft")
    losses = []
    for chunked in (False, True):
        torch.manual_seed(5)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(made("llama"), config)
        if chunked:
            chunk_loss(model)
        loss = model(**batch()).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("Gemma2ForCausalLM", "Gemma2Config", "scales, caps or changes 'logits' behind the head"),
        ("BartForCausalLM", "BartConfig", "calls self.loss_function 0 times"),
    ],
)
def test_an_unusual_head_is_refused_by_name(kind: str, config: str, why: str) -> None:
    small = getattr(transformers, config)()
    with torch.device("meta"):
        model = getattr(transformers, kind)(small)
    with pytest.raises(ot.ModelError, match=f"the loss of {kind} .*{why}"):
        chunk_loss(model)


def test_a_head_that_is_wrapped_or_patched_already_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["lm_head"])
    with pytest.raises(ot.ModelError, match="its head 'lm_head' is a Linear, not a plain"):
        chunk_loss(peft.get_peft_model(made("llama"), config))
    model = made("llama")
    chunk_loss(model)
    with pytest.raises(ot.ModelError, match="already"):
        chunk_loss(model)


def test_labels_of_some_places_only_are_refused() -> None:
    model = made("llama")
    chunk_loss(model)
    with pytest.raises(ValueError, match="leave logits_to_keep out"):
        model(**batch(), logits_to_keep=1)
    assert model(input_ids=batch()["input_ids"]).logits is not None  # and it is whole again
