"""Compares a job with other trainers that offload: same machine, model and tokens per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from offloadtrain.config.batch_split import shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.units import format_bytes, format_count
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.baselines.peers import PEERS, Peer, Work, checked
from offloadtrain.plan.costs.microbatch import Trace
from offloadtrain.plan.placement import Placement, place
from offloadtrain.plan.plan import PROCESS, PROCESS_BYTES, Plan
from offloadtrain.plan.run_cost import Accuracy, accuracy_of_plans
from offloadtrain.plan.times import compute_seconds
from offloadtrain.plan.tracing.tracer import activations

OURS = "offloadtrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One system in the comparison.

    Attributes:
        device: owner → peak bytes of each device.
        host: owner → bytes of one host with all its ranks.
        micro_batch: sequences of one rank in a microbatch.
        seconds: duration of a step.
        problem: why it does not fit; empty if it does.
        master: description of its master weights.
        clips: it can clip the norm of all gradients.
        lower_bound: no throughput of the system on this GPU is known; measured throughputs exceeded
            the models of these systems more often than not.
    """

    system: str
    device: Mapping[str, float]
    host: Mapping[str, float]
    micro_batch: int
    seconds: float
    tokens_per_s: float
    problem: str
    master: str
    clips: bool
    lower_bound: bool = False


def compare(plan: Plan, trace: Trace | None = None) -> list[Row]:
    """Return the plan's own row, then one per peer, each with the largest microbatch that fits, up
    to the plan's.

    Raises:
        ConfigError: see `check`.
    """
    check(plan.job, plan.machine)
    return [_ours(plan), *(_row(name, peer, plan, trace) for name, peer in PEERS.items())]


def check(job: Config, machine: Machine) -> None:
    """Check that all systems can train a job on a machine; call it before planning.

    Raises:
        ConfigError: a system cannot.
    """
    if machine.on_cpu or job.offload.precision == "fp32":
        raise ConfigError("--compare is for 16-bit training on a GPU: choose a --machine with one")
    if job.num_trained < job.num_params:
        raise ConfigError("--compare is for training all weights: leave out model.lora")
    if job.optim.name not in ("adam", "adamw"):
        raise ConfigError(f"--compare is for Adam: optim.name = {job.optim.name!r}")


def accuracy(system: str) -> Accuracy:
    """Return the errors over all known throughputs of a system."""
    if system == OURS:
        return accuracy_of_plans()[0]
    return Accuracy.of([cell.error for cell in checked(system)])


