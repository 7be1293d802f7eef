"""What transformers' own tests of the Trainer do, here: the same losses as the plain Trainer with
optimizers of torch, their checkpoints, batches that do not fit, and other precisions."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from benchmarks.frameworks import data, trainers
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.step.proof.recording import Launched
from tests.recording_lanes import RecordingLanes

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("error:.*lr_scheduler.step.*:UserWarning"),
]
STREAMED = {"working": "host"}
Made = tuple[torch.optim.Optimizer, Any]


def but_one_slow(names: Iterable[str]) -> list[Any]:
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


def groups(model: nn.Module, **first: Any) -> list[dict[str, Any]]:
    """Return matrices with hyperparameters of their own, and the rest."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    return [
        {"params": matrices, **first},
        {"params": [param for param in model.parameters() if param.ndim < 2]},
    ]


def warmed(optimizer: torch.optim.Optimizer) -> Made:
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def in_a_cycle(optimizer: torch.optim.Optimizer) -> Made:
    rates = {"max_lr": [1e-3, 2e-3], "total_steps": 6}
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, **rates)


def in_a_row(optimizer: torch.optim.Optimizer) -> Made:
    schedules = torch.optim.lr_scheduler
    first, second = schedules.ConstantLR(optimizer, 0.5), schedules.ExponentialLR(optimizer, 0.7)
    return optimizer, schedules.SequentialLR(optimizer, [first, second], [2])


def trained_before(optimizer: torch.optim.Optimizer) -> Made:
    """Its state goes on."""
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, None


GIVEN: dict[str, Callable[[nn.Module], Made]] = {
    "AdamW": lambda model: warmed(
        torch.optim.AdamW(groups(model, lr=2e-3, weight_decay=0.3), betas=(0.8, 0.9))
    ),
    "AdamW, one cycle": lambda model: in_a_cycle(torch.optim.AdamW(groups(model))),
    "Adam": lambda model: in_a_row(torch.optim.Adam(groups(model, eps=1e-4), weight_decay=0.1)),
    "decoupled Adam": lambda model: (
        torch.optim.Adam(model.parameters(), weight_decay=0.5, decoupled_weight_decay=True),
        None,
    ),
    "SGD": lambda model: (torch.optim.SGD(groups(model, lr=torch.tensor(0.1)), lr=0.05), None),
    "SGD, momentum": lambda model: warmed(
        torch.optim.SGD(groups(model, momentum=0.0), lr=0.1, momentum=0.9, nesterov=False)
    ),
    "Adagrad": lambda model: (
        torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1),
        None,
    ),
    "AdamW, trained before": lambda model: trained_before(
        torch.optim.AdamW(model.parameters(), lr=1e-3)
    ),
    "SGD, trained before": lambda model: trained_before(
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.5)
    ),
}


def rates(trainer: Any) -> list[float]:
    entries = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    return [round(entry["learning_rate"], 7) for entry in entries]


@pytest.mark.parametrize("name", but_one_slow(GIVEN))
def test_an_optimizer_of_torch_is_translated_with_groups_and_schedule(
    tmp_path: Path, name: str
) -> None:
    logs = []
    for offload in (STREAMED, None):
        model = data.model()
        optimizer, schedule = GIVEN[name](model)
        trainer = trainers.make(
            "Trainer",
            tmp_path,
            offload,
            arguments={"lr_scheduler_type": "cosine"},
            model=model,
            optimizers=(optimizer, schedule),
        )
        trainer.train()
        logs.append((trainers.logged(trainer), rates(trainer)))
        if offload is not None:
            assert isinstance(trainer.optimizer, ot.OffloadOptimizer) and not optimizer.state
            assert optimizer.param_groups is trainer.optimizer.param_groups
    assert logs[0] == logs[1] and len(logs[0][0]) == 6


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 2e-3, "betas": (0.8, 0.9)}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_torch_is_translated(tmp_path: Path, name: str) -> None:
    logs = []
    for offload in (STREAMED, None):
        named = {"optimizer_cls_and_kwargs": CLASSES[name]}
        trainer = trainers.make("Trainer", tmp_path, offload, arguments={}, **named)
        trainer.train()
        logs.append((trainers.logged(trainer), rates(trainer)))
    assert logs[0] == logs[1]


def refused() -> Iterator[Any]:
    def given(kind: Any, **options: Any) -> Callable[[nn.Module], dict[str, Any]]:
        return lambda model: {"optimizers": (kind(model.parameters(), **options), None)}

    def of_class(kind: Any, **options: Any) -> Callable[[nn.Module], dict[str, Any]]:
        return lambda model: {"optimizer_cls_and_kwargs": (kind, options)}

    optim = torch.optim
    yield given(optim.Adafactor), TypeError, r"optimizers = \(Adafactor, …\): there is no rule"
    yield given(optim.AdamW, amsgrad=True), ValueError, "AdamW, ….* with amsgrad = True"
    yield given(optim.SGD, lr=0.1, maximize=True), ValueError, "with maximize = True"
    yield of_class(optim.RMSprop), TypeError, r"optimizer_cls_and_kwargs = \(RMSprop, …\)"
    yield of_class(optim.Adam, amsgrad=True), ValueError, "with amsgrad = True, which Adam is not"


@pytest.mark.parametrize(("settings", "error", "message"), list(refused()))
def test_what_has_no_rule_is_refused_in_the_constructor(
    tmp_path: Path, settings: Any, error: Any, message: str
) -> None:
    model = data.model()
    with pytest.raises(error, match=message):
        trainers.make("Trainer", tmp_path, {}, arguments={}, model=model, **settings(model))


