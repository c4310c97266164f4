"""Determines the features of this machine's processor from /proc/cpuinfo."""

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.system.portability import uses_linux

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")

INSTRUCTION_SETS = {"avx512_bf16": (*_AVX512, "avx512_bf16"), "avx512": _AVX512, "avx2": _AVX2}
"""The instruction sets for which the kernels are compiled, the best first, and the CPU features
that each of them needs."""

CPUINFO = Path("/proc/cpuinfo")

_most = next(iter(INSTRUCTION_SETS))


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


def model_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name, or its architecture if Linux does not list a name."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def supported_instruction_sets() -> list[str]:
    """Return the names in ``INSTRUCTION_SETS`` that this processor supports, the best first. It is
    empty where Linux doesn't list the features."""
    if not uses_linux():
        return []
    names = list(INSTRUCTION_SETS)
    allowed = names[names.index(_most) :]
    return [name for name in allowed if features().issuperset(INSTRUCTION_SETS[name])]


def best_instruction_set() -> str | None:
    """Return the best instruction set that this processor supports, or None if it supports none."""
    return next(iter(supported_instruction_sets()), None)


def missing_features() -> list[str]:
    """Return the CPU features that ``avx2``, the least demanding instruction set, needs and this
    processor lacks. The list is empty if it lacks none."""
    return [name for name in _AVX2 if name not in features()]


@contextmanager
def limit_instruction_set(most: str) -> Iterator[None]:
    """Within the ``with`` block, treat the processor as one that supports at most the instruction
    set ``most``, for tests and comparisons. Models that are built within the block keep this limit
    after its end. Not thread-safe."""
    global _most
    assert most in INSTRUCTION_SETS, most
    before, _most = _most, most
    try:
        yield
    finally:
        _most = before
