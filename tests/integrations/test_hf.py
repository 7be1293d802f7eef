"""The Trainer of transformers and TRL's, offloaded: the same losses and norms, in 4 decimals."""

from __future__ import annotations

import gc
import json
import sys
import types
import weakref
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from benchmarks.frameworks import data, trainers, with_lightning
from benchmarks.frameworks.accelerated import BATCH
from offloadtrain.integrations.checkpoint_files import CheckpointError
from offloadtrain.integrations.hf import refuse_arguments, rule_of
from offloadtrain.runtime.lanes import on_lanes
from tests import levels
from tests.seeded_lanes import SeededLanes

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    # Of transformers' own: the CPU has no pinned memory.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

STREAMED = {"working": "host"}
MASKED = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2}
EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 5}
BETWEEN = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 3}
BEST = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
GROUPED: dict[str, Any] = dict(
    train_dataset=data.Texts().unpadded(),
    data_collator=data.padded,
    arguments={"train_sampling_strategy": "group_by_length", **MASKED},
)


def checkpointing(use_reentrant: bool) -> dict[str, Any]:
    kwargs = {"use_reentrant": use_reentrant}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}


# Name → options of offload, the trainer and its arguments.
SCRIPTS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "masked": (STREAMED, "Trainer", dict(arguments=MASKED)),
    "epochs": (STREAMED, "Trainer", dict(arguments=EPOCHS)),
    "no clipping": ({"skip_nonfinite": False}, "Trainer", dict(arguments={"max_grad_norm": 0.0})),
    "smoothed": (
        *(STREAMED, "Trainer"),
        dict(arguments={"average_tokens_across_devices": False, "label_smoothing_factor": 0.1}),
    ),
    "reentrant": (STREAMED, "Trainer", dict(arguments=checkpointing(True))),
    "not reentrant": (STREAMED, "Trainer", dict(arguments=checkpointing(False))),
    "noise": ({"state_on": "device"}, "Trainer", dict(arguments={"neftune_noise_alpha": 5.0})),
    "short last batch": (
        *(STREAMED, "Trainer"),
        dict(
            arguments={
                **EPOCHS,
                "per_device_train_batch_size": 7,
                "gradient_accumulation_steps": 3,
            }
        ),
    ),
    "speculative": ({"update": "speculative"}, "Trainer", dict(arguments=MASKED)),
    "recompute, grouped by length": ({"activation": "recompute", **STREAMED}, "Trainer", GROUPED),
    "a stream": (
        *(STREAMED, "Trainer"),
        dict(train_dataset=data.Stream(), arguments={"gradient_accumulation_steps": 2}),
    ),
    "a loss function": (
        *(STREAMED, "Trainer"),
        dict(compute_loss_func=data.counted_loss, arguments={"gradient_accumulation_steps": 2}),
    ),
    "rate by the evaluation": (
        *(STREAMED, "Trainer"),
        dict(
            eval_dataset=data.Texts(),
            arguments={**BETWEEN, "lr_scheduler_type": "reduce_lr_on_plateau"},
        ),
    ),
    "the best at the end": (
        *(STREAMED, "Trainer"),
        dict(eval_dataset=data.Texts(), arguments={**EPOCHS, **BEST}),
    ),
    "another optimizer": (
        *(STREAMED, "Trainer"),
        dict(arguments={"optim": "adagrad", "learning_rate": 0.01}),
    ),
    "packed": (STREAMED, "SFTTrainer", dict(arguments={"packing": True, "max_length": 32})),
    "adapters": (
        *(STREAMED, "SFTTrainer"),
        dict(lora=True, arguments={"gradient_accumulation_steps": 2}),
    ),
    "preferences": (STREAMED, "DPOTrainer", dict(arguments={"gradient_accumulation_steps": 2})),
    "reference computed before, adapters": (
        *(STREAMED, "DPOTrainer"),
        dict(lora=True, arguments={"precompute_ref_log_probs": True}),
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "masked" else pytest.mark.slow) for name in SCRIPTS],
)
def test_a_trainer_logs_the_same_losses_and_norms(tmp_path: Path, name: str) -> None:
    offload, kind, settings = SCRIPTS[name]
    logged = trainers.train(kind, tmp_path, offload, **settings)
    assert logged == trainers.train(kind, tmp_path, None, **settings)
    assert all(norm > 0 for _, norm in logged)


