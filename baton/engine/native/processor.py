"""What this machine's processor can do, as Linux tells it."""

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")

INSTRUCTION_SETS = {"avx512_bf16": (*_AVX512, "avx512_bf16"), "avx512": _AVX512, "avx2": _AVX2}
"""What the kernels are compiled for, the best first, and the features that each needs."""

CPUINFO = Path("/proc/cpuinfo")

_most = next(iter(INSTRUCTION_SETS))


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


def supported_instruction_sets() -> list[str]:
    """Those of ``INSTRUCTION_SETS`` that this processor has, the best first."""
    names = list(INSTRUCTION_SETS)
    allowed = names[names.index(_most) :]
    return [name for name in allowed if features().issuperset(INSTRUCTION_SETS[name])]


def best_instruction_set() -> str | None:
    """The best that this processor has; None: it has too little for any."""
    return next(iter(supported_instruction_sets()), None)


def missing_features() -> list[str]:
    """Features that the kernels need at least, and the processor has not."""
    return [name for name in _AVX2 if name not in features()]


@contextmanager
def limited_to(most: str) -> Iterator[None]:
    """What is built within the block computes as on a processor that has no more: to test, and to
    compare. Not for several threads at once."""
    global _most
    assert most in INSTRUCTION_SETS, most
    before, _most = _most, most
    try:
        yield
    finally:
        _most = before
