"""Compiles the CPU kernels, once for each instruction set and version of their source.

    python -m baton.engine.native.build [--all]

compiles them ahead of time, either for this machine's processor (``make setup`` does this) or for
all instruction sets (the build of a container image does this). Otherwise the first process that
needs them compiles them. A library is stored beside its source, or in the user's cache if that
folder is not writable. Its name contains a digest of the source and flags, so a library with the
right name is valid whichever compiler built it, and a machine without a compiler can use a library
built elsewhere.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.engine.native.processor import (
    EMULATED_AMX,
    INSTRUCTION_SETS,
    best_instruction_set,
    features_for,
)
from baton.errors import Unavailable

SOURCES = Path(__file__).parent / "kernels"
COMPILERS = ("g++", "c++", "clang++")
MACHINES = ("x86_64", "AMD64")
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

COMPILE_SECONDS = 300.0
"""Time limit for the compiler. Compiling takes about 5 s, but much longer on an overloaded
machine."""


def build_library(wanted: str) -> Path:
    """Return the library for the instruction set ``wanted``, a name in ``INSTRUCTION_SETS``
    or ``EMULATED_AMX``; compile it if needed. Raises Unavailable with the reason if that fails."""
    name = f"kernels-{wanted}-{source_digest(wanted)}.so"
    for folder in library_folders():
        if os.access(folder / name, os.R_OK) and _is_ours(folder):
            return folder / name
    return _compile(wanted, _writable(library_folders()) / name)


def library_folders() -> list[Path]:
    """Return the folders where a library may be: beside its source, and in the user's cache."""
    return [SOURCES.parent / "built", Path.home() / ".cache" / "baton" / "native"]


def compiler_flags(wanted: str) -> list[str]:
    """Return the compiler's flags. The flag for a CPU feature is the feature's name in
    /proc/cpuinfo without underscores."""
    names = [name for name in features_for(wanted) if not name.startswith("amx")]
    return [*FLAGS, *[f"-m{name.replace('_', '')}" for name in names], *TILE_FLAGS.get(wanted, ())]


def source_digest(wanted: str) -> str:
    """Return a digest of the flags and all source files."""
    digest = hashlib.sha256(" ".join(compiler_flags(wanted)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> str:
    """Return the name of a C++ compiler. Raises Unavailable if none is installed, or if this is not
    an x86 machine."""
    if platform.machine() not in MACHINES:
        raise Unavailable(
            f"Baton's CPU kernels are for {MACHINES[0]} only, but this machine is "
            f"{platform.machine()}"
        )
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise Unavailable(
        f"the CPU kernels need a C++ compiler, but none of {', '.join(COMPILERS)} is installed"
    )


def _compile(wanted: str, target: Path) -> Path:
    """Compile a library. If several processes need the same library, one compiles it and the others
    wait."""
    with _lock(target.with_suffix(".lock")):
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            compiled = Path(folder) / target.name
            _run(
                [
                    find_compiler(),
                    *compiler_flags(wanted),
                    str(SOURCES / "library.cpp"),
                    "-o",
                    str(compiled),
                ]
            )
            compiled.replace(target)
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the kernels could not be compiled: {error}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise Unavailable(f"the kernels could not be compiled by {command[0]}: {first}")


def _writable(places: list[Path]) -> Path:
    for folder in places:
        try:
            # Readable by other users: in a container image the library is built by root.
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and _is_ours(folder):
            return folder
    names = ", ".join(str(folder) for folder in places)
    raise Unavailable(
        f"the CPU kernels can't be compiled: one of the folders {names} must be writable for this "
        "user and for no other user except root"
    )


def _is_ours(folder: Path) -> bool:
    """Whether only this user or root can write to a folder. This matters because code from the
    folder runs as this user."""
    status = folder.stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & others


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
