"""Decoders of transformers in stages against one process with the same microbatches: its bits."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from offloadtrain.parallel.pipeline.decoder_probe import check_stages
from offloadtrain.parallel.pipeline.decoder_stages import cut_stage, is_of_transformers
from offloadtrain.parallel.pipeline.stage_modules import divide
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.test_pipeline import (
    MICROBATCHES,
    ROWS,
    Told,
    batches,
    loss_of,
    masters,
    of_step,
)

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(  # a name that PEFT uses of transformers
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DIVIDED = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "GPT2"]
DIVIDED += ["GPTNeoX", "Mixtral", "Granite", "Phi3", "Olmo"]
QUICK = [("Llama", 2), ("Gemma2", 4), ("GPT2", 2)]


def decoder(kind: str, **more: Any) -> Any:
    """Gemma 2 and 3 have layers of two kinds, whose order depends on their numbers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def of_stages(model: Any, count: int, tokens: Tensor) -> Tensor:
    """The logits of the stages of a model in this process, which share its parameters."""
    parts = divide(model, count)
    check_stages(model, parts)
    shared = {id(param): param for param in model.parameters()}
    given = tokens
    for index in range(count):
        stage = copy.deepcopy(model, dict(shared))
        cut_stage(stage, parts, index)
        given = stage(given)
    return given


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param(kind, count, marks=[] if (kind, count) in QUICK else pytest.mark.slow)
        for kind in DIVIDED
        for count in (2, 4, 8)
    ],
)
def test_stages_compute_what_the_whole_model_does(kind: str, count: int) -> None:
    """Forward, backward and what dropout draws."""
    assert_stages_compute(decoder(kind), count)


def assert_stages_compute(model: Any, count: int) -> None:
    whole, tokens = copy.deepcopy(model), batches()[0][0]
    torch.manual_seed(3)
    expected = whole(input_ids=tokens, use_cache=False).logits
    torch.manual_seed(3)
    found = of_stages(model, count, tokens)
    assert torch.equal(found, expected)
    for logits in (found, expected):
        logits.square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        if param.grad is None or other.grad is None:
            assert param.grad is other.grad, name
        else:
            assert torch.equal(param.grad, other.grad), name


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
        config = transformers.CONFIG_MAPPING[kind](**SIZES, **of_class, num_experts_per_tok=2)
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(config)
        if sum(param.numel() for param in made.parameters()) > 20e6:
            return None
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        copy.deepcopy(made)(input_ids=batches()[0][0], use_cache=False).logits.sum().backward()
    except Exception:  # whatever a class says of sizes that are not its own
        return None
    return made


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


class FromTokens(transformers.LlamaModel):
    """Hides padding, which only tokens show."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        if input_ids is not None and attention_mask is None:
            attention_mask = input_ids != 0
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **more)


class Notes(transformers.LlamaModel):
    """Lets layers write for those behind them."""

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
        (lambda: with_base(FromTokens), "'model.layers.4' would get something else in its stage"),
        (lambda: with_base(Notes), "'model.layers.0' gets a list or dictionary"),
        (with_forward_replaced, "its forward was replaced"),
        pytest.param(lambda: decoder("OPT"), "in another order", marks=pytest.mark.slow),
        pytest.param(lambda: adapted(), "wraps a model in adapters", marks=pytest.mark.slow),
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
    made = model()
    assert is_of_transformers(made)
    with pytest.raises(ot.PipelineError, match=message):
        check_stages(made, divide(made, 2))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"""Processes draw from torch's generator each for itself."""


