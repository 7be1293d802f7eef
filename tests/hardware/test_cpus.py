"""Which CPUs the kernels get, on machines made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offloadtrain.cli.commands.jobs import find_job
from offloadtrain.config import job as jobs
from offloadtrain.hardware.cgroup import cpu_quota, folders
from offloadtrain.hardware.cpus import cache_bytes, plan
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.train.build import _threads
from offloadtrain.train.run_folder import ResumedSettings

GPUS = {"0000:3b:00.0": 0, "0000:5e:00.0": 0, "0000:af:00.0": 1, "0000:d8:00.0": 1}


def machine(root: Path, nodes: int, cores: int, threads: int) -> Path:
    """A sysfs of `nodes` packages of `cores`; sibling threads are numbered after all first ones."""
    first = nodes * cores
    for cpu in range(first * threads):
        core = cpu % first
        write(root / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id", core // cores)
        write(root / f"devices/system/cpu/cpu{cpu}/topology/core_id", core % cores)
    for node in range(nodes):
        ranges = [
            (first * t + node * cores, first * t + node * cores + cores - 1) for t in range(threads)
        ]
        text = ",".join(f"{lo}-{hi}" for lo, hi in ranges)
        write(root / f"devices/system/node/node{node}/cpulist", text)
    for gpu, node in GPUS.items():
        write(root / f"bus/pci/devices/{gpu}/numa_node", node if node < nodes else -1)
    return root


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def test_caches_of_all_chiplets_count_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only of CPUs that this process may use, and of the last level."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert cache_bytes(tmp_path) == 0
    for cpu in range(6):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/cache"
        chiplet = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
        for index, level, size, shared in ((0, 1, "32K", cpu), (3, 3, "98304K", chiplet)):
            write(folder / f"index{index}/level", level)
            write(folder / f"index{index}/size", size)
            write(folder / f"index{index}/shared_cpu_list", shared)
    assert cache_bytes(tmp_path) == 2 * 96 << 20


def test_one_rank_has_a_thread_per_physical_core_but_one(tmp_path: Path) -> None:
    """Of its GPU's node, if the GPU has one; fewer under a quota."""
    single, halves = machine(tmp_path / "1", 1, 8, 2), machine(tmp_path / "2", 2, 4, 2)
    bare, gpu = machine(tmp_path / "bare", 0, 0, 1), "0000:3b:00.0"
    for sysfs, cores, options, threads, cpus, why in (
        (single, 16, {}, 7, (), "8 of 8 physical cores, one left to the launching thread"),
        (single, 1, {}, 1, (), "1 of 1"),
        (single, 2, {}, 2, (), "2 of 2"),
        (single, 3, {}, 2, (), "3 of 3"),
        (
            *(halves, 16, {"rank_gpus": ["0000:AF:00.0"]}, 3),
            *((4, 5, 6, 7, 12, 13, 14, 15), "4 of 4 physical cores of NUMA node 1"),
        ),
        (single, 16, {"rank_gpus": [gpu], "quota": 4.5}, 3, (), "cgroup quota 4.5"),
        (single, 16, {"quota": 0.5}, 1, (), "cgroup quota 0.5"),
        *((bare, 6, {"rank_gpus": [at]}, 5, (), "") for at in (None, gpu, "0000:ff:00.0")),
    ):
        result = plan(allowed=range(cores), sysfs=sysfs, **options)  # type: ignore[arg-type]
        assert (result.threads, result.cpus) == (threads, cpus) and why in result.why


def test_ranks_on_one_node_divide_its_cores(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, 2, 6, 1)
    plans = [
        plan(rank_gpus=list(GPUS), local_rank=rank, allowed=range(12), sysfs=sysfs)
        for rank in range(4)
    ]
    assert [p.cpus for p in plans] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
    assert [p.threads for p in plans] == [2, 2, 2, 2]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_rank_gets_a_core_and_none_is_lost(tmp_path: Path, ranks: int) -> None:
    sysfs = machine(tmp_path, 1, 5, 1)
    gpus = ["0000:3b:00.0"] * ranks
    plans = [
        plan(rank_gpus=gpus, local_rank=rank, allowed=range(5), sysfs=sysfs)
        for rank in range(ranks)
    ]
    assert all(p.threads >= 1 for p in plans)
    used = [cpu for p in plans for cpu in p.cpus]
    assert set(used) == set(range(5))
    assert ranks > 5 or len(used) == 5


@pytest.mark.parametrize(("quota", "threads"), [(16.0, 3), (8.0, 2), (2.5, 1)])
def test_ranks_divide_a_quota(tmp_path: Path, quota: float, threads: int) -> None:
    sysfs = machine(tmp_path, 2, 16, 1)
    plans = [
        plan(rank_gpus=list(GPUS), local_rank=rank, allowed=range(32), quota=quota, sysfs=sysfs)
        for rank in range(4)
    ]
    assert [(p.threads, p.cpus) for p in plans] == [(threads, ())] * 4
    assert all(f"cgroup quota {quota:g} for 4 ranks" in p.why for p in plans)


def test_the_least_quota_of_the_ancestors_counts(tmp_path: Path) -> None:
    """Of both versions."""
    membership, mount = tmp_path / "self", tmp_path / "cgroup"
    write(membership, "0::/job/task")
    write(mount / "job/task/cpu.max", "max 100000")
    write(mount / "job/cpu.max", "150000 100000")
    assert cpu_quota(mount, membership) == 1.5
    assert folders(mount, membership) == [mount / "job/task", mount / "job", mount]
    write(membership, "4:cpu,cpuacct:/old\n3:memory:/old")
    group = mount / "cpu,cpuacct/old"
    write(group / "cpu.cfs_period_us", 100000)
    for quota, cores in ((250000, 2.5), (-1, None)):
        write(group / "cpu.cfs_quota_us", quota)
        assert cpu_quota(mount, membership) == cores


KEPT = ResumedSettings("bf16", 1, 2)


@pytest.mark.parametrize(
    ("overrides", "environ", "rank_info", "resumed", "quota", "threads"),
    [
        ([], {}, RankInfo(), None, None, 4),
        (["device.threads=3"], {"OMP_NUM_THREADS": "4"}, RankInfo(), KEPT, 1.0, 3),
        ([], {"OMP_NUM_THREADS": "4"}, RankInfo(), KEPT, 1.0, 4),
        ([], {}, RankInfo(), KEPT, None, 2),
        ([], {}, RankInfo(), ResumedSettings("bf16", 1, 64), None, 8),  # of a larger machine
        ([], {}, RankInfo(), ResumedSettings("bf16", 1, 0), None, 4),  # not recorded
        ([], {}, RankInfo(), None, 2.5, 2),
        ([], {}, RankInfo(), None, 0.5, 1),
        ([], {"OMP_NUM_THREADS": "1"}, RankInfo(size=2, local_size=2), None, None, 4),
        ([], {"OMP_NUM_THREADS": "1"}, RankInfo(size=2, local_size=2), None, 2.0, 1),
        ([], {"OMP_NUM_THREADS": "1"}, RankInfo(size=2, local_size=2), KEPT, None, 4),
    ],
)
def test_threads_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    environ: dict[str, str],
    rank_info: RankInfo,
    resumed: ResumedSettings | None,
    quota: float | None,
    threads: int,
) -> None:
    """On 8 CPUs, of which torch would take 4."""
    monkeypatch.setattr("os.environ", environ)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.setattr("offloadtrain.hardware.cgroup.cpu_quota", lambda: quota)
    job = jobs.load(find_job("debug"), overrides)
    assert _threads(job, torch.device("cpu"), rank_info, resumed) == threads
