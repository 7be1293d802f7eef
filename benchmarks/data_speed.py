"""`python -m benchmarks.data_speed`: `offloadtrain prepare` against `datasets.map`.

The same lines of JSONL, the same tokenizer, the same number of processes with one encoding thread
each, by turns: a ratio is of two runs of one round. `datasets` reads the lines into Arrow before
(not measured); its `map(batched=True)` writes token numbers, as `prepare` does, and nothing is
reused. `prepare` with one process takes its turn too, and both turn the same text into bytes, of
JSONL and of a text file: there reading is most of the work. CPU seconds, of the process and its
workers, are compared as well: other processes disturb them less. The text is Python's standard
library; a BPE tokenizer of 8192 tokens is trained on it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from offloadtrain.data.prepare import prepare
from offloadtrain.data.source import find_files
from offloadtrain.hardware.telemetry import probe

VOCABULARY = 8192
LINES_PER_DOCUMENT = 40
LINES, TEXT = "lines.jsonl", "text.txt"
BYTES_ROUNDS = 3
"""Of the runs that make bytes of text, which take a small part of the time, in each round."""


def write_lines(path: Path, megabytes: int) -> None:
    """Write documents of some lines each, as often as it takes; each is unlike the others."""
    written, turn = 0, 0
    with path.open("w") as out:
        while written < megabytes << 20:
            for file in find_files("python-stdlib", excluded=path):
                lines = Path(file.path).read_text("utf-8", "ignore").splitlines(keepends=True)
                for at in range(0, len(lines), LINES_PER_DOCUMENT):
                    text = "".join(lines[at : at + LINES_PER_DOCUMENT])
                    line = json.dumps({"text": f"# {turn} {file.name}\n{text}"}) + "\n"
                    written += out.write(line)
            turn += 1


def train_tokenizer(folder: Path, texts: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with texts.open() as lines:
        some = (json.loads(line)["text"] for line, _ in zip(lines, range(3000), strict=False))
        made.train_from_iterator(some, trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(
        folder
    )


def of_datasets(folder: Path, jobs: int) -> Callable[[], None]:
    """Return one run of `map` over the lines, which are in Arrow already."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    lines = datasets.load_dataset(
        "json", data_files=str(folder / LINES), split="train", cache_dir=str(folder / "c")
    )
    words = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        found = words([text + words.eos_token for text in batch["text"]])
        return {"input_ids": found["input_ids"]}

    def run() -> None:
        out = folder / "mapped"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        lines.map(
            encode,
            batched=True,
            num_proc=jobs,
            remove_columns=["text"],
            load_from_cache_file=False,
            cache_file_name=str(out / "tokens.arrow"),
        )

    return run


def of_ours(folder: Path, jobs: int, source: str = LINES, words: str = "") -> Callable[[], None]:
    def run() -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)
        prepare(
            folder / source,
            folder / "out",
            tokenizer=words or str(folder / "tokenizer"),
            val_fraction=0.0,
            jobs=jobs,
        )

    return run


def write_text(lines: Path, path: Path) -> None:
    with lines.open() as source, path.open("w") as out:
        out.writelines(json.loads(line)["text"] for line in source)


def measured(megabytes: int, jobs: int, rounds: int) -> dict[str, Any]:
    """Time both in every round, each first in every other one."""
    with TemporaryDirectory() as named:
        folder = Path(named)
        write_lines(folder / LINES, megabytes)
        write_text(folder / LINES, folder / TEXT)
        train_tokenizer(folder / "tokenizer", folder / LINES)
        runs = {"datasets": of_datasets(folder, jobs), "offloadtrain": of_ours(folder, jobs)}
        runs["one process"] = of_ours(folder, 1)
        for source in (LINES, TEXT):
            for count in (1, jobs):
                runs[f"bytes of {source}, jobs {count}"] = of_ours(folder, count, source, "bytes")
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        cpu: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds):
            for name in list(runs)[:: -1 if number % 2 else 1]:
                began, before = time.perf_counter(), cpu_seconds()
                for _ in range(BYTES_ROUNDS if name.startswith("bytes") else 1):
                    runs[name]()
                seconds[name].append(round(time.perf_counter() - began, 3))
                cpu[name].append(round(cpu_seconds() - before, 3))
        ratios, cpu_ratios = ratios_of(seconds), ratios_of(cpu)
        of_one = ratios_of(seconds, "one process")
        of_bytes = {
            source: ratios_of(
                seconds, f"bytes of {source}, jobs 1", f"bytes of {source}, jobs {jobs}"
            )
            for source in (LINES, TEXT)
        }
        size = (folder / LINES).stat().st_size
    return {
        "machine": asdict(probe()),
        "jobs": jobs,
        "bytes": size,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "speed_ratio": statistics.median(ratios),
        "speed_ratios": ratios,
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratios": cpu_ratios,
        "one_process_ratio": statistics.median(of_one),
        "one_process_ratios": of_one,
        "one_process_ratios_of_bytes": of_bytes,
    }


def cpu_seconds() -> float:
    """Of this process and of the ones that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def ratios_of(
    seconds: dict[str, list[float]], other: str = "datasets", ours: str = "offloadtrain"
) -> list[float]:
    pairs = zip(seconds[other], seconds[ours], strict=True)
    return [round(theirs / ours, 3) for theirs, ours in pairs]


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.data_speed", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the result, JSON")
    chosen = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as `prepare` sets it in its workers
    found = measured(chosen.megabytes, chosen.jobs, chosen.rounds)
    rate = found["bytes"] / 2**20 / statistics.median(found["seconds"]["offloadtrain"])
    print(
        f"{found['machine']['cpu']}, {found['jobs']} processes: {rate:.1f} MiB/s, "
        f"{found['speed_ratio']:.2f} x the speed of datasets.map "
        f"({', '.join(f'{ratio:.2f}' for ratio in found['speed_ratios'])}), "
        f"{found['cpu_ratio']:.2f} x in CPU time "
        f"({', '.join(f'{ratio:.2f}' for ratio in found['cpu_ratios'])}), "
        f"{found['one_process_ratio']:.2f} x the speed of one process; bytes: "
        + ", ".join(
            f"{source} {statistics.median(ratios):.2f} x"
            for source, ratios in found["one_process_ratios_of_bytes"].items()
        ),
        file=sys.stderr,
    )
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