def table(rows: Sequence[Row], plan: Plan) -> str:
    """Return the rows as a text table, with each predictor's errors on known throughputs."""
    head = (
        f"{'system':24} {'fits':4} {'GPU':>9} {'host':>9} {'microbatch':>10} {'tokens/s':>8}  "
        f"{'clips':5} {'median, worst error':20} master weights"
    )
    room = f"{format_bytes(plan.device_room)} of a GPU, {format_bytes(plan.host_room)} of a host"
    lines = [f"Beside others, of {room}:", head, *map(_line, rows)]
    if any(row.lower_bound for row in rows):
        lines.append("  ≥: a lower bound, nothing was calibrated on this GPU")
    lines += [f"  {row.system}: {row.problem}" for row in rows if row.problem]
    lines += ["", "Bytes by owner, of each GPU; of each host:"]
    lines += [f"  {row.system}: {_owners(row.device)}; {_owners(row.host)}" for row in rows]
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain values in bytes and seconds."""
    return [
        asdict(row) | {"fits": not row.problem, "accuracy": asdict(accuracy(row.system))}
        for row in rows
    ]


def _ours(plan: Plan) -> Row:
    moment = max(plan.host_peaks, key=lambda name: plan.host_peaks[name])
    host = {owner: size * plan.local_ranks for owner, size in plan.host.items()}
    if moment == "init":  # building the model takes more than a step's block inputs
        host["while the model is built"] = plan.host_peaks["init"] - sum(host.values())
    return Row(
        system=OURS,
        device=plan.device,
        host=host,
        micro_batch=plan.placed.config.train.micro_batch,
        seconds=plan.prediction.seconds,
        tokens_per_s=plan.prediction.tokens_per_s,
        problem=" ".join(plan.problems),
        master=_MASTERS.get(plan.job.offload.state.format, plan.job.offload.state.format),
        clips=True,
    )


_MASTERS = {"fp32": "fp32", "split16": "fp32, as two halves", "int8": "24 bits"}


def _row(name: str, peer: Peer, plan: Plan, trace: Trace | None) -> Row:
    """Halve the microbatch, as long as that is exact, until the step fits."""
    job = plan.job
    sequences = job.train.micro_batch * job.train.grad_accum_steps
    while True:
        placed = _placed(job, plan, trace)
        row = _of_work(name, peer, plan, placed)
        half, rest = divmod(placed.config.train.micro_batch, 2)
        if rest or not row.problem:
            return row
        train = replace(job.train, micro_batch=half, grad_accum_steps=sequences // half)
        job = replace(job, train=train)


def _placed(job: Config, plan: Plan, trace: Trace | None) -> Placement:
    """Return the placement of the job as peers run it: weights on the device, layers recomputed
    unless the job keeps their activations, and one copy of the state."""
    keeps = not job.offload.activations.recomputes
    offload = job.offload.replace(
        working="device",
        resident_blocks=None,
        state="fp32",
        state_on="host",
        activation="keep" if keeps else "recompute",
        recompute_blocks=None if keeps else job.offload.activations.recompute_blocks,
    )
    ranks = plan.placed.spec.replicas
    alike = replace(job, offload=offload, ranks=replace(job.ranks, shard=0))
    return place(shared(alike, ranks), ranks, trace=trace)


def _work(placed: Placement, machine: Machine) -> Work:
    blocks = [
        sum(b.params for b in block.buckets) for block in placed.spec.blocks if block.repeated
    ]
    params = placed.config.num_trained
    return Work(
        shape=placed.config.model,
        params=params,
        largest_block=max(blocks, default=0),
        outside=params - sum(blocks),
        activation_bytes=activations(placed, on_cpu=False).total,
        compute=compute_seconds(placed, machine),
        micro_steps=placed.config.train.grad_accum_steps,
        ranks=placed.spec.ranks,
        clips=placed.config.offload.clip_norm is not None,
    )


def _of_work(name: str, peer: Peer, plan: Plan, placed: Placement) -> Row:
    work = _work(placed, plan.machine)
    device = {owner: size for owner, size in peer.device(work).items() if size}
    process = float(PROCESS_BYTES["cuda"])
    each = {owner: size for owner, size in peer.host(work).items() if size} | {PROCESS: process}
    host = {owner: size * plan.local_ranks for owner, size in each.items()}
    seconds = peer.seconds(work, plan.machine)
    return Row(
        system=name,
        device=device,
        host=host,
        micro_batch=placed.config.train.micro_batch,
        seconds=seconds,
        tokens_per_s=plan.job.batch_tokens / seconds,
        problem=" ".join(_problems(peer, work, plan, device, host)),
        master=peer.master,
        clips=peer.clips,
        lower_bound=all(cell.gpu != plan.machine.gpu for cell in checked(name)),
    )


def _problems(
    peer: Peer,
    work: Work,
    plan: Plan,
    device: Mapping[str, float],
    host: Mapping[str, float],
) -> Iterator[str]:
    if peer.most_ranks is not None and work.ranks > peer.most_ranks:
        yield f"it trains on {peer.most_ranks} GPU."
    rooms = ("a GPU", device, plan.device_room), ("a host", host, plan.host_room)
    for where, owners, room in rooms:
        if (used := sum(owners.values())) > room:
            yield f"{where} needs {format_bytes(used)} and has {format_bytes(room)}."


def _line(row: Row) -> str:
    at_least = "≥ " if row.lower_bound else ""
    rate = "-" if row.problem else at_least + format_count(row.tokens_per_s)
    device, host = (format_bytes(sum(owners.values())) for owners in (row.device, row.host))
    known = accuracy(row.system)
    errors = f"{100 * known.median:.0f} %, {100 * known.worst:+.0f} % of {known.cells}"
    return (
        f"{row.system:24} {'no' if row.problem else 'yes':4} {device:>9} {host:>9} "
        f"{row.micro_batch:10} {rate:>8}  {'yes' if row.clips else 'no':5} {errors:20} {row.master}"
    )


def _owners(owners: Mapping[str, float]) -> str:
    largest = sorted(owners.items(), key=lambda item: -item[1])
    return ", ".join(f"{owner} {format_bytes(size)}" for owner, size in largest if size)
