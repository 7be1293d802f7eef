"""Adapters of PEFT under offload: attached while loading, saved from masters, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import offloadtrain as ot
from benchmarks.architectures.batches import VOCAB
from benchmarks.architectures.models import ARCHITECTURES
from benchmarks.round_trip import tensors
from offloadtrain.engine import ModelError

pytestmark = pytest.mark.filterwarnings(  # a name that PEFT uses of transformers
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
LORA: dict[str, Any] = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
DORA = LORA | {"use_dora": True}
HEADED = LORA | {"modules_to_save": ["lm_head"], "bias": "all"}
KINDS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": DORA,
    "head": HEADED,
    "gaussian": LORA | {"init_lora_weights": "gaussian"},
}


@pytest.fixture(autouse=True)
def is_unread() -> None:
    transformers.logging.disable_progress_bar()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model: Any = ARCHITECTURES["llama"].build()
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def reference(folder: Path, lora: dict[str, Any]) -> Any:
    """What users of transformers and PEFT write."""
    from peft import LoraConfig, get_peft_model

    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    keys = {"lora_alpha" if key == "alpha" else key: value for key, value in lora.items()}
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(**keys))


def load(folder: Path, lora: dict[str, Any], **options: Any) -> tuple[Any, ot.OffloadOptimizer]:
    torch.manual_seed(1)
    rule = ot.AdamW(lr=1e-2)
    return ot.from_pretrained(folder, rule, lora=lora, device="cpu", working="host", **options)


def train(model: Any, optimizer: ot.OffloadOptimizer, steps: int = 2) -> None:
    batch = ARCHITECTURES["llama"].batch(torch.Generator().manual_seed(2))
    for _ in range(steps):
        optimizer.backward(model(**batch).loss)
        optimizer.step()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    batch = ARCHITECTURES["llama"].batch(torch.Generator().manual_seed(3))
    values: Tensor = model(**batch).logits
    return values


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_begin_as_those_of_peft(folder: Path, kind: str) -> None:
    model, optimizer = load(folder, KINDS[kind], precision="fp32")
    expected = reference(folder, KINDS[kind])
    masters = dict(optimizer.master_weights())
    assert list(masters) == [name for name, _ in expected.named_parameters()]
    for name, param in expected.named_parameters():
        assert torch.equal(masters[name], param.detach().float()), name
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {name for name, param in expected.named_parameters() if param.requires_grad}
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-6)
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "state"), list(zip(KINDS, ["fp32", "split16"] * 2, strict=True)))
def test_saved_adapters_load_to_the_same(folder: Path, kind: str, state: str) -> None:
    from peft import PeftModel

    model, optimizer = load(folder, KINDS[kind], state=state)
    train(model, optimizer)
    masters = dict(optimizer.master_weights())
    ot.save_pretrained(optimizer, folder.parent / "adapters")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    back = PeftModel.from_pretrained(base, folder.parent / "adapters")
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    params = dict(back.named_parameters())
    assert trained and trained <= set(params)
    for name in trained:
        assert torch.equal(params[name].detach(), masters[name]), name
    assert {x.dtype for x in tensors(folder.parent / "adapters").values()} == {torch.float32}
    optimizer.close()


@pytest.mark.parametrize(
    "kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dora", "head"))]
)
def test_merged_as_peft_merges(folder: Path, kind: str) -> None:
    from peft import PeftModel

    model, optimizer = load(folder, KINDS[kind], precision="fp32")
    train(model, optimizer)
    ot.save_pretrained(optimizer, folder.parent / "merged", dtype="fp32", merge=True)
    ot.save_pretrained(model, folder.parent / "adapters")
    optimizer.close()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    back = PeftModel.from_pretrained(base, folder.parent / "adapters").merge_and_unload()
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "merged")
    assert type(merged) is type(back)
    params = dict(merged.named_parameters())
    assert list(params) == [name for name, _ in back.named_parameters()]
    for name, param in back.named_parameters():
        assert torch.equal(params[name], param), name
    start = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(logits(merged), logits(start))


@pytest.mark.slow
def test_qlora(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    config = transformers.LlamaConfig(  # rows of whole blocks, as its kernels want them
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=VOCAB,
    )
    folder = tmp_path / "base"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)

    def quantized() -> Any:
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16
        )
        return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

    torch.manual_seed(1)
    model: Any = get_peft_model(quantized(), LoraConfig(r=4, target_modules=["q_proj"]))
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", working="host")
    model.train()  # in eval mode bitsandbytes packs its weights anew
    train(model, optimizer)
    masters = dict(optimizer.master_weights())
    ot.save_pretrained(optimizer, folder.parent / "adapters")
    with pytest.raises(ModelError, match=r"q_proj' is quantized: merge its adapters with PEFT"):
        ot.save_pretrained(optimizer, folder.parent / "merged", merge=True)
    back = PeftModel.from_pretrained(quantized(), folder.parent / "adapters")
    for name, param in back.named_parameters():
        if "lora_" in name:
            assert torch.equal(param.detach(), masters[name]), name
    optimizer.close()
