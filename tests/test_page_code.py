"""The Python of the pages is run, block by block in its order, on toys.

A page's blocks share their names, as a reader's script would. The names that a page expects
(`model`, `batches`, …) are made here, and folders that only a reader has are replaced.
docs/extending.md has a test of its own: tests/engine/test_extending.py.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.transformer import Transformer
from tests.distributed.conftest import Run, pools, ranks  # noqa: F401  # fixtures
from tests.numerics.models import Chain, batches, loss_of
from tests.test_readme import GUIDE_MODEL, ROOT
from tests.tui.recordings import plain, write

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),  # without a GPU
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),  # of PEFT's and Lightning's
]

Names = dict[str, Any]
ON_CPU = {"clip_norm=1.0": 'clip_norm=1.0, device="cpu"'}


def python_of(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(code: str, names: Names, **replaced: str) -> None:
    """Run a block; `replaced`: text of the page → text to run."""
    for text, replacement in replaced.items():
        assert text in code, f"the page does not contain {text} any more"
        code = code.replace(text, replacement)
    exec(compile(code, "page", "exec"), names)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def reset_accelerate() -> Iterator[None]:
    """Accelerate's objects share their state in the process."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def llama() -> Any:
    from benchmarks.frameworks import data

    return data.model()


def check_a_step(model: nn.Module, optimizer: ot.OffloadOptimizer) -> None:
    """A step changes the weights; close the optimizer."""
    before = {name: x.clone() for name, x in optimizer.master_weights()}
    tokens = torch.arange(16)[None]
    optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    assert any(not torch.equal(x, before[name]) for name, x in optimizer.master_weights())
    optimizer.close()


# ---- the loop of README and docs/loop.md


@pytest.mark.parametrize("page", ["README.md", "docs/loop.md"])
def test_the_first_python_block_trains(page: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
    losses: list[float] = []

    def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
        loss = F.mse_loss(net(batch).float(), batch.sum(1, keepdim=True))
        losses.append(loss.item())
        return loss

    batches = [torch.randn(32, 4)] * 200
    run(python_of(page)[0], {"model": model, "batches": batches, "loss_of": loss_of})
    assert losses[-1] < 0.9 * losses[0]


def test_groups_of_options_equal_their_flat_names() -> None:
    code, expression = python_of("docs/loop.md")[1].rsplit("config.replace", 1)
    names: Names = {"ot": ot, "model": nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))}
    run(code, names)
    flat = re.search(r"the same as: (.*)", code)
    assert flat is not None
    assert names["optimizer"].config == eval(f"ot.OffloadConfig({flat[1]})", names)
    call, _, printed = expression.partition("#")
    assert eval(f"config.replace{call}", names) == eval(printed.strip())
    names["optimizer"].close()


