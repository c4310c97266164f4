"""Compiles the kernels of the codecs, once for each instruction set and version of their source.

    python -m baton.kv_codec.build [--all]

compiles them ahead of time, either for this machine's processor (``make setup`` does this) or for
all instruction sets (the build of a container image does this). Otherwise the first process that
needs them compiles them; see :mod:`baton.system.native_library`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.errors import Unavailable
from baton.system import native_library
from baton.system.cpu_features import feature_flags, features
from baton.system.portability import uses_linux

SOURCES = Path(__file__).parent / "kernels"

_AVX2 = ("avx2", "bmi2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")

INSTRUCTION_SETS = {
    "avx512_vbmi2": (*_AVX512, "avx512vbmi", "avx512_vbmi2"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""The instruction sets for which the kernels are compiled, the best first, and the CPU features
that each of them needs. All give the same bytes."""

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    # A multiplication and an addition are rounded separately. Otherwise the bits would depend on
    # the compiler.
    "-ffp-contract=off",
    "-fno-math-errno",
    # GCC 12 warns of undefined halves in its own intrinsics.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
)


def supported_instruction_sets() -> list[str]:
    """Return the names in ``INSTRUCTION_SETS`` that this processor supports, the best first."""
    if not uses_linux():
        return []
    return [name for name, needed in INSTRUCTION_SETS.items() if features().issuperset(needed)]


def build_library(wanted: str) -> Path:
    """Return the library for the instruction set ``wanted``; compile it if needed. Raises
    Unavailable with the reason if that fails."""
    flags = [*FLAGS, *feature_flags(INSTRUCTION_SETS[wanted])]
    return native_library.build_library(f"kv-codecs-{wanted}", SOURCES, flags)


def main(arguments: Sequence[str]) -> int:
    """Compile the kernels and print the result. Always return 0: without the kernels, NumPy
    computes the codecs."""
    parser = argparse.ArgumentParser(description="compiles the codecs' kernels ahead of time")
    parser.add_argument(
        "--all", action="store_true", help="for all instruction sets, not only this machine's"
    )
    best = supported_instruction_sets()[:1]
    wanted = list(INSTRUCTION_SETS) if parser.parse_args(arguments).all else best
    try:
        for name in wanted:
            print(f"kernels of KV codecs: {build_library(name)}")
    except Unavailable as error:
        print(f"kernels of KV codecs: {error}; NumPy computes instead, slowly")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
