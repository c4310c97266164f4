"""How many of the machine's cores this process may use.

A container or a batch system may give a process some of a machine's cores, either by name (its
affinity, ``sched_setaffinity(2)``) or as CPU time in each period (the quota of its control group,
``cpu.max`` in version 2 and ``cpu.cfs_quota_us`` in version 1). A thread more than that gains
nothing: with a quota, all threads stand still together once it is used up.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from baton.system.portability import uses_linux

PROC = Path("/proc/self")


def usable_cores(proc: Path = PROC) -> int:
    """Return the number of cores that this process may use, at least 1. A quota of 1.5 cores counts
    as 2. ``proc`` is the process's folder in /proc. Portably, it is the number of all cores."""
    if sys.platform != "linux" or not uses_linux():
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    quota = min(_quotas(proc), default=math.inf)
    return max(1, allowed if quota >= allowed else math.ceil(quota))


def bind_process(cores: Sequence[int]) -> None:
    """Let all threads of this process run on these cores only. Threads and processes that they
    start later inherit that. Cores that the process may no longer use are ignored. On other systems
    than Linux, do nothing."""
    if sys.platform == "linux":
        for thread in (PROC / "task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(thread.name), cores)


def bindable_cores(proc: Path = PROC) -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use, lowest first. Return none where
    threads should not be bound to cores: portably, and if a quota limits the CPU time, since then
    processes of other containers, which can't be seen, may use the same cores."""
    if sys.platform != "linux" or not uses_linux():
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    return tuple(allowed) if usable_cores(proc) == len(allowed) else ()


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """A mounted hierarchy of control groups that limits CPU time. ``root`` is the group that is
    mounted at ``folder``."""

    is_v2: bool
    root: PurePosixPath
    folder: Path

    def quotas(self, group: PurePosixPath) -> Iterator[float]:
        """Yield the quotas, in cores, of ``group`` and of all groups around it that are visible
        here. If the group itself isn't, as in a container without a namespace for groups, the
        container's group is the one that is mounted."""
        below = group.relative_to(self.root) if group.is_relative_to(self.root) else PurePosixPath()
        for inner in (below, *below.parents):
            quota = self._quota(self.folder / inner)
            if quota is not None:
                yield quota

    def _quota(self, folder: Path) -> float | None:
        """Return the quota of one group, or None if it has none. Quota and period are in µs."""
        try:
            if self.is_v2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
            return None if quota in ("max", "-1") else int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            return None


def _quotas(proc: Path) -> Iterator[float]:
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return
    group_of = {}
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            group_of[True] = PurePosixPath(group)
        elif "cpu" in controllers.split(","):
            group_of[False] = PurePosixPath(group)
    for hierarchy in filter(None, map(_hierarchy, mounts)):
        if hierarchy.is_v2 in group_of:
            yield from hierarchy.quotas(group_of[hierarchy.is_v2])


def _hierarchy(mount: str) -> _Hierarchy | None:
    """Parse a line of mountinfo, whose format is in proc_pid_mountinfo(5). Return None if it isn't
    a hierarchy of control groups that limits CPU time."""
    own, _, common = mount.partition(" - ")
    _, _, _, root, folder, *_ = own.split(" ")
    kind, _, options = common.split(" ", 2)
    is_v1 = kind == "cgroup" and "cpu" in options.split(",")
    if kind != "cgroup2" and not is_v1:
        return None
    return _Hierarchy(not is_v1, PurePosixPath(root), Path(folder.replace("\\040", " ")))