@pytest.mark.parametrize("working", ["device", "host"])
def test_weights_changed_in_the_loop_become_the_masters(working: str) -> None:
    change, reset = python_of("docs/loop.md")[2].rsplit("optimizer.reset", 1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    options: Names = {"device": "cpu", "precision": "fp32", "working": working}
    optimizer = ot.offload(model, ot.AdamW(lr=0.1), **options)
    names = {"optimizer": optimizer, "torch": torch, "model": model}
    for _ in range(2):
        optimizer.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        before = dict(optimizer.master_weights())
        run(f"{change}optimizer.reset{reset}", names)
        for name, master in optimizer.master_weights():
            assert torch.equal(master, before[name].clamp(-0.1, 0.1))
        assert all((state["exp_avg"] == 0).all() for state in optimizer.state.values())


def test_what_is_trained_changes() -> None:
    change = python_of("docs/loop.md")[3]
    model = Chain(4)
    model.layers[3].requires_grad_(False)
    optimizer = ot.offload(model, ot.AdamW(lr=0.1), device="cpu", precision="fp32")
    for trained in (model.head, model.layers[3]):
        before = {name: param.clone() for name, param in trained.named_parameters()}
        for tokens in batches(optimizer.grad_accum_steps):
            optimizer.backward(loss_of(model, tokens))
        optimizer.step()
        for name, param in trained.named_parameters():
            assert not torch.equal(param, before[name]), name
        if trained is model.head:
            run(change, {"optimizer": optimizer, "model": model})
    assert optimizer.grad_accum_steps == 4 and len(optimizer.param_groups) == 2
    optimizer.close()


def test_averages_and_weights_leave_the_loop() -> None:
    average, send = python_of("docs/loop.md")[4:6]
    model, another = llama(), llama()
    optimizer = ot.offload(model, ot.AdamW(lr=0.1), device="cpu", working="host")
    received: dict[str, Tensor] = {}
    names = {
        "ot": ot,
        "torch": torch,
        "model": model,
        "another_model": another,
        "optimizer": optimizer,
        "batches": torch.arange(24).view(3, 2, 4),
        "loss_of": lambda net, batch: net(input_ids=batch, labels=batch).loss,
        "engine": SimpleNamespace(load_weight=lambda k, v: received.update({k: v.clone()})),
    }
    run(average, names)
    averages = {name: value.clone() for name, value in names["ema"].weights()}
    loaded = type(model).from_pretrained("averaged")
    for name, param in another.named_parameters():
        assert torch.equal(param, averages[name]), name
        assert torch.equal(loaded.get_parameter(name), averages[name].bfloat16()), name
    assert torch.load("adam.pt")["averages"][0]["num_updates"] == 3
    run(send, names)
    for name, master in optimizer.master_weights():
        assert torch.equal(received[name], master.bfloat16()), name
    optimizer.close()


# ---- the other pages


def checkpoints(blocks: list[str]) -> None:
    run(blocks[0], {"torch": torch, "model": llama()})


def disk(blocks: list[str]) -> None:
    Path("scratch").mkdir()
    names: Names = {"ot": ot, "model": llama()}
    on_cpu = {'state_on="disk"': 'state_on="disk", device="cpu"'}
    run(blocks[0], names, **{"/nvme/scratch": "scratch"}, **on_cpu)
    assert names["optimizer"].config.state.tier == "disk"
    check_a_step(names["model"], names["optimizer"])


def experts(blocks: list[str]) -> None:
    shape = ModelShape(vocab_size=16, num_layers=2, d_model=16, num_heads=2, num_experts=4)
    names: Names = {"ot": ot, "model": Transformer(shape)}
    run(blocks[0], names, **{"params=groups": 'params=groups, device="cpu"'})
    optimizer = names["optimizer"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(param.ndim == 3 for param in optimizer.param_groups[1]["params"])
    layers = [block for block in optimizer._blocks if "blocks" in block.name]
    of_experts = sum(param.numel() for param in names["experts"]) // len(layers)
    for block in layers:
        assert len(block.buckets) == 2 and block.buckets[1].spec.params == of_experts
    optimizer.close()


def fine_tune_8b(blocks: list[str]) -> None:
    """With a tiny model in the folder of the 8B, and a row that nobody answers, which is left
    out."""
    from safetensors.torch import load_file

    from examples.toy import make_llama

    (chats,) = re.findall(
        r"```json\n(.*?)```", (ROOT / "docs/fine_tune_8b.md").read_text(), re.DOTALL
    )
    unanswered = '{"messages": [{"role": "user", "content": "Where?"}]}\n'
    Path("chats.jsonl").write_text(unanswered + chats * 40)
    make_llama(GUIDE_MODEL)
    tune, ask = blocks
    names: Names = {}
    run(tune, names)
    history = names["trainer"].state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(names["chats"]) == 80 and len(losses) == 20 and losses[-1] < losses[0]
    assert names["optimizer"].config.state.format == "int8"
    masters = dict(names["optimizer"].master_weights())
    for name, weight in load_file("tuned/model.safetensors").items():
        assert torch.equal(weight, masters[name].bfloat16()), name
    names["optimizer"].close()
    run(ask, {})


def frameworks(blocks: list[str]) -> None:
    import accelerate
    import lightning
    import transformers

    from benchmarks.frameworks import data
    from benchmarks.frameworks.trainers import ARGUMENTS

    trainer, accelerated, strategy = blocks
    args = transformers.TrainingArguments("out", **ARGUMENTS, bf16=True)
    names: Names = {"model": data.model(), "args": args, "data": data.Texts()}
    run(trainer, names)
    names["trainer"].train()
    assert [entry for entry in names["trainer"].state.log_history if "loss" in entry]

    names = {"ot": ot, "accelerator": accelerate.Accelerator(cpu=True), "model": llama()}
    run(accelerated, names)
    check_a_step(names["model"], names["optimizer"])

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return self.trainer.strategy.offload(ot.AdamW(lr=3e-4))

    quiet = dict(max_steps=2, logger=False, enable_checkpointing=False, accelerator="cpu")
    quiet |= dict(enable_progress_bar=False, enable_model_summary=False, default_root_dir=".")
    names = {"Trainer": partial(lightning.Trainer, **quiet)}
    run(strategy, names)
    names["trainer"].fit(Module(), torch.utils.data.DataLoader(data.Texts()))
    assert names["trainer"].global_step == 2


def huggingface(blocks: list[str]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from examples.toy import make_llama

    loading, adapters, chunked = blocks
    names: Names = {}
    make_llama("path/or/name")
    run(loading, names, **ON_CPU)
    AutoModelForCausalLM.from_pretrained("out")
    names["model"] = llama()
    run(chunked, names)
    tokens = torch.arange(8)[None]
    assert names["model"].train()(input_ids=tokens, labels=tokens).logits is None
    make_llama("path")
    run(adapters, names, **{'working="host"': 'working="host", device="cpu"'})
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("path"), "adapters")
    AutoModelForCausalLM.from_pretrained("merged")


def monitor(blocks: list[str]) -> None:
    write(Path("runs/run").absolute(), plain())
    run(blocks[0], {})


def optimizers(blocks: list[str]) -> None:
    for block, rule in zip(blocks, (ot.Lion, ot.Muon, ot.LAMB), strict=True):
        names: Names = {"ot": ot, "model": llama()}
        run(block, names, **ON_CPU)
        assert any(isinstance(each, rule) for each in names["optimizer"]._rules)
        check_a_step(names["model"], names["optimizer"])


def plan(blocks: list[str]) -> None:
    run(blocks[0], {"torch": torch, "make_model": llama})


def troubleshooting(blocks: list[str]) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    names: Names = {"ot": ot, "model": model, "batches": [torch.ones(2, 8)] * 2}
    names["loss_of"] = lambda model, batch: model(batch).square().mean()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run(blocks[0], names)
    assert "compute use of 3 reads what h2d 3 writes" in printed.getvalue().splitlines()


PAGES: dict[str, Callable[[list[str]], None]] = {
    "checkpoints.md": checkpoints,
    "disk.md": disk,
    "experts.md": experts,
    "fine_tune_8b.md": fine_tune_8b,
    "frameworks.md": frameworks,
    "huggingface.md": huggingface,
    "monitor.md": monitor,
    "optimizers.md": optimizers,
    "plan.md": plan,
    "troubleshooting.md": troubleshooting,
}


def test_every_page_with_python_is_run() -> None:
    with_code = {
        page.name for page in (ROOT / "docs").glob("*.md") if python_of(f"docs/{page.name}")
    }
    assert with_code == PAGES.keys() | {"loop.md", "extending.md", "ranks.md"}


@pytest.mark.slow
@pytest.mark.usefixtures("reset_accelerate")
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page(page: str) -> None:
    PAGES[page](python_of(f"docs/{page}"))


# ---- several ranks: the 8 of the page are 4 here, without GPUs


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Skips the modules that other stages hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = input_ids if self.embedding is None else self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def with_experts() -> Transformer:
    shape = ModelShape(vocab_size=16, num_layers=2, d_model=16, num_heads=2, num_experts=4)
    return Transformer(shape)


def on_a_rank(code: str, model_of: Callable[[], nn.Module]) -> bool:
    """Run a block of docs/ranks.md on one of four ranks, and a step after it. True if its losses
    are finite, or its step has a gradient norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    meshes = (("(2, 4)", "(2, 2)"), ("(4, 8)", "(2, 2)"), ("(2, 2, 4)", "(2, 1, 2)"))
    ours = (("microbatches=8", 'microbatches=4, device="cpu"'), ("tokens[:4]", "tokens[:2]"))
    for text, replacement in (('"cuda"', '"cpu"'), *meshes, *ours):
        code = code.replace(text, replacement)
    code = re.sub(r"(ot\.offload\(.*)\)", r'\1, device="cpu")', code)
    # The process group is there already, and so is the model.
    code = re.sub(r"^(torch\.distributed\.init|model = Auto).*\n", "", code)
    torch.manual_seed(0)
    tokens = torch.arange(64).view(8, 8) % 16
    model = model_of()
    is_labelled = "labels=" in code
    names: Names = {
        **vars(parallel),
        "ot": ot,
        "init_device_mesh": init_device_mesh,
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")),
        "model": model,
        "plan": {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()},
        "loss": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        "tokens": tokens,
        "batches": [tokens] * 2 if is_labelled else [(tokens, tokens)] * 2,
    }
    run(code, names)
    if (pipeline := names.get("pipeline")) is not None:
        if (losses := names.get("losses")) is None:
            losses = pipeline.run(tokens, target=tokens)
            pipeline.step()
        pipeline.close()
        return bool(torch.isfinite(losses).all()) and losses.numel() == 4
    optimizer, row = names["optimizer"], tokens[dist.get_rank() // 2][None]
    if isinstance(model, Transformer):
        optimizer.backward(model(row, row))
    else:
        outputs = model(input_ids=row)
        optimizer.backward(getattr(outputs, "logits", outputs).float().square().mean())
    optimizer.step()
    norm: float = optimizer.last_step.grad_norm
    optimizer.close()
    return norm > 0


MODELS_OF_RANKS = (
    *(llama, llama),  # plain ZeRO; hybrid sharding
    *(Decoder, llama, Decoder),  # pipelines: flushed, of transformers, overlapped
    *(Decoder, llama, llama, Decoder),  # tensor parallel, with stages at last
    with_experts,
)


@pytest.mark.slow
def test_the_python_of_ranks(ranks: Run) -> None:  # noqa: F811
    for code, model_of in zip(python_of("docs/ranks.md"), MODELS_OF_RANKS, strict=True):
        assert ranks(4, on_a_rank, code, model_of) == [True] * 4, code
