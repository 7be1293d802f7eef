"""The golden losses: what they are made of, how they are kept, and how they are made anew.

    python -m tests.golden.golden

rewrites the files. Do that only where a change of the numbers is wanted, and say why.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from offloadtrain.events import schema
from tests.train.small_job import events_of, run, small_job

FOLDER = Path(__file__).parent
PRECISIONS = ("bf16", "fp32")
JOB = (
    *("model.d_model=64", "model.num_heads=4", "model.max_seq_len=64", "model.dropout=0.0"),
    *("data.seq_len=64", "optim.lr=4e-3", "train.steps=50", "train.eval_every=0"),
    *("train.checkpoint_every=0", "train.micro_batch=4", "train.grad_accum_steps=2"),
)


def golden_file(precision: str) -> Path:
    return FOLDER / f"debug_cpu_losses{'' if precision == 'bf16' else f'_{precision}'}.txt"


def train_losses(precision: str) -> list[float]:
    """Train the debug model on sums, on one thread, and return the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        job = small_job(Path(folder), f"offload.precision={precision}", "device.threads=1", *JOB)
        assert run(job, Path(folder) / "run") == 0
        return [step.loss for step in events_of(Path(folder) / "run", schema.Step)]


def machine_class() -> str:
    """Return all that the bits of a CPU run depend on besides the program."""
    cpu = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        cpu[key.strip()] = value.strip()
    chip = "/".join(cpu.get(key, "-") for key in ("vendor_id", "cpu family", "model"))
    return (
        f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} "
        f"{chip} {torch.get_num_threads()} thread"
    )


def write(precision: str, losses: list[float]) -> None:
    lines = [f"# {machine_class()}", *(f"{n} {loss!r}" for n, loss in enumerate(losses, start=1))]
    golden_file(precision).write_text("\n".join(lines) + "\n")


def read(precision: str) -> tuple[str, list[float]]:
    """Return the class of the machine that made the file, and its losses."""
    header, *lines = golden_file(precision).read_text().splitlines()
    return header.removeprefix("# "), [float(line.split()[1]) for line in lines]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in PRECISIONS:
        write(each, train_losses(each))
