"""What the device of a 13B job waits for the host's updates, planned: state on the host alone, and
the share of it that the plan keeps on the device.

    python -m benchmarks.exposure

An H100 80 GB whose kernels have the memory of one NUMA node; clipping, mode "exact", recompute, one
microbatch. No GPU was measured: these are plans with the rates of the machine file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from offloadtrain.config.job import Config, load
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import settled
from offloadtrain.plan.times import compute_seconds
from offloadtrain.step.layout.state_tiers import device_share
from offloadtrain.step.layout.tiers import Tier

JOB = Path(__file__).parent.parent / "examples" / "gpt_13b_32gb.toml"
STATES = ("fp32", "split16", "int8")
TOKENS = (4096, 8192)
NODE_GBPS = 220.0
"""0.72 of eight channels of DDR5-4800, to which a GPU's kernels are bound; the machine file has the
400 GB/s of both sockets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Shares of a step in which the device waits.

    Attributes:
        host: with all of the state on the host.
        auto: with `share` of it on the device, as the plan chooses.
        bound: of the least wait once the device is full: the bytes that Adam moves on the host over
            its rate, less the forward that hides them.
    """

    state: str
    tokens: int
    host: float
    auto: float
    share: float
    bound: float

    @property
    def line(self) -> str:
        """A row of the table in docs/plan.md."""
        shares = (f"{100 * one:.0f} %" for one in (self.host, self.auto, self.share, self.bound))
        return f"| {self.state} | {self.tokens:,} | {' | '.join(shares)} |"


def machine() -> Machine:
    """Return the H100 with the memory of one NUMA node."""
    return replace(find("h100")[1], dram_gbps=NODE_GBPS, numa_nodes=1)


def job(state: str, tokens: int, state_on: str) -> Config:
    """Return the 13B job with one microbatch of so many tokens."""
    sequences = tokens // load(JOB).data.seq_len
    return load(
        JOB,
        [
            f"offload.state={state}",
            f"offload.state_on={state_on}",
            f"train.micro_batch={sequences}",
            f"train.global_batch_tokens={tokens}",
        ],
    )


def planned(state: str, tokens: int, state_on: str) -> Plan:
    """Plan the job with what its step is fastest with."""
    settled_job = settled(job(state, tokens, state_on), "h100", machine(), 1)
    return make(settled_job, "h100", machine())


def exposed(plan: Plan) -> float:
    return plan.prediction.exposed / plan.prediction.seconds


def bound(state: str, tokens: int) -> float:
    """See `Cell.bound`."""
    full = make(job(state, tokens, "auto"), "h100", machine())
    left = sum(
        bucket.shard_numel
        * bucket.format.traffic_per_param(bucket.moments, bucket.weight_bytes, bucket.weight_bytes)
        for bucket in full.placed.spec.buckets_on(Tier.HOST)
    )
    waits = max(0.0, left / (NODE_GBPS * 1e9) - compute_seconds(full.placed, full.machine).forward)
    return waits / (full.prediction.busy_s["compute"] + waits)


def cell(state: str, tokens: int) -> Cell:
    on_host, auto = planned(state, tokens, "host"), planned(state, tokens, "auto")
    return Cell(
        state=state,
        tokens=tokens,
        host=exposed(on_host),
        auto=exposed(auto),
        share=device_share(auto.placed.spec),
        bound=bound(state, tokens),
    )


def main() -> None:
    """Print the table."""
    print("| state | tokens | host only | auto | of the state on the GPU | bound |")
    print("|---|---|---|---|---|---|")
    for state in STATES:
        for tokens in TOKENS:
            print(cell(state, tokens).line)


if __name__ == "__main__":
    main()
