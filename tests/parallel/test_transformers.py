"""Models of transformers in stages and in parts of their matrices: the plan that each brings along,
and which models are refused. Trained ones are in `test_same_bits.py`."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from offloadtrain.config.errors import ConfigError
from offloadtrain.parallel.pipeline.decoder_probe import check_stages
from offloadtrain.parallel.pipeline.decoder_stages import cut_stage, is_of_transformers
from offloadtrain.parallel.pipeline.stage_modules import divide
from offloadtrain.parallel.tensor import transformers_plan
from offloadtrain.runtime.tensor_parts import LocalPart, is_distributed, shares_of
from tests.distributed.conftest import Run
from tests.parallel.mesh_runs import in_memory_order
from tests.parallel.models import HF_SIZES, KINDS, decoder

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(  # a name that PEFT uses of transformers
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

BATCH = KINDS["Llama"].batch(0, 0)[0]


def output_of_stages(model: Any, count: int, tokens: Tensor) -> Tensor:
    """The logits of the stages of a model in this process, which share its parameters."""
    parts = divide(model, count)
    check_stages(model, parts)
    shared = {id(param): param for param in model.parameters()}
    x = tokens
    for index in range(count):
        stage = copy.deepcopy(model, dict(shared))
        cut_stage(stage, parts, index)
        x = stage(x)
    return x


def assert_stages_compute(model: Any, count: int) -> None:
    undivided = copy.deepcopy(model)
    torch.manual_seed(3)
    expected = undivided(input_ids=BATCH, use_cache=False).logits
    torch.manual_seed(3)
    logits = output_of_stages(model, count, BATCH)
    assert torch.equal(logits, expected)
    for output in (logits, expected):
        output.square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), undivided.parameters(), strict=True):
        if param.grad is None or other.grad is None:
            assert param.grad is other.grad, name
        else:
            assert torch.equal(param.grad, other.grad), name


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("Llama", 2),
        ("Gemma2", 4),
        ("GPT2", 2),
        *(
            pytest.param(kind, count, marks=pytest.mark.slow)
            for kind, count in (
                *(("Mistral", 8), ("Qwen2", 4), ("Qwen3", 2), ("Gemma", 2), ("Gemma3Text", 8)),
                *(("GPTNeoX", 4), ("Mixtral", 2), ("Granite", 4), ("Phi3", 2), ("Olmo", 8)),
            )
        ),
    ],
)
def test_stages_compute_what_the_undivided_model_does(kind: str, count: int) -> None:
    """Forward, backward and what dropout draws."""
    assert_stages_compute(decoder(kind), count)


@pytest.mark.long
def test_every_decoder_is_divided_to_the_bit_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All causal language models of transformers that these sizes make a small one of."""
    same, refused = [], {}
    for kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = small(kind)
        if model is None:
            continue
        try:
            assert_stages_compute(model, 2)
            same.append(kind)
        except ot.PipelineError as error:
            refused[kind] = str(error)
    with capsys.disabled():
        print(f"\nin two stages with the bits of one: {len(same)} of {len(same) + len(refused)}")
        print(", ".join(same))
        for kind, why in refused.items():
            print(f"{kind}: {why.partition('. Pipelines')[0]}")
    assert len(same) > 80


def small(kind: str) -> Any:
    """A model whose forward works, of at most 20 million parameters; None: there is none."""
    of_class = {"n_embd": 32, "n_layer": 8, "n_head": 4, "num_experts": 4, "num_local_experts": 4}
    try:
        config = transformers.CONFIG_MAPPING[kind](**HF_SIZES, **of_class, num_experts_per_tok=2)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        if sum(param.numel() for param in model.parameters()) > 20e6:
            return None
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        copy.deepcopy(model)(input_ids=BATCH, use_cache=False).logits.sum().backward()
    except Exception:  # whatever a class says of sizes that are not its own
        return None
    return model


class ScaledOutside(transformers.LlamaModel):
    """As the first Gemma did: hidden states are scaled by the model, not by its embedding."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **more: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return super().forward(inputs_embeds=inputs_embeds * 3.0, **more)


class Clamped(transformers.LlamaModel):
    def forward(self, *args: Any, **more: Any) -> Any:
        out = super().forward(*args, **more)
        out.last_hidden_state = out.last_hidden_state.tanh()
        return out


class MasksByTokens(transformers.LlamaModel):
    """Hides padding, which only tokens show."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        if input_ids is not None and attention_mask is None:
            attention_mask = input_ids != 0
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **more)


class TakesNotes(transformers.LlamaModel):
    """Lets layers write for those after them."""

    def forward(self, *args: Any, **more: Any) -> Any:
        return super().forward(*args, notes={}, **more)


def with_base(kind: type) -> Any:
    model = decoder("Llama")
    model.model = kind(model.config)
    return model


