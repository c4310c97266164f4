"""What this machine's processor can do, as Linux tells it."""

import functools
import platform
from pathlib import Path

NEEDED = {
    "float32": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "bfloat16": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"),
}
"""By the format that is computed in."""

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def features(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Of the first core; empty where Linux does not tell, or calls them something else (Arm)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    told = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(told, "").split())


def model_name(cpuinfo: Path = CPUINFO) -> str:
    """What the processor is called; its architecture where Linux does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    told = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(told, platform.machine())


def lacking(dtype: str) -> list[str]:
    """Features that the kernels need for a format in ``NEEDED``, and the processor has not."""
    return [name for name in NEEDED[dtype] if name not in features()]