def one_process(kind: str, meta: bool = False, **options: Any) -> Told:
    """A run of one process, or of all ranks as replicas."""
    model, replicas = decoder(kind, **NO_DROPOUT), dist.get_world_size()
    if meta:
        fill = drawn()
        with torch.no_grad():
            for module in model.modules():
                fill(module)
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=1e-2),
        device="cpu",
        grad_accum_steps=MICROBATCHES,
        params=groups_of(model),
        **options,
    )
    steps = []
    for tokens, targets in batches(replicas):
        tokens, targets = (x.chunk(replicas)[dist.get_rank()] for x in (tokens, targets))
        losses = []
        for x, y in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss = loss_of(model(input_ids=x, use_cache=False).logits, y)
            optimizer.backward(loss)
            losses.append(loss.detach().float())
        optimizer.step()
        steps.append(of_step(optimizer.last_step, torch.stack(losses)))
    return {"steps": steps, "masters": masters(optimizer)}


def drawn() -> Callable[[nn.Module], None]:
    """Fills what a module owns itself; each module draws behind those before it."""
    generator = torch.Generator().manual_seed(11)

    def fill(module: nn.Module) -> None:
        for value in module.parameters(recurse=False):
            value.normal_(std=0.1, generator=generator)
        if hasattr(module, "inv_freq"):
            module.inv_freq.copy_(1.0 / 100.0 ** torch.linspace(0.0, 1.0, len(module.inv_freq)))

    return fill


def piped(
    kind: str,
    stages: int,
    schedule: str = "1f1b",
    meta: bool = False,
    proof: bool = False,
    **options: Any,
) -> Told:
    """The same run on this process's stage."""
    mesh = init_device_mesh(
        "cpu", (stages, dist.get_world_size() // stages), mesh_dim_names=("pp", "dp")
    )
    with torch.device("meta") if meta else nullcontext():
        model = decoder(kind, **NO_DROPOUT)
    lanes = RecordingLanes(SequentialLanes())
    with on_lanes(lanes) if proof else nullcontext():
        pipeline = ot.pipeline(
            model,
            mesh,
            ot.AdamW(lr=1e-2),
            example=torch.zeros(ROWS, 16, dtype=torch.int64),
            microbatches=MICROBATCHES,
            loss_fn=loss_of,
            schedule=schedule,
            stages_per_rank=2 if schedule == "interleaved" else 1,
            params=groups_of(model),
            device="cpu",
            param_init_fn=drawn() if meta else None,
            **options,
        )
    steps: list[tuple[Any, ...]] = []
    replicas, late = pipeline.replicas, []
    for tokens, targets in batches(replicas.size):
        tokens, targets = (x.chunk(replicas.size)[replicas.rank] for x in (tokens, targets))
        losses = pipeline.run(tokens, target=targets)
        pipeline.step()
        if schedule == "2bw":  # each step is decided in the next run
            late.append(losses)
            if len(late) > 1:
                steps.append(of_step(pipeline.optimizers[0].last_step, losses))
        else:
            steps.append(of_step(pipeline.optimizers[0].last_step, losses))
    if (last := pipeline.drain()) is not None:
        steps.append(of_step(pipeline.optimizers[0].last_step, last))
    found: dict[str, Any] = {}
    for optimizer in pipeline.optimizers:
        found |= masters(optimizer)
    pipeline.close()
    return {"steps": steps, "masters": found, "faults": prove(lanes.program) if proof else []}


def assert_same(ranks: Run, kind: str, size: int, replicas: int, **options: Any) -> None:
    plain = {key: value for key, value in options.items() if key not in ("schedule", "proof")}
    if options.get("schedule") == "2bw":
        plain["update"] = "delayed"
    whole = ranks(replicas, one_process, kind, **plain)
    staged = ranks(size, piped, kind, size // replicas, proof=True, **options)
    together: dict[str, Any] = {}
    for rank, found in enumerate(staged):
        # As text, in which a norm that is no number equals itself.
        assert str(found["steps"]) == str(whole[rank % replicas]["steps"]), f"rank {rank}"
        assert not found["faults"]
        together |= found["masters"]
    assert together.keys() == whole[0]["masters"].keys()
    for name, value in whole[0]["masters"].items():
        assert (together[name] == value).all(), name


CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("Llama", 2, 1, {"clip_norm": 0.3}),
    ("Gemma2", 2, 1, {"clip_norm": 0.3, "activation": "recompute", "working": "host"}),
    ("GPT2", 2, 1, {"clip_norm": 0.3, "schedule": "interleaved"}),
    ("Qwen3", 4, 1, {"clip_norm": 0.3, "state": "split16"}),
    ("Gemma3Text", 4, 2, {"clip_norm": 0.3, "zero_stage": 2}),
    ("Llama", 2, 1, {"clip_norm": 0.3, "schedule": "2bw"}),
    ("Llama", 2, 1, {"meta": True}),
    ("Mixtral", 2, 1, {"precision": "fp32"}),
]
MORE: list[tuple[str, int, int, dict[str, Any]]] = [
    ("Mistral", 2, 1, {"precision": "fp16", "schedule": "gpipe"}),
    ("Llama", 4, 2, {"clip_norm": 0.3, "zero_stage": 3, "working": "host"}),
    ("Gemma", 2, 1, {"clip_norm": 0.3, "update": "speculative", "precision": "fp32"}),
    ("Qwen2", 4, 1, {"clip_norm": 0.3, "schedule": "2bw"}),
    ("Gemma3Text", 2, 1, {"activation": "offload", "schedule": "interleaved"}),
    ("Llama", 2, 1, {"meta": True, "schedule": "interleaved"}),
    ("Mixtral", 2, 1, {"clip_norm": 0.3, "activation": "recompute"}),
    ("Mixtral", 2, 1, {"precision": "fp16"}),
    ("GPTNeoX", 2, 1, {"activation": "offload_saved", "offload_saved_above": 0}),
]


def in_words(case: tuple[str, int, int, dict[str, Any]]) -> str:
    kind, size, replicas, options = case
    return "-".join([kind, f"{size // replicas}x{replicas}", *map(str, options.values())])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "replicas", "options"),
    [
        *(pytest.param(*one, id=in_words(one)) for one in CASES),
        *(pytest.param(*one, id=in_words(one), marks=pytest.mark.long) for one in MORE),
    ],
)
def test_same_bits(
    ranks: Run, kind: str, size: int, replicas: int, options: dict[str, Any]
) -> None:
    assert_same(ranks, kind, size, replicas, **options)


