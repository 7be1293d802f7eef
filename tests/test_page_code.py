"""The Python of the pages is run, block by block in its order, on toys.

A page's blocks share their names, as a reader's script would. What they take as given (`model`,
`batches`, …) is made here, and folders that only a reader has are moved. README, loop, extending
and fine_tune_8b are run by tests of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.transformer import Transformer
from tests.distributed.conftest import Run, pools, ranks  # noqa: F401  # fixtures
from tests.parallel.models import KINDS, Llama, columns_and_rows, gpt, token_loss
from tests.test_readme import ROOT
from tests.tui.recordings import plain, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),  # without a GPU
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),  # of PEFT's and Lightning's
]

ELSEWHERE = {"README.md", "loop.md", "extending.md", "fine_tune_8b.md"}
"""tests/test_readme.py, tests/engine/test_extending.py, tests/test_guide.py."""

Names = dict[str, Any]


def python_of(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(code: str, given: Names, **moved: str) -> None:
    """Run a block; `moved`: what it says → what is meant here."""
    for said, meant in moved.items():
        assert said in code, f"the page does not say {said} any more"
        code = code.replace(said, meant)
    exec(compile(code, "page", "exec"), given)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Accelerate's objects share their state in the process."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def llama() -> Any:
    from benchmarks.frameworks import data

    return data.model()


def trained(model: nn.Module, optimizer: ot.OffloadOptimizer) -> None:
    """A step changes the weights; the optimizer is closed."""
    before = {name: x.clone() for name, x in optimizer.master_weights()}
    tokens = torch.arange(16)[None]
    optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    assert any(not torch.equal(x, before[name]) for name, x in optimizer.master_weights())
    optimizer.close()


def checkpoints(blocks: list[str]) -> None:
    run(blocks[0], {"torch": torch, "model": llama()})


def disk(blocks: list[str]) -> None:
    Path("scratch").mkdir()
    given: Names = {"ot": ot, "model": llama()}
    run(blocks[0], given, **{"/nvme/scratch": "scratch", 'state_on="disk"': _DISK})
    assert given["optimizer"].config.state.tier == "disk"
    trained(given["model"], given["optimizer"])


_DISK = 'state_on="disk", device="cpu"'


def experts(blocks: list[str]) -> None:
    shape = ModelShape(vocab_size=16, num_layers=2, d_model=16, num_heads=2, num_experts=4)
    given: Names = {"ot": ot, "model": Transformer(shape)}
    run(blocks[0], given, **{"params=groups": 'params=groups, device="cpu"'})
    optimizer = given["optimizer"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(param.ndim == 3 for param in optimizer.param_groups[1]["params"])
    layers = [block for block in optimizer._blocks if "blocks" in block.name]
    of_experts = sum(param.numel() for param in given["experts"]) // len(layers)
    for block in layers:
        assert len(block.buckets) == 2 and block.buckets[1].spec.params == of_experts
    optimizer.close()


def frameworks(blocks: list[str]) -> None:
    import accelerate
    import lightning
    import transformers

    from benchmarks.frameworks import data
    from benchmarks.frameworks.trainers import ARGUMENTS

    trainer, accelerated, strategy = blocks
    args = transformers.TrainingArguments("out", **ARGUMENTS, bf16=True)
    given: Names = {"model": data.model(), "args": args, "data": data.Texts()}
    run(trainer, given)
    given["trainer"].train()
    assert [entry for entry in given["trainer"].state.log_history if "loss" in entry]

    given = {"ot": ot, "accelerator": accelerate.Accelerator(cpu=True), "model": llama()}
    run(accelerated, given)
    trained(given["model"], given["optimizer"])

    quiet = dict(max_steps=2, logger=False, enable_checkpointing=False, accelerator="cpu")
    quiet |= dict(enable_progress_bar=False, enable_model_summary=False, default_root_dir=".")
    given = {"Trainer": partial(lightning.Trainer, **quiet)}
    run(strategy, given)
    given["trainer"].fit(_module(lightning), torch.utils.data.DataLoader(data.Texts()))
    assert given["trainer"].global_step == 2


def _module(lightning: Any) -> Any:
    """As the page says: `configure_optimizers` asks the strategy."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return self.trainer.strategy.offload(ot.AdamW(lr=3e-4))

    return Module()


