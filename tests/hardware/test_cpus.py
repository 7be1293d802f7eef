"""Which CPUs the kernels get, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offloadtrain.cli.commands.jobs import find_job
from offloadtrain.config import job as jobs
from offloadtrain.hardware.cgroup import cpu_quota, folders
from offloadtrain.hardware.cpus import CpuPlan, plan
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


def test_one_thread_per_physical_core_less_one(tmp_path: Path) -> None:
    result = plan(allowed=range(16), sysfs=machine(tmp_path, 1, 8, 2))
    assert result == CpuPlan(7, (), "8 of 8 physical cores, one left to the launching thread")


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 2)])
def test_one_is_left_where_there_are_more_than_two(
    tmp_path: Path, cores: int, threads: int
) -> None:
    assert plan(allowed=range(cores), sysfs=machine(tmp_path, 1, cores, 1)).threads == threads


def test_the_gpus_node(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, 2, 4, 2)
    result = plan(rank_gpus=["0000:AF:00.0"], allowed=range(16), sysfs=sysfs)
    assert result.cpus == (4, 5, 6, 7, 12, 13, 14, 15)
    assert result.threads == 3
    assert "4 of 4 physical cores of NUMA node 1" in result.why


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


def test_a_quota_bounds_the_threads_and_binds_none(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, 1, 8, 1)
    result = plan(rank_gpus=["0000:3b:00.0"], allowed=range(8), quota=4.5, sysfs=sysfs)
    assert (result.threads, result.cpus) == (3, ())
    assert "cgroup quota 4.5" in result.why
    assert plan(allowed=range(8), quota=0.5, sysfs=sysfs).threads == 1


@pytest.mark.parametrize(("quota", "threads"), [(16.0, 3), (8.0, 2), (2.5, 1)])
def test_ranks_divide_a_quota(tmp_path: Path, quota: float, threads: int) -> None:
    sysfs = machine(tmp_path, 2, 16, 1)
    plans = [
        plan(rank_gpus=list(GPUS), local_rank=rank, allowed=range(32), quota=quota, sysfs=sysfs)
        for rank in range(4)
    ]
    assert [(p.threads, p.cpus) for p in plans] == [(threads, ())] * 4
    assert all(f"cgroup quota {quota:g} for 4 ranks" in p.why for p in plans)


def test_a_gpu_without_a_node_and_a_machine_without_topology(tmp_path: Path) -> None:
    sysfs = machine(tmp_path / "one", 0, 0, 1)
    for gpu in (None, "0000:3b:00.0", "0000:ff:00.0"):
        assert plan(rank_gpus=[gpu], allowed=range(6), sysfs=sysfs).threads == 5


def test_the_least_quota_of_the_ancestors_counts(tmp_path: Path) -> None:
    write(tmp_path / "self", "0::/job/task")
    mount = tmp_path / "cgroup"
    write(mount / "job/task/cpu.max", "max 100000")
    write(mount / "job/cpu.max", "150000 100000")
    assert cpu_quota(mount, tmp_path / "self") == 1.5
    assert folders(mount, tmp_path / "self") == [mount / "job/task", mount / "job", mount]


def test_quotas_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "self", "4:cpu,cpuacct:/job\n3:memory:/job")
    group = tmp_path / "cgroup/cpu,cpuacct/job"
    write(group / "cpu.cfs_quota_us", 250000)
    write(group / "cpu.cfs_period_us", 100000)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "self") == 2.5
    write(group / "cpu.cfs_quota_us", -1)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "self") is None


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
