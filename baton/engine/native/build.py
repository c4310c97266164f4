"""Compiles the CPU kernels, once for each instruction set and version of their source.

    python -m baton.engine.native.build [--all]

compiles them ahead of time, either for this machine's processor (``make setup`` does this) or for
all instruction sets (the build of a container image does this). Otherwise the first process that
needs them compiles them; see :mod:`baton.system.native_library`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.engine.native.processor import (
    EMULATED_AMX,
    INSTRUCTION_SETS,
    best_instruction_set,
    features_for,
)
from baton.errors import Unavailable
from baton.system import native_library
from baton.system.cpu_features import feature_flags

SOURCES = Path(__file__).parent / "kernels"
COMPILERS = native_library.COMPILERS
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    # A multiplication and an addition are rounded separately unless the source calls fma().
    # Otherwise the bits would depend on the compiler.
    "-ffp-contract=off",
    "-fno-math-errno",
    # GCC 12 warns of undefined halves in its own intrinsics.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-mprefer-vector-width=512",
)
TILE_FLAGS = {"amx": ("-DBATON_AMX",), EMULATED_AMX: ("-DBATON_EMULATED_AMX",)}
"""Flags that choose the tiles. AMX's instructions need no flag, because they are assembly."""


def build_library(wanted: str) -> Path:
    """Return the library for the instruction set ``wanted``, a name in ``INSTRUCTION_SETS``
    or ``EMULATED_AMX``; compile it if needed. Raises Unavailable with the reason if that fails."""
    return native_library.build_library(
        f"kernels-{wanted}",
        SOURCES,
        compiler_flags(wanted),
        folders=library_folders(),
        compiler=find_compiler,
    )


def library_folders() -> list[Path]:
    return native_library.library_folders(SOURCES)


def compiler_flags(wanted: str) -> list[str]:
    return [*FLAGS, *feature_flags(features_for(wanted)), *TILE_FLAGS.get(wanted, ())]


def source_digest(wanted: str) -> str:
    return native_library.source_digest(SOURCES, compiler_flags(wanted))


def find_compiler() -> str:
    return native_library.find_compiler(COMPILERS)


def main(arguments: Sequence[str]) -> int:
    """Compile the kernels and print the result. Always return 0: Baton also works without the
    kernels, and the machine on which they are built need not be the one on which they run."""
    parser = argparse.ArgumentParser(description="compiles the kernels ahead of time")
    parser.add_argument(
        "--all", action="store_true", help="for all instruction sets, not only this machine's"
    )
    best = best_instruction_set()
    wanted = list(INSTRUCTION_SETS) if parser.parse_args(arguments).all else [best] if best else []
    try:
        for name in wanted:
            print(f"cpu kernels: {build_library(name)}")
    except Unavailable as error:
        print(f"cpu kernels: {error}; torch computes instead")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
