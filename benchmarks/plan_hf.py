"""Processor time and memory of `offloadtrain plan --hf` for an 8B of Llama 3.1's shape.

    python -m benchmarks.plan_hf

It fits one machine as it is, lacks host memory on the second, and on the third fits with fewer
tokens only, or not at all: the more is searched, the more is traced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

MACHINES = (("h100",), ("rtx4090",), *(("rtx4090", "--host-memory", f"{n}GiB") for n in (64, 32)))


def measured(folder: Path, machine: tuple[str, ...]) -> tuple[int, float, float]:
    """Return the exit code, the processor's seconds, and GiB at the peak."""
    command = ("-m", "offloadtrain", "plan", "--hf", str(folder), "--machine", *machine)
    started = subprocess.Popen((sys.executable, *command), stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(started.pid, 0)
    code = started.returncode = os.waitstatus_to_exitcode(status)
    return code, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024**2


def main() -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_8B))
        for machine in MACHINES:
            code, seconds, gib = measured(Path(folder), machine)
            print(f"{' '.join(machine):34} exit {code} {seconds:6.1f} s {gib:6.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