@pytest.mark.slow
@pytest.mark.parametrize("script", [{"arguments": EPOCHS}, GROUPED], ids=["epochs", "grouped"])
def test_resumes_in_the_middle_of_an_epoch(tmp_path: Path, script: dict[str, Any]) -> None:
    """Whose last step is shorter, or with texts in the order of their lengths."""
    saving = {"save_strategy": "steps", "save_steps": 2, **script["arguments"]}
    settings = {**script, "arguments": saving}
    uninterrupted = trainers.train("Trainer", tmp_path, STREAMED, **settings)
    at = tmp_path / "checkpoint-2"
    assert trainers.train("Trainer", tmp_path, STREAMED, resume=at, **settings) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "offload", "arguments", "lora"),
    [
        ("Trainer", STREAMED, {}, False),
        ("Trainer", {"state": "int8"}, {"bf16": True}, False),
        ("Trainer", {}, {"fp16": True}, False),
        ("Trainer", {"update": "speculative"}, {"bf16": True}, False),
        ("SFTTrainer", STREAMED, {"bf16": True}, True),
        ("DPOTrainer", {}, {"bf16": True}, False),
    ],
    ids=str,
)
def test_resumes_to_the_same_losses(
    tmp_path: Path, kind: str, offload: dict[str, Any], arguments: dict[str, Any], lora: bool
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, **MASKED, **arguments}
    uninterrupted = trainers.train(kind, tmp_path, offload, lora=lora, arguments=saving)
    at = tmp_path / "checkpoint-3"
    again = trainers.train(kind, tmp_path, offload, lora=lora, arguments=saving, resume=at)
    assert again == uninterrupted and len(again) == 6


@pytest.mark.slow
def test_damaged_weights_of_the_trainer_change_nothing(tmp_path: Path) -> None:
    """Trained weights are those of the masters, each bit of which is checked."""
    saving = {"save_strategy": "steps", "save_steps": 3, **MASKED}
    uninterrupted = trainers.train("Trainer", tmp_path, STREAMED, arguments=saving)
    at = tmp_path / "checkpoint-3"
    path = at / "model.safetensors"
    content = bytearray(path.read_bytes())
    values = 8 + int.from_bytes(content[:8], "little")
    assert len(content) - values > 1000
    for place in range(values, len(content), 97):
        content[place] ^= 0x11
    path.write_bytes(content)
    assert trainers.train("Trainer", tmp_path, STREAMED, arguments=saving, resume=at) == (
        uninterrupted
    )