def with_forward_replaced() -> Any:
    model = decoder("Llama")
    model.forward = lambda *args, **more: None
    return model


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(decoder("Llama"), peft.LoraConfig(task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: with_base(ScaledOutside), "'model.layers.4' would get something else in its"),
        (lambda: with_base(Clamped), "'model.layers.4' would get something else in its stage"),
        (lambda: with_base(MasksByTokens), "'model.layers.4' would get something else in its s"),
        (lambda: with_base(TakesNotes), "'model.layers.0' gets a list or dictionary"),
        (with_forward_replaced, "its forward was replaced"),
        pytest.param(lambda: decoder("OPT"), "in another order", marks=pytest.mark.slow),
        pytest.param(adapted, "wraps a model in adapters", marks=pytest.mark.slow),
        pytest.param(
            lambda: decoder("Mixtral", output_router_logits=True),
            "its loss balances experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: transformers.LlamaModel(decoder("Llama").config),
            "no base model around its layers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_decoders_that_cannot_be_divided(model: Any, message: str) -> None:
    """Whatever happens to hidden states between layers, which stages would do twice or not at
    all."""
    undivided = model()
    assert is_of_transformers(undivided)
    with pytest.raises(ot.PipelineError, match=message):
        check_stages(undivided, divide(undivided, 2))


def labels_and_mask() -> dict[str, Tensor]:
    mask = torch.ones_like(BATCH)
    mask[:, :3] = 0
    return {"labels": BATCH, "attention_mask": mask}


def losses_of_stages() -> list[Any]:
    """Losses by the model's own function, and of an evaluation."""
    pipeline = ot.pipeline(
        decoder("Gemma2"),
        init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
        example=torch.zeros(2, 16, dtype=torch.int64),
        microbatches=4,
        device="cpu",
        precision="fp32",
    )
    more = labels_and_mask()
    losses = pipeline.run(BATCH, **more)
    part = {key: value[:2] for key, value in more.items()}
    evaluated = pipeline.evaluate(BATCH[:2], **part).item()
    with pytest.raises(ot.ModelError, match="holds a stage of the model"):
        ot.save_pretrained(pipeline.optimizers[0], "nowhere")
    pipeline.close()
    return [losses.tolist(), evaluated]


@pytest.mark.slow
def test_the_last_stage_makes_the_loss_of_labels(ranks: Run) -> None:
    model, more = decoder("Gemma2"), labels_and_mask()
    chunks = zip(BATCH.chunk(4), *(value.chunk(4) for value in more.values()), strict=True)
    with torch.no_grad():
        expected = [
            model(input_ids=x, labels=labels, attention_mask=mask).loss.item()
            for x, labels, mask in chunks
        ]
    assert ranks(2, losses_of_stages) == [[expected, expected[0]]] * 2


# Parts of matrices.


def loss_and_backward(model: nn.Module) -> float:
    """Backward of a loss that tells logits apart."""
    torch.manual_seed(3)
    logits = model(input_ids=BATCH, use_cache=False).logits.float()
    loss = (logits * torch.linspace(-1.0, 1.0, logits.shape[-1])).sin().mean()
    loss.backward()
    return loss.item()


def gradient_difference(model: nn.Module, mesh: Any) -> float:
    """The largest difference of a gradient in two parts to that of the undivided model, over the
    norm of the latter."""
    generator, worst = torch.Generator().manual_seed(5), 0.0
    with torch.no_grad():  # norms and biases are all alike otherwise
        for param in model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=generator))
    divided = copy.deepcopy(model)
    transformers_plan.divide(divided, mesh)
    assert loss_and_backward(divided) == pytest.approx(loss_and_backward(model), abs=1e-5)
    shares, params = shares_of(divided), dict(model.named_parameters())
    for name, param in divided.named_parameters():
        expected = params[name].grad
        assert (param.grad is None) == (expected is None), name
        if expected is None or (norm := expected.norm()) < 1e-7:
            continue
        grad = param.grad
        if is_distributed(param):
            grad = in_memory_order(LocalPart(param).of_gradient(param.grad), shares[param])
            expected = shares[param].of(expected)
        worst = max(worst, float((grad - expected).norm() / norm))
    return worst


def judge(kind: str) -> str | float | None:
    """How far the gradients of a small model in two parts are from its own, or why it is refused;
    None: these sizes make no small one."""
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), small(kind)
    if model is None:
        return None
    model.config.get_text_config().attention_dropout = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    try:
        transformers_plan.check_plan(model, 2)
    except ConfigError as error:
        return str(error)
    return gradient_difference(model, mesh)


@pytest.mark.long
def test_every_decoder_has_the_gradients_of_one_process_or_is_refused(
    ranks: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of transformers: none is silently different."""
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    verdicts = {kind: ranks(2, judge, kind) for kind in kinds}
    first = {kind: both[0] for kind, both in verdicts.items() if both[0] is not None}
    refused = {kind: why for kind, why in first.items() if isinstance(why, str)}
    differences = {kind: max(verdicts[kind]) for kind in first if kind not in refused}
    with capsys.disabled():
        print(f"\nin two parts near one process: {len(differences)} of {len(first)}")
        print(", ".join(f"{kind} {value:.0e}" for kind, value in differences.items()))
        for kind, why in refused.items():
            print(f"{kind}: {why}")
    assert max(differences.values()) < 1e-3
    assert len(differences) > 110


def gradients_of_latent_attention(kind: str) -> float:
    """`judge` a model whose keys and values are made of few numbers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    latent = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    latent |= {"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
    latent |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    latent |= dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1)
    sizes = HF_SIZES | {"num_hidden_layers": 3} | latent
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    transformers_plan.check_plan(model, 2)
    return gradient_difference(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("deepseek_v2", marks=pytest.mark.long), "deepseek_v3"]
)
def test_latent_attention_has_the_gradients_of_one_process(ranks: Run, kind: str) -> None:
    assert max(ranks(2, gradients_of_latent_attention, kind)) < 1e-5
