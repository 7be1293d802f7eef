"""The axes of the ranks: replicas, stages of a pipeline, parts of matrices, and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.division import Division
from offloadtrain.optim import AnyRule
from offloadtrain.parallel.checks import check_parts, check_same_weights
from offloadtrain.parallel.norm import DividedNorm
from offloadtrain.parallel.unused_experts import UnusedExperts, check_skips
from offloadtrain.runtime.process_group import Group, Ranks
from offloadtrain.runtime.tensor_parts import EXPERTS

__all__ = ["AXES", "DeviceMesh", "Mesh"]

AXES = ("pp", "dp", "tp")
"""Stages of a pipeline, replicas, and parts of matrices. The last axis varies fastest, so ranks
that exchange most are neighbours."""

EXPERT_AXES = ("dp", EXPERTS)
"""Ranks with the same experts, and ranks with different ones. The latter are neighbours, because
they exchange tokens in each layer. Together they share the state of undivided parameters."""

BESIDE_EXPERTS = ("pp", *EXPERT_AXES, "tp")
"""All axes that may be combined with experts: pipeline stages, and parts of attention, whose ranks
have the same tokens and the same experts."""

HYBRID_AXES = ("dp_replicate", "dp_shard")
"""Axes that replace "dp": copies of the complete state, and the ranks that share one copy; see
[Note: Copies] in `runtime.process_group`."""


@dataclass(frozen=True, kw_only=True)
class Mesh(Division):
    """This process's position on each axis, and the part of the model that it trains.

    Attributes:
        stages_group: group through which stages exchange tensors; None for a single stage.
        tensor: axis of `parts`, for `parallelize_module`; None for a single part.
        experts: mesh with all axes, if experts are divided; None if each rank holds all experts.
    """

    skipping: UnusedExperts = field(default_factory=UnusedExperts)
    stages_group: Group | None = None
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    def check(
        self, model: nn.Module, rule: AnyRule, config: OffloadConfig, *, is_stage: bool
    ) -> None:
        check_parts(model, rule, self.parts, self.replicas, is_stage=is_stage)
        check_skips(model, config, rule, whole=not is_stage)

    def check_same_weights(self, names: Sequence[str], checksums: Sequence[float]) -> None:
        check_same_weights(names, checksums, self.parts)

    @classmethod
    def of(cls, mesh: DeviceMesh, device: torch.device) -> Mesh:
        """Create the groups of a mesh's axes; a collective of all its processes.

        Raises:
            ValueError: the mesh has an unknown axis, or a wrong combination of axes, or does not
                contain this process.
        """
        names = mesh.mesh_dim_names or ()
        if unknown := [
            name for name in names or (None,) if name not in (*AXES, EXPERTS, *HYBRID_AXES)
        ]:
            raise ValueError(
                f"mesh has an axis {unknown[0]!r}: name its axes 'dp' (replicas, which share the "
                "state; or 'dp_replicate' and 'dp_shard'), 'ep' (experts), 'pp' (stages of a "
                "pipeline) and 'tp' (parts of matrices), as in init_device_mesh('cuda', (2, 4), "
                "mesh_dim_names=('dp', 'tp'))"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"rank {mesh.get_rank()} is not in the mesh of {mesh.size()} ranks: start as many "
                "processes, or call this on the ranks of the mesh alone"
            )
        groups = {name: mesh.get_group(name) for name in names if mesh[name].size() > 1}
        stages, host = groups.get("pp"), torch.device("cpu")
        replicas = _with_experts(mesh, device) or _hybrid(mesh, device)
        replicas = replicas or Ranks(groups.get("dp"), device)
        parts = Ranks(groups.get("tp"), device)
        tensor = None if parts.is_single else mesh["tp"]
        experts = mesh if EXPERTS in groups else None
        return cls(
            replicas=replicas,
            stages=Ranks(stages, host),
            stages_group=stages,
            parts=parts,
            tensor=tensor,
            experts=experts,
        )

    @classmethod
    def make(
        cls,
        stages: int,
        device: torch.device,
        parts: int = 1,
        shards: int = 0,
        experts: int = 1,
    ) -> Mesh:
        """Create a mesh of all ranks with so many pipeline stages and parts of each matrix; a
        collective.

        Args:
            shards: ranks that share a copy of the state, a divisor of the replicas; 0: all
                replicas.
            experts: ranks of a stage and part that hold different experts; excludes copies
                (`shards`).
        """
        if experts > 1:
            same = Ranks().world_size // (stages * experts * parts)
            sizes = (stages, same, experts, parts)
            made = init_device_mesh(device.type, sizes, mesh_dim_names=BESIDE_EXPERTS)
            return cls.of(made, device)
        replicas = Ranks().world_size // (stages * parts)
        names: tuple[str, ...] = AXES
        shape: tuple[int, ...] = (stages, replicas, parts)
        if shards not in (0, replicas):
            names, shape = ("pp", *HYBRID_AXES, "tp"), (stages, replicas // shards, shards, parts)
        return cls.of(init_device_mesh(device.type, shape, mesh_dim_names=names), device)

    @property
    def is_plain(self) -> bool:
        """True if all ranks hold the complete model and share one copy of its state."""
        is_undivided = self.stages.is_single and self.tensor is None and self.experts is None
        return is_undivided and self.replicas.copies.is_single


def division_of(mesh: DeviceMesh | Division, device: torch.device) -> Division:
    """Return the division of a model by the axes of `offload(mesh=…)`.

    Args:
        mesh: a device mesh, or the default division of a model that contains DTensors.

    Raises:
        ValueError: as in `Mesh.of`.
    """
    if not isinstance(mesh, Division):
        axes = Mesh.of(mesh, device)
    else:
        axes = mesh if isinstance(mesh, Mesh) else Mesh(replicas=mesh.replicas)
    return replace(axes, norm=DividedNorm(axes.stages, axes.parts))


def check_expert_axes(names: Sequence[str]) -> None:
    """Raise ValueError for mesh axes that cannot be combined with experts."""
    ordered = [name for name in BESIDE_EXPERTS if name in names]
    if EXPERTS not in names or list(names) != ordered:
        raise ValueError(
            f"mesh has the axes {', '.join(map(repr, names)) or 'None'}: experts take 'ep' (ranks "
            "that hold different ones), before it 'dp' (ranks with the same ones; its size may be "
            "1) and before that 'pp' (stages of a pipeline), behind it 'tp' (parts of matrices), "
            "and no others, as in "
            "init_device_mesh('cuda', (2, 4), mesh_dim_names=('dp', 'ep'))"
        )


def _with_experts(mesh: DeviceMesh, device: torch.device) -> Ranks | None:
    """Create the groups of expert parallelism; None if the mesh has no axis of experts.

    Raises:
        ValueError: it has axes other than those of `BESIDE_EXPERTS`.
    """
    names = mesh.mesh_dim_names or ()
    if EXPERTS not in names:
        return None
    check_expert_axes(names)
    same = mesh["dp"].get_group() if "dp" in names else None
    if mesh[EXPERTS].size() == 1:
        return Ranks(same, device)
    of_stage = mesh[EXPERT_AXES] if "dp" in names else mesh[EXPERTS]
    return Ranks.with_experts(of_stage.mesh.flatten().tolist(), same, device)


def _hybrid(mesh: DeviceMesh, device: torch.device) -> Ranks | None:
    """Create the groups of hybrid sharding; None if the mesh has neither of its axes.

    Raises:
        ValueError: it has only one of the axes, or also "dp", or a single shard.
    """
    names = mesh.mesh_dim_names or ()
    if not set(names) & set(HYBRID_AXES):
        return None
    if "dp" in names or tuple(name for name in names if name in HYBRID_AXES) != HYBRID_AXES:
        raise ValueError(
            f"mesh has the axes {', '.join(map(repr, names))}: hybrid sharding takes "
            "'dp_replicate' and behind it 'dp_shard', in the place of 'dp'"
        )
    across, within = (mesh[name] for name in HYBRID_AXES)
    if within.size() == 1:
        raise ValueError(
            "mesh has a 'dp_shard' of size 1: every rank would hold all the state. Share it among "
            "the ranks of a host at least, or name the axis 'dp'"
        )
    if across.size() == 1:
        return Ranks(within.get_group(), device)
    everyone = mesh[HYBRID_AXES].mesh.flatten().tolist()
    return Ranks.hybrid(within.get_group(), across.get_group(), everyone, device)
