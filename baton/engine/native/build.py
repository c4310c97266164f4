"""Compiles the kernels, once per version of their source and per set of instructions.

    python -m baton.engine.native.build [--all]

does so ahead of time, for this machine's processor, as ``make setup`` does, or for all that may
come, as an image's build does; else whoever needs them first does. A library lies beside its
source, or in the user's cache where that can't be written to. Its name is a digest of source and
flags, so that what is found there is what is wanted, whatever compiler made it, and a machine
without one can run what another has compiled.
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

from baton.engine.native.processor import INSTRUCTION_SETS, best_instruction_set
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
    # A product and a sum are two roundings unless the source says one: else the bits would
    # depend on the compiler.
    "-ffp-contract=off",
    "-fno-math-errno",
    # GCC 12 takes the undefined halves of its own intrinsics for mistakes of ours.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-mprefer-vector-width=512",
)
COMPILE_SECONDS = 300.0
"""It takes about 5 s; more means that the machine is swamped, not that it will never end."""


def build_library(wanted: str) -> Path:
    """The library compiled for a name in ``INSTRUCTION_SETS``. Raises Unavailable that says why
    there is none, and what would help."""
    name = f"kernels-{wanted}-{source_digest(wanted)}.so"
    for folder in library_folders():
        if os.access(folder / name, os.R_OK) and _is_ours(folder):
            return folder / name
    return _compile(wanted, _writable(library_folders()) / name)


def library_folders() -> list[Path]:
    """Where it may lie: beside its source, and in the user's cache."""
    return [SOURCES.parent / "built", Path.home() / ".cache" / "baton" / "native"]


def compiler_flags(wanted: str) -> list[str]:
    """A feature's is called as Linux calls it, but for what stands between its parts."""
    return [*FLAGS, *[f"-m{feature.replace('_', '')}" for feature in INSTRUCTION_SETS[wanted]]]


def source_digest(wanted: str) -> str:
    """Of all that the library is made of."""
    told = hashlib.sha256(" ".join(compiler_flags(wanted)).encode())
    for source in sorted(SOURCES.iterdir()):
        told.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    return told.hexdigest()[:16]


def find_compiler() -> str:
    """Raises Unavailable when there is none, or nothing to compile for."""
    if platform.machine() not in MACHINES:
        raise Unavailable(f"they are for {MACHINES[0]}, and this is {platform.machine()}")
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise Unavailable(f"no C++ compiler: none of {', '.join(COMPILERS)} is installed")


def _compile(wanted: str, target: Path) -> Path:
    """Of several processes that want the same library one compiles, and the others wait."""
    with _lock(target.with_suffix(".lock")):
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            _run(
                [
                    find_compiler(),
                    *compiler_flags(wanted),
                    str(SOURCES / "library.cpp"),
                    "-o",
                    str(made),
                ]
            )
            made.replace(target)
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
            # Not to be read by us alone: an image's library is built by root.
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and _is_ours(folder):
            return folder
    told = " or ".join(str(folder) for folder in places)
    raise Unavailable(f"the kernels are not compiled: no {told} that can be written to by us alone")


def _is_ours(folder: Path) -> bool:
    """What is loaded from there runs as us: nobody else but root may have put it there."""
    status = folder.stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & others


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str]) -> int:
    """Says what was done. Without kernels everything works, so that nothing is a failure; and
    where they are built need not be where they run."""
    parser = argparse.ArgumentParser(description="compiles the kernels ahead of time")
    parser.add_argument("--all", action="store_true", help="for all processors, not for this one")
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
