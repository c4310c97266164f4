"""Tests the number of cores that a process may use: its affinity, and the quotas of its control
groups, as the kernel's files show them."""

import os
import sys
from pathlib import Path

import pytest

from baton.system.cpu_cores import usable_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these limits")

ALL_CORES = 16


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.system.cpu_cores.uses_linux", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(ALL_CORES)), raising=False)


def cores_with(tmp_path: Path, group: str, mount: str, files: dict[str, str]) -> int:
    """Return the result for a process in ``group``, a line of /proc/self/cgroup. FOLDER in
    ``mount``, a line of mountinfo, stands for the folder with ``files``."""
    folder = tmp_path / "cgroup"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    others = "23 1 0:5 / /proc rw,nosuid shared:2 - proc proc rw"
    (tmp_path / "proc").mkdir()
    proc = tmp_path / "proc"
    (proc / "cgroup").write_text(f"9:memory:/elsewhere\n{group}\n")
    (proc / "mountinfo").write_text(f"{others}\n{mount.replace('FOLDER', str(folder))}\n")
    return usable_cores(proc)


V2 = "41 31 0:38 / FOLDER rw,relatime shared:9 - cgroup2 cgroup rw"
V1 = "32 31 0:29 / FOLDER rw,relatime - cgroup cgroup rw,cpu,cpuacct"


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", ALL_CORES), ("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1),
     ("9900000 100000", ALL_CORES), ("nonsense", ALL_CORES)],
)  # fmt: skip
def test_quota_of_version_2(tmp_path: Path, quota: str, cores: int) -> None:
    assert cores_with(tmp_path, "0::/", V2, {"cpu.max": quota}) == cores


def test_smallest_quota_of_all_groups_around(tmp_path: Path) -> None:
    quotas = {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000", "c/cpu.max": "1 100000"}
    assert cores_with(tmp_path, "0::/a/b", V2, quotas) == 3


def test_group_below_a_mounted_group(tmp_path: Path) -> None:
    mount = V2.replace(" / FOLDER", " /slice/pod FOLDER")
    files = {"cpu.max": "max 100000", "box/cpu.max": "400000 100000"}
    assert cores_with(tmp_path, "0::/slice/pod/box", mount, files) == 4


def test_group_that_is_not_visible_counts_as_the_mounted_one(tmp_path: Path) -> None:
    mount = V2.replace(" / FOLDER", " /kubepods/box FOLDER")
    assert cores_with(tmp_path, "0::/elsewhere", mount, {"cpu.max": "200000 100000"}) == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", ALL_CORES), ("250000", 3)])
def test_quota_of_version_1(tmp_path: Path, quota: str, cores: int) -> None:
    files = {"box/cpu.cfs_quota_us": quota, "box/cpu.cfs_period_us": "100000"}
    assert cores_with(tmp_path, "1:cpu,cpuacct:/box", V1, files) == cores


def test_hierarchies_without_cpu_time_are_ignored(tmp_path: Path) -> None:
    mount = V1.replace("rw,cpu,cpuacct", "rw,cpuset")
    files = {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}
    assert cores_with(tmp_path, "1:cpu:/", mount, files) == ALL_CORES


def test_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert cores_with(tmp_path, "0::/", V2, {"cpu.max": "900000 100000"}) == 2


def test_portably_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.system.cpu_cores.uses_linux", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert cores_with(tmp_path, "0::/", V2, {"cpu.max": "100000 100000"}) == 10
