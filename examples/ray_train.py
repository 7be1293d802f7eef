"""Ray Train: the loop of two_gpus.py on the workers of a Ray cluster, one rank per GPU.

    python examples/ray_train.py
    ray job submit --working-dir examples -- \\
        python ray_train.py --workers 8 --folder /shared/llama-3.1-8b

Ray starts the processes, gives each its device and sets up torch.distributed; from there the engine
shards the state over the ranks, as under torchrun. Without a GPU the workers run on the CPU. A
folder of weights has to lie where every host reads it. Needs: pip install 'ray[train]'
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import two_gpus
from ray import train
from ray.train.torch import TorchTrainer, get_device


def on_worker(options: dict[str, Any]) -> None:
    """Train as one rank."""
    two_gpus.train(get_device(), options["folder"], tell)


def tell(step: int, loss: float) -> None:
    """Print as under torchrun, and report to Ray, which waits for the report of every rank."""
    two_gpus.show(step, loss)
    train.report({"step": step, "loss": loss})


def main() -> None:
    """Start the workers, and wait for their end; raises what a worker raised."""
    parser = argparse.ArgumentParser(description="offloadtrain under Ray Train")
    parser.add_argument("--workers", type=int, default=2, help="ranks; one GPU each")
    parser.add_argument("--folder", help="of Hugging Face; a toy without one")
    parser.add_argument("--storage", help="where Ray keeps its records; ~/ray_results without")
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    TorchTrainer(
        on_worker,
        train_loop_config={"folder": given.folder},
        scaling_config=train.ScalingConfig(num_workers=given.workers, use_gpu=gpu),
        run_config=train.RunConfig(storage_path=given.storage),
    ).fit()


if __name__ == "__main__":
    main()
