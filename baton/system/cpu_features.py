"""The features of this machine's processor, from /proc/cpuinfo."""

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def features(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the CPU flags of the first core. The result is empty if Linux lists no flags, or lists
    them under another name (as on Arm)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())


def feature_flags(names: tuple[str, ...]) -> list[str]:
    """Return the compiler's flags for CPU features: the feature's name in /proc/cpuinfo without
    underscores. AMX's instructions need no flag, because they are assembly."""
    return [f"-m{name.replace('_', '')}" for name in names if not name.startswith("amx")]
