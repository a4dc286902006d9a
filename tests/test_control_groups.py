"""CPU quotas, throttling and memory limits of control groups, read from trees as kernels and containers show them."""

import os
from pathlib import Path

import pytest

from cuda_l2.commands import doctor
from cuda_l2.machine.cpu import target
from cuda_l2.system import control_groups
from cuda_l2.system.control_groups import Throttling


def tree(folder: Path, membership: str, mounts: str, files: dict[str, str]) -> Path:
    """A process's folder as in /proc whose mounts lie in `folder`, written as AT in `mounts`."""
    process = folder / "process"
    process.mkdir()
    (process / "cgroup").write_text(membership)
    (process / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\n" + mounts.replace("AT", str(folder)))
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return process


def nested_v2(folder: Path) -> Path:
    return tree(
        folder,
        "0::/user.slice/job/step\n",
        "31 22 0:26 / AT/cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        {
            "cg/user.slice/cpu.max": "max 100000",
            "cg/user.slice/job/cpu.max": "150000 100000",
            "cg/user.slice/job/cpu.stat": "usage_usec 9\nnr_periods 300\nnr_throttled 142\nthrottled_usec 7100000\n",
            "cg/user.slice/job/memory.max": "5000",
            "cg/user.slice/job/memory.current": "2000",
            "cg/user.slice/job/step/cpu.max": "400000 100000",
            "cg/user.slice/job/step/cpu.stat": "nr_periods 300\nnr_throttled 1\nthrottled_usec 5\n",
            "cg/user.slice/job/step/memory.max": "max",
        },
    )


def container_v1(folder: Path) -> Path:
    """The mount shows the container's own group as its root, the membership the host's path."""
    return tree(
        folder,
        "7:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n",
        r"40 22 0:30 /docker/abc AT/with\040space/cpu,cpuacct ro master:9 - cgroup cgroup rw,cpu,cpuacct" + "\n"
        "41 22 0:31 /docker/abc AT/memory ro - cgroup cgroup rw,memory\n",
        {
            "with space/cpu,cpuacct/cpu.cfs_quota_us": "100000\n",
            "with space/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "with space/cpu,cpuacct/cpu.stat": "nr_periods 300\nnr_throttled 142\nthrottled_time 7100000000\n",
            "memory/memory.limit_in_bytes": "4096\n",
            "memory/memory.usage_in_bytes": "96\n",
        },
    )


@pytest.mark.parametrize(
    ("made", "quota", "throttling", "free_bytes"),
    [(nested_v2, 1.5, Throttling(143, 7_100_005), 3000), (container_v1, 1.0, Throttling(142, 7_100_000), 4000)],
)
def test_the_tightest_group_on_the_own_path_counts(made, quota, throttling, free_bytes, tmp_path) -> None:
    process = made(tmp_path)
    assert control_groups.cpu_quota(process) == quota
    assert control_groups.throttling(process) == throttling
    assert control_groups.free_memory_bytes(process) == free_bytes


def test_a_group_beside_the_own_path_does_not_count(tmp_path) -> None:
    process = nested_v2(tmp_path)
    (process / "cgroup").write_text("0::/user.slice\n")
    assert control_groups.cpu_quota(process) is None


def test_a_path_outside_the_mounts_view_counts_as_the_mounts_root(tmp_path) -> None:
    mount = "31 22 0:26 / AT/cg rw - cgroup2 cgroup2 rw\n"
    process = tree(tmp_path, "0::/../other\n", mount, {"cg/cpu.max": "50000 100000\n", "other/cpu.max": "1 100000\n"})
    assert control_groups.cpu_quota(process) == 0.5


@pytest.mark.parametrize("files", [{}, {"cg/cpu.max": "max 100000"}, {"cg/cpu.max": ""}, {"cg/cpu.cfs_quota_us": "-1"}])
def test_no_quota_is_none(files, tmp_path) -> None:
    process = tree(tmp_path, "0::/a\n", "31 22 0:26 / AT/cg rw - cgroup2 cgroup2 rw\n", files)
    assert control_groups.cpu_quota(process) is None and control_groups.throttling(process) is None
    assert control_groups.cpu_quota(tmp_path / "missing") is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.5, 1), (1.0, 1), (2.9, 2), (40.0, 8)])
def test_threads_follow_the_quota(quota, cores, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(control_groups, "cpu_quota", lambda: quota)
    assert target.usable_cores() == cores


def test_memory_follows_the_limit(monkeypatch) -> None:
    monkeypatch.setattr(control_groups, "free_memory_bytes", lambda: 12345)
    assert target.available_memory_bytes() == 12345
    monkeypatch.setattr(control_groups, "free_memory_bytes", lambda: None)
    assert target.available_memory_bytes() > 12345


def test_doctor_says_a_quota_and_its_throttling(monkeypatch) -> None:
    assert not list(doctor._quota(2)) or control_groups.cpu_quota() is not None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(control_groups, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(control_groups, "throttling", lambda: Throttling(142, 7_100_000))
    quota, throttled = map(str, doctor._quota(1))
    assert "1.5 of 2 cores" in quota and "1 thread" in quota
    assert "142 times" in throttled and "7.1 s" in throttled