def huggingface(blocks: list[str]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from examples.toy import make_llama

    loading, adapters, chunked = blocks
    given: Names = {}
    on_cpu = {"clip_norm=1.0": 'clip_norm=1.0, device="cpu"'}
    make_llama("path/or/name")
    run(loading, given, **on_cpu)
    AutoModelForCausalLM.from_pretrained("out")
    given["model"] = llama()
    run(chunked, given)
    tokens = torch.arange(8)[None]
    assert given["model"].train()(input_ids=tokens, labels=tokens).logits is None

    Path("path/config.json").parent.mkdir(exist_ok=True)
    make_llama("path")
    run(adapters, given, **{'working="host"': 'working="host", device="cpu"'})
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("path"), "adapters")
    AutoModelForCausalLM.from_pretrained("merged")


def monitor(blocks: list[str]) -> None:
    write(Path("runs/run").absolute(), plain())
    run(blocks[0], {})


def optimizers(blocks: list[str]) -> None:
    lion, muon, lamb = blocks
    for block, first in ((lion, ot.Lion), (muon, ot.Muon), (lamb, ot.LAMB)):
        given: Names = {"ot": ot, "model": llama()}
        run(block, given, **{"clip_norm=1.0": 'clip_norm=1.0, device="cpu"'})
        assert any(isinstance(rule, first) for rule in given["optimizer"]._rules)
        trained(given["model"], given["optimizer"])


def plan(blocks: list[str]) -> None:
    given: Names = {"torch": torch, "make_model": llama}
    run(blocks[0], given)


PAGES: dict[str, Callable[[list[str]], None]] = {
    "checkpoints.md": checkpoints,
    "disk.md": disk,
    "experts.md": experts,
    "frameworks.md": frameworks,
    "huggingface.md": huggingface,
    "monitor.md": monitor,
    "optimizers.md": optimizers,
    "plan.md": plan,
}


def test_all_python_of_the_pages_is_run() -> None:
    with_code = {page.name for page in (ROOT / "docs").glob("*.md") if python_of(page.name)}
    assert with_code | {"README.md"} == PAGES.keys() | ELSEWHERE | {"ranks.md"}


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page(page: str) -> None:
    PAGES[page](python_of(page))


# ---- several ranks: the page's 8 are 4 here, without GPUs ---------------------------------------


def of_ranks(code: str, given: Names) -> None:
    """Run a block with the ranks that there are."""
    meshes = (("(2, 4)", "(2, 2)"), ("(4, 8)", "(2, 2)"), ("(2, 2, 4)", "(2, 1, 2)"))
    for said, meant in (('"cuda"', '"cpu"'), *meshes, ("microbatches=8", _EIGHT)):
        code = code.replace(said, meant)
    run(code, given)


_EIGHT = 'microbatches=4, device="cpu"'


def pipelines(flushed: str, overlapped: str) -> list[int]:
    """Both kinds of pipelines, from the page's names; the number of losses of the last step."""
    from torch.distributed.device_mesh import init_device_mesh

    given: Names = {"ot": ot, "init_device_mesh": init_device_mesh, "loss": token_loss}
    found = []
    for code in (flushed, overlapped):
        replica = dist.get_rank() % 2
        batches = [KINDS["gpt"].batch(step, replica) for step in range(3)]
        given |= {"model": gpt(), "tokens": batches[0][0], "batches": batches}
        of_ranks(code.replace("tokens[:4]", "tokens[:2]"), given)
        assert bool(torch.isfinite(given["losses"]).all())
        found.append(given["losses"].numel())
        given["pipeline"].close()
    return found


