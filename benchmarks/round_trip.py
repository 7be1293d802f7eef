"""Load a Hugging Face folder, train no step, export: the weights, bit for bit, as a table.

    python -m benchmarks.round_trip
    python -m benchmarks.round_trip --only llama t5 --cells bf16-split16

A row is an architecture with random weights, a cell the dtype of the folder and the state format of
the engine. A cell passes if the exported folder has the tensors of the first one, under the same
names, in the same dtype and with the same bits, the same configuration, and, read by transformers
in this process and in eval mode, the same outputs to the bit. The last column names these. Exit
status 1: a cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import offloadtrain as ot

if TYPE_CHECKING:
    from benchmarks.architectures.models import Architecture

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CELLS = ("fp32-fp32", "fp32-split16", "bf16-fp32", "bf16-split16")
KEPT_FP32 = {
    # Frozen ones have no master: they are what forward reads.
    "whisper": ("*embed_positions*",),
    "pegasus": ("*embed_positions*",),
}
NOT_IN_BF16 = dict.fromkeys(
    ("deberta", "xlnet"),
    "the class makes parameters in fp32 whatever the model's dtype; an export in bf16 rounds them",
) | {"fnet": "torch has no Fourier transform of bf16 numbers"}
"""Architectures without the cells of bf16 folders, and why."""
SHARD = "60KB"


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    architectures = of_transformers()
    names = list(architectures)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.round_trip")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS, metavar="CELL")
    asked = parser.parse_args(argv)
    columns = [*asked.cells, "outputs"]
    print(f"| architecture | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    failed: list[str] = []
    for name in asked.only:
        cells = cells_of(name)
        row = {x: round_trip(name, architectures[name], x) for x in asked.cells if x in cells}
        shown = [_shown(row[x]) if x in row else "-" for x in asked.cells]
        named = " ".join(next(iter(row.values())).outputs) if row else ""
        print(f"| {name} | {' | '.join(shown)} | {named} |", flush=True)
        failed += [name for one in row.values() if one.difference]
    for name in asked.only:
        if name in NOT_IN_BF16:
            print(f"{name}: {NOT_IN_BF16[name]}.")
    return 1 if failed else 0


def cells_of(name: str) -> tuple[str, ...]:
    """Return the cells that a row has."""
    return tuple(x for x in CELLS if not (name in NOT_IN_BF16 and x.startswith("bf16")))


def _shown(found: RoundTrip) -> str:
    return f"**{found.difference}**" if found.difference else "same bits"


def of_transformers() -> dict[str, Architecture]:
    """Return a row for each class of transformers."""
    from benchmarks.architectures.models import ARCHITECTURES, DIFFUSION

    elsewhere = {*DIFFUSION, "lstm", "encoder", "llama_padded"}
    return {name: one for name, one in ARCHITECTURES.items() if name not in elsewhere}


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """The first difference, "" if there is none, and the names of the outputs compared."""

    difference: str
    outputs: tuple[str, ...] = ()


def round_trip(name: str, architecture: Architecture, cell: str) -> RoundTrip:
    """Load what transformers saved, train no step, export, compare."""
    dtype, state = cell.split("-")
    torch.manual_seed(0)
    model: Any = architecture.build()
    with tempfile.TemporaryDirectory() as folder:
        made, first, second = (Path(folder, name) for name in ("made", "first", "second"))
        model.save_pretrained(made)
        # As a published folder is: transformers keeps some tensors in fp32 when it loads.
        read = type(model).from_pretrained(made, dtype=DTYPES[dtype])
        read.save_pretrained(first, max_shard_size=SHARD)
        loaded, optimizer = ot.from_pretrained(
            first, device="cpu", state=state, keep_fp32=KEPT_FP32.get(name, ())
        )
        if type(loaded) is not type(model):
            return RoundTrip(f"a {type(loaded).__name__}")
        ot.save_pretrained(optimizer, second, dtype=dtype, max_shard_size=SHARD)
        optimizer.close()
        written = different_weights(first, second) or different_configuration(first, second)
        return RoundTrip(written) if written else compared(type(model), architecture, first, second)


def different_weights(first: Path, second: Path) -> str:
    one, other = tensors(first), tensors(second)
    if one.keys() != other.keys():
        return f"names: {', '.join(sorted(one.keys() ^ other.keys()))}"
    for name, value in one.items():
        if value.dtype != other[name].dtype or not torch.equal(value, other[name]):
            return f"{name} {value.dtype}, {other[name].dtype}"
    return ""


def tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def different_configuration(first: Path, second: Path) -> str:
    one, other = (json.loads((x / "config.json").read_text()) for x in (first, second))
    differ = [key for key in {*one, *other} if one.get(key) != other.get(key)]
    return f"config: {', '.join(differ)}" if differ else ""


@torch.no_grad()
def compared(made: Any, architecture: Architecture, first: Path, second: Path) -> RoundTrip:
    """Compare what the models of both folders compute, bit for bit."""
    batch = architecture.batch(torch.Generator().manual_seed(1))
    one, other = (outputs(read_aligned(made, folder), batch) for folder in (first, second))
    if one.keys() != other.keys():
        return RoundTrip(f"outputs: {', '.join(one.keys() ^ other.keys())}")
    differ = [key for key, value in one.items() if not torch.equal(value, other[key])]
    if differ or not one:
        return RoundTrip(f"outputs: {', '.join(differ) or 'none'}")
    return RoundTrip("", tuple(one))


def read_aligned(made: Any, folder: Path) -> nn.Module:
    """Read a folder's model into memory of torch's own. Left as views of the file's pages, equal
    weights lie at other offsets in other files, and torch's products have other last bits."""
    model: nn.Module = made.from_pretrained(folder)
    for param in model.parameters():
        param.data = param.data.clone()
    return model


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype
    given = {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}
    torch.manual_seed(0)
    return {key: x for key, x in model(**given).items() if isinstance(x, Tensor)}


if __name__ == "__main__":
    sys.exit(main())