@pytest.mark.parametrize("optim", but_one_slow(["sgd", "lion_32bit", "adamw_torch", "adagrad"]))
def test_a_checkpoint_of_the_plain_trainer_goes_on(tmp_path: Path, optim: str) -> None:
    if optim == "lion_32bit":
        pytest.importorskip("bitsandbytes")
    arguments = {"optim": optim, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2}
    once = trainers.train("Trainer", tmp_path, None, arguments=arguments)
    at = tmp_path / "checkpoint-3"
    assert trainers.train("Trainer", tmp_path, STREAMED, arguments=arguments, resume=at) == once


@pytest.mark.slow
def test_a_checkpoint_of_a_plain_optimizer_with_momentum_goes_on(tmp_path: Path) -> None:
    named = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})}
    arguments = {"save_strategy": "steps", "save_steps": 3}
    once = trainers.train("Trainer", tmp_path, None, arguments=arguments, **named)
    at = tmp_path / "checkpoint-3"
    again = trainers.train("Trainer", tmp_path, STREAMED, arguments=arguments, resume=at, **named)
    assert again == once
    with pytest.raises(ot.OffloadTrainError, match="needs a step and exp_avg, exp"):
        trainers.train("Trainer", tmp_path, STREAMED, arguments=arguments, resume=at)


FULL = "CUDA out of memory. Tried to allocate 1 GiB"


class Cramped(nn.Module):
    """A model that runs out of memory with a large batch, from one call on: in forward, in
    backward, or in backward where the engine launches a copy."""

    def __init__(self, place: str, turn: int) -> None:
        super().__init__()
        self.model, self.place, self.turn = data.model(), place, turn
        self.config, self.attempts, self.lanes = self.model.config, [], None

    def forward(self, **batch: Any) -> Any:
        self.attempts.append(batch["input_ids"].shape[0])
        output = self.model(**batch)
        if self.attempts[-1] > 3 and len(self.attempts) >= self.turn:
            self.failed = weakref.ref(output["logits"])
            if self.place == "forward":
                raise RuntimeError(FULL)
            output["loss"].register_hook(self.run_out)
        return output

    def run_out(self, grad: torch.Tensor) -> None:
        if self.place == "backward" or self.lanes is None:
            raise RuntimeError(FULL)
        self.lanes.launch = self.fail

    def fail(self, *operation: Any) -> None:
        del self.lanes.launch
        raise RuntimeError(FULL)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [{}, STREAMED, {"activation": "offload"}], ids=str)
@pytest.mark.parametrize(
    ("place", "turn"), [("forward", 1), ("forward", 4), ("backward", 4), ("launch", 3)]
)
def test_a_batch_that_fits_is_found(
    tmp_path: Path, offload: dict[str, Any], place: str, turn: int
) -> None:
    """The failed attempt has taken a step, and stands in the next one's microbatches."""
    arguments = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "save_strategy": "no",
        "remove_unused_columns": False,
    }
    logs = []
    for options in (offload, None):
        model = Cramped(place, turn)
        trainer = trainers.make("Trainer", tmp_path, options, model=model, arguments=arguments)
        if options is not None:
            model.lanes = trainer.create_optimizer().lanes
        trainer.train()
        logs.append((trainers.logged(trainer), model.attempts))
        gc.collect()
        assert model.failed() is None  # memory of the failed attempt was given back
    assert logs[0] == logs[1] and {*logs[0][1]} == {4, 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16_full_eval", "bf16_full_eval"])
def test_an_evaluation_in_another_precision_has_that_of_training(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    named: dict[str, Any] = {"eval_dataset": data.Texts()}
    plain = trainers.make("Trainer", tmp_path, None, arguments={}, **named)
    trainer = trainers.make("Trainer", tmp_path, STREAMED, arguments={name: True}, **named)
    assert f"{name} = True: evaluation has the weights and the precision of tr" in caplog.text
    for each in (trainer, plain):
        each.train()
    assert trainers.logged(trainer) == trainers.logged(plain)
    evaluated = trainer.evaluate()["eval_loss"]
    assert evaluated == pytest.approx(plain.evaluate()["eval_loss"], 1e-6)
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}


def test_clipping_by_the_trainer_is_the_engines_norm(tmp_path: Path) -> None:
    """The launches are those of a loop with `clip_norm`: gradients are measured once, where they
    come from backward, and no lane passes over them again."""

    def launches(lanes: RecordingLanes) -> Counter[tuple[str, str]]:
        launched = (entry for entry in lanes.program if isinstance(entry, Launched))
        return Counter((entry.lane.value, entry.name) for entry in launched)

    by_trainer, by_loop = (RecordingLanes(SequentialLanes()) for _ in range(2))
    with on_lanes(by_trainer):
        trainer = trainers.make("Trainer", tmp_path, {}, arguments={"max_grad_norm": 0.5})
        trainer.train()
    model, texts = data.model(), data.Texts(masked=True)
    with on_lanes(by_loop):
        optimizer = ot.offload(
            model,
            ot.AdamW(lr=1e-3),
            params=trainer._groups(model),
            device="cpu",
            precision="fp32",
            clip_norm=0.5,
        )
    for step in range(6):
        rows = [texts[2 * step + row] for row in range(2)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        optimizer.backward(model(**batch).loss)
        optimizer.step()
    assert launches(by_trainer) == launches(by_loop)
    lanes = {lane for lane, name in launches(by_trainer) if name.startswith("norm ")}
    assert lanes == {"compute"}
