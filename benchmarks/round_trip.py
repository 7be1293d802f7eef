"""Load a Hugging Face folder, train no step, export: the weights, bit for bit, as a table.

    python -m benchmarks.round_trip
    python -m benchmarks.round_trip --only llama t5 --cells bf16-split16

A row is an architecture with random weights, a cell the dtype of the folder and the state format of
the engine. A cell passes if the exported folder has the tensors of the first one, under the same
names, in the same dtype and with the same bits, the same configuration, and, read by transformers,
the same outputs. Exit status 1: a cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
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
ELSEWHERE = ("unet", "sd3", "lstm", "encoder", "llama_padded")
"""Not of transformers, or a second row of one."""
KEPT_FP32 = {
    "whisper": ("*embed_positions*",),  # frozen ones have no master: they are what forward reads
}
SHARD = "60KB"


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    from benchmarks.architectures.models import ARCHITECTURES

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    names = [name for name in ARCHITECTURES if name not in ELSEWHERE]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.round_trip")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS, metavar="CELL")
    asked = parser.parse_args(argv)
    print(f"| architecture | {' | '.join(asked.cells)} |\n|---|{'---|' * len(asked.cells)}")
    failed: list[str] = []
    for name in asked.only:
        row = [difference(name, ARCHITECTURES[name], cell) for cell in asked.cells]
        print(
            f"| {name} | {' | '.join(f'**{x}**' if x else 'same bits' for x in row)} |", flush=True
        )
        failed += [name for found in row if found]
    return 1 if failed else 0


def difference(name: str, architecture: Architecture, cell: str) -> str:
    """Describe the first difference after a round trip, "" if there is none."""
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
            return f"a {type(loaded).__name__}"
        ot.save_pretrained(optimizer, second, dtype=dtype, max_shard_size=SHARD)
        optimizer.close()
        return (
            different_weights(first, second)
            or different_configuration(first, second)
            or different_outputs(type(model), architecture, first, second)
        )


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
def different_outputs(made: Any, architecture: Architecture, first: Path, second: Path) -> str:
    batch = architecture.batch(torch.Generator().manual_seed(1))
    found = [outputs(made.from_pretrained(folder), batch) for folder in (first, second)]
    same = found[0].keys() == found[1].keys() and found[0]
    differ = [key for key, x in found[0].items() if not torch.equal(x, found[1][key])]
    return "" if same and not differ else f"outputs: {', '.join(differ) or 'none'}"


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype
    given = {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}
    torch.manual_seed(0)
    return {key: x for key, x in model(**given).items() if isinstance(x, Tensor)}


if __name__ == "__main__":
    sys.exit(main())