def pipelines_of_transformers(code: str) -> int:
    """The number of losses of the last step. The page's first line makes the model."""
    from torch.distributed.device_mesh import init_device_mesh

    making, rest = code.split("\n", 1)
    assert making.startswith("model = AutoModelForCausalLM")
    tokens = torch.arange(64).view(8, 8) % 16
    given: Names = {"ot": ot, "model": llama(), "tokens": tokens, "batches": [tokens] * 2}
    given["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    of_ranks(rest.replace("tokens[:4]", "tokens[:2]"), given)
    assert bool(torch.isfinite(given["losses"]).all())
    found: int = given["losses"].numel()
    given["pipeline"].close()
    return found


def tensor_parallel(code: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    given: Names = {"ot": ot, "init_device_mesh": init_device_mesh, "model": Llama()}
    given |= {"parallelize_module": parallelize_module, "plan": columns_and_rows()}
    of_ranks(code.replace("mesh=mesh)", 'mesh=mesh, device="cpu")'), given)
    optimizer = given["optimizer"]
    optimizer.backward(given["model"](torch.arange(8)[None]).float().square().mean())
    optimizer.step()
    told: bool = optimizer.last_step.grad_norm > 0
    optimizer.close()
    return told


def tensor_parallel_of_transformers(code: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    given: Names = {"ot": ot, "init_device_mesh": init_device_mesh, "model": llama()}
    styles = ("ColwiseParallel", "RowwiseParallel", "parallelize_module")
    given |= {name: getattr(parallel, name) for name in styles}
    of_ranks(code.replace("mesh=mesh)", 'mesh=mesh, device="cpu")'), given)
    trained(given["model"], given["optimizer"])
    return True


def staged_parts(code: str) -> int:
    """The number of losses of a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    tokens = torch.arange(64).view(8, 8) % 16
    given: Names = {"ot": ot, "init_device_mesh": init_device_mesh, "model": Llama(4)}
    given |= {"parallelize_module": parallelize_module, "plan": columns_and_rows()}
    given |= {"tokens": tokens, "loss": token_loss}
    of_ranks(code.replace("tokens[:4]", "tokens[:2]"), given)
    pipeline = given["pipeline"]
    losses = pipeline.run(tokens, target=tokens)
    pipeline.step()
    assert bool(torch.isfinite(losses).all())
    pipeline.close()
    return losses.numel()


def expert_parallel(code: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh

    shape = ModelShape(vocab_size=16, num_layers=2, d_model=16, num_heads=2, num_experts=4)
    given: Names = {"ot": ot, "init_device_mesh": init_device_mesh, "model": Transformer(shape)}
    of_ranks(code.replace("mesh=mesh)\n", 'mesh=mesh, device="cpu")\n'), given)
    optimizer, tokens = given["optimizer"], torch.arange(8)[None]
    optimizer.backward(given["model"](tokens, tokens))
    optimizer.step()
    held = given["model"].blocks[0].mlp.experts.up.to_local()
    told: bool = optimizer.last_step.grad_norm > 0 and held.shape[0] == 2
    optimizer.close()
    return told


def sharded(code: str) -> bool:
    """The group is there already: the page's first line would make it."""
    first, second = code.splitlines()
    assert first.startswith("torch.distributed.init_process_group")
    given: Names = {"ot": ot, "model": llama()}
    run(second.replace("zero_stage=2)", 'zero_stage=2, device="cpu")'), given)
    trained(given["model"], given["optimizer"])
    return True


def hybrid(code: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh

    given: Names = {"ot": ot, "init_device_mesh": init_device_mesh, "model": llama()}
    of_ranks(code.replace("zero_stage=3)", 'zero_stage=3, device="cpu")'), given)
    trained(given["model"], given["optimizer"])
    return True


def test_the_python_of_ranks(ranks: Run) -> None:  # noqa: F811
    copies, alone, flushed, of_decoders, overlapped, *divided = python_of("ranks.md")
    parts, of_transformers, of_any_plan, of_staged_parts, of_experts = divided
    assert ranks(4, hybrid, copies) == [True] * 4
    assert ranks(4, sharded, alone) == [True] * 4
    assert ranks(4, pipelines, flushed, overlapped) == [[4, 4]] * 4
    assert ranks(4, pipelines_of_transformers, of_decoders) == [4] * 4
    assert ranks(4, tensor_parallel, parts) == [True] * 4
    for code in (of_transformers, of_any_plan):
        assert ranks(4, tensor_parallel_of_transformers, code) == [True] * 4
    assert ranks(4, staged_parts, of_staged_parts) == [4] * 4
    assert ranks(4, expert_parallel, of_experts) == [True] * 4
