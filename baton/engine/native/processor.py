"""Determines the instruction sets of this machine's processor."""

import ctypes
import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.system.cpu_features import CPUINFO, features
from baton.system.portability import uses_linux

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512_bf16")

INSTRUCTION_SETS = {
    "amx": (*_AVX512_BF16, "amx_tile", "amx_bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""The instruction sets for which the kernels are compiled, the best first, and the CPU features
that each of them needs."""

EMULATED_AMX = "amx_emulated"
"""The kernels for AMX with tiles in software. They give the bits of ``amx`` on any processor with
AVX2, and are slower than the kernels without tiles, so they are used only if a setting says so."""

SAME_BITS = (("amx", EMULATED_AMX), ("avx512_bf16", "avx512", "avx2"))
"""The instruction sets by the bits of their results in BF16, which tiles sum in another order. In
FP32 all give the same."""

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

_most = next(iter(INSTRUCTION_SETS))


def model_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name, or its architecture if Linux does not list a name."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def has_tiles() -> bool:
    """Return whether this processor has AMX, as Linux lists its features."""
    return features().issuperset(INSTRUCTION_SETS["amx"])


@functools.cache
def tiles_permitted() -> bool:
    """Ask the Linux kernel to let this process use AMX's tiles, and return whether it does. The
    answer is for all threads of the process."""
    if not uses_linux() or not has_tiles():
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    request = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return bool(call(*(ctypes.c_long(number) for number in request)) == 0)


def supported_instruction_sets() -> list[str]:
    """Return the names in ``INSTRUCTION_SETS`` that this processor supports, the best first. It is
    empty where Linux doesn't list the features."""
    if _most == EMULATED_AMX:
        return [EMULATED_AMX] if _supported("avx2") else []
    names = list(INSTRUCTION_SETS)
    return [name for name in names[names.index(_most) :] if _supported(name)]


def _supported(name: str) -> bool:
    has_features = uses_linux() and features().issuperset(INSTRUCTION_SETS[name])
    return has_features and (name != "amx" or tiles_permitted())


def sets_with_bits_of(name: str) -> list[str]:
    """Return the instruction sets that this processor supports and whose results have the bits of
    those of ``name``, the best first."""
    names = next(each for each in SAME_BITS if name in each)
    return [each for each in names if _supported("avx2" if each == EMULATED_AMX else each)]


def features_for(name: str) -> tuple[str, ...]:
    """Return the CPU features that are used by an instruction set's kernels, which for
    ``EMULATED_AMX`` are as many as this processor has."""
    if name != EMULATED_AMX:
        return INSTRUCTION_SETS[name]
    vectors = [each for each in INSTRUCTION_SETS if each != "amx" and _supported(each)]
    return INSTRUCTION_SETS[next(iter(vectors), "avx2")]


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
    set ``most``, or only ``EMULATED_AMX``. Models that are built within the block keep this limit
    after its end. Not thread-safe."""
    global _most
    assert most in (*INSTRUCTION_SETS, EMULATED_AMX), most
    before, _most = _most, most
    try:
        yield
    finally:
        _most = before