def with_labels() -> list[Any]:
    """Losses by the model's own function, and of an evaluation; what a stage cannot do."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    pipeline = ot.pipeline(
        decoder("Gemma2"),
        mesh,
        example=torch.zeros(ROWS, 16, dtype=torch.int64),
        microbatches=MICROBATCHES,
        device="cpu",
        precision="fp32",
    )
    tokens = batches()[0][0]
    mask = torch.ones_like(tokens)
    mask[:, :3] = 0
    more = {"labels": tokens, "attention_mask": mask}
    losses = pipeline.run(tokens, **more)
    part = {key: value[:ROWS] for key, value in more.items()}
    found = [losses.tolist(), pipeline.evaluate(tokens[:ROWS], **part).item()]
    with pytest.raises(ot.ModelError, match="holds a stage of the model"):
        ot.save_pretrained(pipeline.optimizers[0], "nowhere")
    pipeline.close()
    return found


@pytest.mark.slow
def test_the_last_stage_makes_the_loss_of_labels(ranks: Run) -> None:
    model, tokens = decoder("Gemma2"), batches()[0][0]
    mask = torch.ones_like(tokens)
    mask[:, :3] = 0
    with torch.no_grad():
        expected = [
            model(input_ids=x, labels=x, attention_mask=m).loss.item()
            for x, m in zip(tokens.chunk(MICROBATCHES), mask.chunk(MICROBATCHES), strict=True)
        ]
    assert ranks(2, with_labels) == [[expected, expected[0]]] * 2