@pytest.mark.parametrize(
    "offload",
    [STREAMED, pytest.param({"update": "speculative"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_plain_trainer_goes_on_and_back(
    tmp_path: Path, offload: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Moments, step count and schedule: from either trainer to the other, in the same folder."""
    saving = {"save_strategy": "steps", "save_steps": 2, **MASKED}
    once = trainers.train("Trainer", tmp_path / "plain", None, arguments=saving)
    mixed = tmp_path / "mixed"
    assert trainers.train("Trainer", mixed, offload, arguments=saving) == once
    # The plain Trainer writes into checkpoint-4, where an outdated file of a rank stays.
    for turn, at in ((None, 2), (offload, 4)):
        resume = mixed / f"checkpoint-{at}"
        assert trainers.train("Trainer", mixed, turn, arguments=saving, resume=resume) == once
    assert "plain Trainer refuses" not in caplog.text
    state = torch.load(mixed / "checkpoint-6/optimizer.pt", weights_only=True)["state"]
    assert {entry["step"].item() for entry in state.values()} == {6}
    numel = sum(entry["exp_avg"].numel() for entry in state.values())
    sizes = [path.stat().st_size for path in (mixed / "checkpoint-6").glob("o*.pt")]
    assert len(sizes) == 2 and sum(sizes) < 12 * numel + 128 * 2**10


@pytest.mark.parametrize(
    ("offload", "arguments", "reason"),
    [
        ({"state": "int8"}, {"bf16": True}, "state = 'int8'"),
        ({}, {"optim": "lion_32bit"}, "the update rule is Lion"),
    ],
    ids=str,
)
def test_the_plain_trainer_refuses_what_it_cannot_take_over(
    tmp_path: Path,
    offload: dict[str, Any],
    arguments: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would go on with new moments and a new schedule, and say nothing."""
    saving = {"save_strategy": "steps", "save_steps": 2, **MASKED, **arguments}
    once = trainers.train("Trainer", tmp_path, offload, arguments=saving)
    (message,) = [
        record.message for record in caplog.records if "plain Trainer refuses" in record.message
    ]
    assert reason in message
    at, plain = tmp_path / "checkpoint-4", {**saving, "optim": "adamw_torch"}
    with pytest.raises(ValueError, match="different number of parameter groups"):
        trainers.train("Trainer", tmp_path, None, arguments=plain, resume=at)
    assert trainers.train("Trainer", tmp_path, offload, arguments=saving, resume=at) == once


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("saved")
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "bf16": True}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = trainers.make(
        "Trainer",
        folder,
        STREAMED,
        arguments={**saving, **evaluated, "learning_rate": 0.5},
        eval_dataset=data.Texts(),
    )
    trainer.train()
    return trainer, folder


class TestSaved:
    """One run of bf16 over fp32 weights, saved by every means."""

    @pytest.mark.slow
    def test_the_best_model_is_loaded_and_evaluates_as_it_did(self, run: tuple[Any, Path]) -> None:
        """At this learning rate the losses rise: the best model is the first."""
        trainer, folder = run
        losses = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
        assert trainer.state.best_model_checkpoint == str(folder / "checkpoint-2")
        assert losses[0] < losses[1]
        assert trainer.evaluate()["eval_loss"] == losses[0]

    @pytest.mark.slow
    def test_weights_are_the_masters_and_the_state_is_no_larger_than_it_is(
        self, run: tuple[Any, Path]
    ) -> None:
        _, folder = run
        at = folder / "checkpoint-2"
        loaded = transformers.AutoModelForCausalLM.from_pretrained(at)
        state = torch.load(at / "offload_rank0_of_1.pt", weights_only=True)["state"]
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
        assert json.loads((at / "config.json").read_text())["dtype"] == "float32"
        masters = sorted(entry["master"].double().sum().item() for entry in state.values())
        assert sorted(p.double().sum().item() for p in loaded.parameters()) == masters
        numel = sum(param.numel() for param in loaded.parameters())
        assert (at / "offload_rank0_of_1.pt").stat().st_size < 12 * numel + 64 * 2**10

    @pytest.mark.slow
    def test_generation_after_training(self, run: tuple[Any, Path]) -> None:
        trainer, _ = run
        tokens = data.Texts()[0]["input_ids"][None]
        made = trainer.model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=1)
        assert made.shape[1] == tokens.shape[1] + 3


@pytest.mark.slow
def test_evaluation_before_training_streams(tmp_path: Path) -> None:
    plain = trainers.make("Trainer", tmp_path, None, arguments={}, eval_dataset=data.Texts())
    trainer = trainers.make("Trainer", tmp_path, STREAMED, arguments={}, eval_dataset=data.Texts())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], 1e-6)
    trainer.train()
    assert trainers.logged(trainer) == trainers.train("Trainer", tmp_path, None, arguments={})


def test_rules_are_made_of_their_arguments(tmp_path: Path) -> None:
    args = arguments_of(optim="lion_32bit", learning_rate=2e-4)
    refuse_arguments(args)
    assert rule_of(args) == ot.Lion(lr=2e-4, betas=(0.9, 0.999))
    rule = {"optimizer_cls_and_kwargs": (ot.Adam, {"lr": 1e-3})}
    trainer = trainers.make("Trainer", tmp_path, {}, arguments={"max_steps": 1}, **rule)
    assert type(trainer.create_optimizer()._rules[0]) is ot.Adam


def arguments_of(**named: Any) -> Any:
    return transformers.TrainingArguments(**{"use_cpu": True, "report_to": [], **named})


def test_arguments_are_refused_by_name() -> None:
    for name, value in (
        ("optim", "adafactor"),
        ("optim", "adamw_bnb_8bit"),
        ("torch_compile", True),
        ("optim_args", "a=1"),
        ("optim_target_modules", "all-linear"),
        ("deepspeed", "ds.json"),
        ("fsdp", "full_shard"),
    ):
        args = arguments_of()
        refuse_arguments(args)
        setattr(args, name, value)
        with pytest.raises(ValueError, match=rf"^these .*\n{name} = "):
            refuse_arguments(args)


def test_fused_kernels_are_refused_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded: transformers would find it out in the first forward."""
    args = arguments_of(use_liger_kernel=True)
    for missing in ("liger_kernel", "triton"):
        for name in ("liger_kernel", "triton"):
            module = types.ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, None if name == missing else module)
        with pytest.raises(ValueError, match=f"\\nuse_liger_kernel = True: {missing} cannot"):
            refuse_arguments(args)
    monkeypatch.setitem(sys.modules, "triton", sys.modules["liger_kernel"])
    with pytest.raises(ValueError, match=r"need a GPU, and the device is cpu"):
        refuse_arguments(args)
    monkeypatch.setattr(type(args), "device", torch.device("cuda", 0))
    refuse_arguments(args)
    with pytest.raises(ValueError, match=r"and chunked_loss = True both replace"):
        refuse_arguments(args, chunked_loss=True)
    args.liger_kernel_config = {"fused_linear_cross_entropy": False}
    refuse_arguments(args, chunked_loss=True)


@pytest.mark.slow
def test_a_loss_in_parts(tmp_path: Path) -> None:
    """Counted over the whole step, in microbatches of different token counts."""
    trainer = trainers.make("Trainer", tmp_path, STREAMED, arguments=MASKED, chunked_loss=True)
    trainer.train()
    logged = trainers.logged(trainer)
    assert logged == trainers.train("Trainer", tmp_path, None, arguments=MASKED)
    batch = {name: x[None] for name, x in data.Texts(masked=True)[0].items()}
    assert trainer.model(**batch).logits is None


@pytest.mark.slow
def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    net = data.model()
    options = dict(device="cpu", precision="fp32", clip_norm=0.5)
    optimizer = ot.offload(net, ot.AdamW(lr=1e-3, weight_decay=0.1), **options)
    settings: dict[str, Any] = dict(model=net, optimizers=(optimizer, None))
    trainer = trainers.make("Trainer", tmp_path, {}, arguments={"max_steps": 2}, **settings)
    trainer.train()
    assert [norm for _, norm in trainers.logged(trainer)] != [0.0, 0.0]
    wrong = {"max_grad_norm": 1.0}
    with pytest.raises(ValueError, match=r"clip_norm = 0\.5.*TrainingArguments have 1\.0"):
        trainers.make("Trainer", tmp_path, {}, arguments=wrong, **settings).train()
    with pytest.raises(ValueError, match=r"offload = .*working.* beside optimizers"):
        trainers.make("Trainer", tmp_path, STREAMED, arguments={}, **settings).train()


def test_a_loss_in_parts_beside_one_of_whole_logits_is_refused(tmp_path: Path) -> None:
    smoothed = {"label_smoothing_factor": 0.1}
    trainer = trainers.make("Trainer", tmp_path, {}, arguments=smoothed)
    trainer.chunked_loss = True
    with pytest.raises(ValueError, match="the trainer's label_smoother computes the loss from wh"):
        trainer.train()


def test_arguments_that_a_given_optimizer_does_not_follow_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = data.model()
    optimizer = ot.offload(net, ot.AdamW(lr=1e-3), device="cpu", precision="fp32", clip_norm=0.5)
    settings: dict[str, Any] = dict(model=net, optimizers=(optimizer, None))
    arguments = {"learning_rate": 2e-3, "weight_decay": 0.0}
    trainers.make("Trainer", tmp_path, {}, arguments=arguments, **settings).create_optimizer()
    messages = [record.message for record in caplog.records if "is not used" in record.message]
    assert messages == [
        "TrainingArguments.learning_rate = 0.002 is not used: the given optimizer has 0.001"
    ]
    optimizer.close()


@pytest.mark.slow
def test_a_new_model_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    settings = {"model": None, "model_init": data.model}
    trainer = trainers.make("Trainer", tmp_path, {}, arguments={"max_steps": 2}, **settings)
    trainer.train()
    first, before = trainers.logged(trainer), trainer.optimizer
    trainer.train()
    assert trainers.logged(trainer) == first and len(first) == 2
    assert before.phase.name == "CLOSED"


def test_what_the_arguments_determine_is_not_taken_from_the_options(tmp_path: Path) -> None:
    trainer = trainers.make("Trainer", tmp_path, {"clip_norm": 0.7}, arguments={})
    with pytest.raises(ValueError, match=r"clip_norm = 0\.7 .* 0\.5 by TrainingArguments"):
        trainer.create_optimizer()
    same = ot.OffloadConfig(precision="fp32", clip_norm=0.5, seed=5, device_slots=1)
    trainer.offload = same
    assert trainer.create_optimizer().config == same
    assert not trainer.model.get_input_embeddings().weight.is_meta
    trainer.optimizer = torch.optim.Adafactor(trainer.model.parameters())  # not in the constructor
    with pytest.raises(TypeError, match=r"optimizers = \(Adafactor, …\): there is no rule"):
        trainer.create_optimizer()
    trainer._given_optimizer = None
    trainer.offload = replace(same, clip_norm=None, grad_accum_steps=2)
    trainer.optimizer = None
    with pytest.raises(ValueError, match="grad_accum_steps = 2"):
        trainer.create_optimizer()


@pytest.mark.slow
def test_a_checkpoint_of_other_ranks_is_refused(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    trainers.train("Trainer", tmp_path, {}, arguments=saving)
    at = tmp_path / "checkpoint-3"
    (at / "offload_rank0_of_1.pt").rename(at / "offload_rank0_of_2.pt")
    with pytest.raises(CheckpointError, match=r"no offload_rank0_of_1\.pt.*offload_rank0_of_2"):
        trainers.train("Trainer", tmp_path, {}, arguments=saving, resume=at)


# ---- trainers one after the other

pytest.importorskip("transformers")


def make(folder: Path, offload: dict[str, Any] | None, model: Any, **settings: Any) -> Any:
    settings = {"arguments": {"max_steps": 3}, **settings}
    return trainers.make("Trainer", folder, offload, model=model, **settings)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.cover(1, levels.ALL)
@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("offload", [{}, {"working": "host"}], ids=str)
def test_a_second_trainer_goes_on(
    tmp_path: Path, offload: dict[str, Any], lives: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With new moments, as the plain one; the first one's evaluation does not disturb it."""

    def run(offload: dict[str, Any] | None) -> tuple[list[Any], float]:
        model = data.model()
        first = make(tmp_path, offload, model)
        first.train()
        logged = trainers.logged(first)
        if not lives:
            del first
        second = make(tmp_path, offload, model, eval_dataset=data.Texts())
        second.train()
        if lives:
            first.evaluate(data.Texts())
        second.train()
        return logged + trainers.logged(second), second.evaluate()["eval_loss"]

    expected, expected_loss = run(None)
    logged, loss = run(offload)
    assert logged == expected and loss == pytest.approx(expected_loss, rel=1e-5)
    assert not [record for record in caplog.records if record.name.startswith("offloadtrain")]


@pytest.mark.filterwarnings("ignore")
def test_the_first_trainer_says_that_its_moments_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = data.model()
    first, second = make(tmp_path, {}, model), make(tmp_path, {}, model)
    first.train()
    second.train()
    first.train()
    (record,) = [record for record in caplog.records if record.name.startswith("offloadtrain")]
    assert "the optimizer of this trainer was closed" in record.message
    assert second.optimizer.phase.name == "CLOSED"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("offload", [{}, {"working": "host"}], ids=str)
def test_a_deleted_trainer_is_gone_at_once(tmp_path: Path, offload: dict[str, Any]) -> None:
    """Without a collection of garbage, as the plain one; the model has its weights."""
    model = data.model()
    trainer = make(tmp_path, offload, model)
    trainer.train()
    ledger, gone = trainer.optimizer.ledger, weakref.ref(trainer.optimizer)
    mapped = weakref.ref(next(iter(trainer.optimizer.state.values()))["master"])
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert gone() is None and mapped() is None
    finally:
        gc.enable()
    assert not any(row.bytes for row in ledger.rows() if row.tier == "host")
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert not any(param.isnan().any() for param in model.parameters())
    assert torch.isfinite(model(**{"input_ids": data.Texts()[0]["input_ids"][None]}).logits).all()


# ---- callbacks read the newest weights, on late lanes too

PLACEMENTS: list[dict[str, Any]] = [{}, {"working": "host"}, {"update": "speculative"}]


class Average(transformers.TrainerCallback):  # type: ignore[misc]
    """A moving average of the weights, made after each step; starts after the second one."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            self.average = [param.detach().clone() for param in model.parameters()]
        for mean, param in zip(self.average, model.parameters(), strict=False):
            mean.lerp_(param.detach(), 0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("offload", PLACEMENTS)
def test_a_callback_of_the_trainer_reads_the_newest_weights(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    def averaged(offload: dict[str, Any] | None) -> list[Tensor]:
        average = Average()
        trainers.train("Trainer", tmp_path, offload, callbacks=[average], arguments={})
        return average.average

    expected = averaged(None)
    with on_lanes(SeededLanes(0, late=True)):
        means = averaged(offload)
    assert expected and len(means) == len(expected)
    for value, mean in zip(means, expected, strict=True):
        torch.testing.assert_close(value, mean, rtol=0, atol=2e-6)


class Gradients(transformers.TrainerCallback):  # type: ignore[misc]
    """Logs the norm of the gradients that the optimizer is about to use, and changes some."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        params = list(others["model"].parameters())
        squares = sum(float(param.grad.double().square().sum()) for param in params)
        self.norms.append(round(squares**0.5, 5))
        if state.global_step == 2:
            params[0].grad[3:] = 0.1  # the step uses it, and does not clip it again


@pytest.mark.filterwarnings("ignore")
@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("offload", PLACEMENTS)
def test_a_callback_of_the_trainer_reads_clipped_gradients(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    def trained(offload: dict[str, Any] | None) -> tuple[Any, list[float], list[float]]:
        gradients, arguments = Gradients(), {"max_grad_norm": 0.05}
        trainer = trainers.make(
            "Trainer", tmp_path, offload, callbacks=[gradients], arguments=arguments
        )
        trainer.train()
        sums = [param.detach().double().sum().item() for param in trainer.model.parameters()]
        return trainers.logged(trainer), gradients.norms, sums

    logged, norms, sums = trained(offload)
    assert set(norms) == {0.05}
    expected = trained(None)
    assert (logged, norms) == expected[:2]
    assert sums == pytest.approx(expected[2], rel=1e-4, abs=1e-4)


class Freezes(transformers.TrainerCallback):  # type: ignore[misc]
    """Freezes the embedding for two steps, and trains from the third one on what was frozen when
    the optimizer was made, in an existing group: the Trainer's schedules refuse new ones."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
        step, layer = state.global_step, model.model.layers[0]
        model.model.embed_tokens.requires_grad_(step not in (2, 3))
        layer.mlp.requires_grad_(step >= 5)
        if step == 3:
            params = list(layer.self_attn.requires_grad_(True).parameters())
            others["optimizer"].param_groups[1]["params"] += params


@pytest.mark.filterwarnings("ignore")
@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("offload", PLACEMENTS)
def test_a_callback_of_the_trainer_changes_what_is_trained(
    offload: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = data.model

    def partly_frozen() -> Any:
        model = made()
        model.model.layers[0].self_attn.requires_grad_(False)
        return model

    monkeypatch.setattr(data, "model", partly_frozen)
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 7}
    settings: dict[str, Any] = {"callbacks": [Freezes()], "arguments": saving}
    logged = trainers.train("Trainer", tmp_path, offload, **settings)
    assert logged == trainers.train("Trainer", tmp_path / "plain", None, **settings)
    at = tmp_path / "checkpoint-3"
    assert trainers.train("Trainer", tmp_path, offload, resume=at, **settings) == logged


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("offload", PLACEMENTS)
def test_an_average_of_lightning_reads_the_newest_weights(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    def averaged(offload: dict[str, Any] | None) -> list[Tensor]:
        average = EMAWeightAveraging(decay=0.9)
        runner, module = with_lightning.make(offload, tmp_path, callbacks=[average])
        loader = torch.utils.data.DataLoader(data.Texts(), batch_size=BATCH)
        runner.fit(module, loader)
        assert average._average_model is not None
        return [param.detach() for param in average._average_model.module.parameters()]

    expected = averaged(None)
    with on_lanes(SeededLanes(0, late=True)):
        means = averaged(offload)
    for value, mean in zip(means, expected, strict=True):
        torch.testing.assert_close(value, mean, rtol=0, atol=2e-6)
