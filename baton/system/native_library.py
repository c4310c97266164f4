"""Compiles libraries from C++ sources in a package, once for each version of source and flags.

A library is stored beside its source, or in the user's cache if that folder is not writable. Its
name contains a digest of the source and flags, so a library with the right name is valid whichever
compiler built it, and a machine without a compiler can use a library built elsewhere.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.errors import Unavailable
from baton.system.home_folder import user_home

COMPILERS = ("g++", "c++", "clang++")
MACHINES = ("x86_64", "AMD64")

COMPILE_SECONDS = 300.0
"""Time limit for the compiler. Compiling takes about 5 s, but much longer on an overloaded
machine."""


def library_folders(sources: Path) -> list[Path]:
    """Return the folders where a library may be: beside its source, and in the cache of a user who
    has a home folder."""
    home = user_home()
    cache = [] if home is None else [home / ".cache" / "baton" / "native"]
    return [sources.parent / "built", *cache]


def source_digest(sources: Path, flags: Sequence[str]) -> str:
    """Return a digest of the flags and of all files in the folder ``sources``."""
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sorted(sources.iterdir()):
        digest.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler(compilers: Sequence[str] = COMPILERS) -> str:
    """Return the name of a C++ compiler. Raises Unavailable if none is installed, or if this is not
    an x86 machine."""
    if platform.machine() not in MACHINES:
        raise Unavailable(
            f"Baton's CPU kernels are for {MACHINES[0]} only, but this machine is "
            f"{platform.machine()}"
        )
    for name in compilers:
        if found := shutil.which(name):
            return found
    raise Unavailable(
        f"the CPU kernels need a C++ compiler, but none of {', '.join(compilers)} is installed"
    )


def build_library(
    name: str,
    sources: Path,
    flags: Sequence[str],
    *,
    folders: Sequence[Path] | None = None,
    compiler: Callable[[], str] = find_compiler,
) -> Path:
    """Return the library ``name`` that is compiled from ``library.cpp`` in the folder ``sources``
    with ``flags``; compile it if none of ``folders`` (default: library_folders) has it. Raises
    Unavailable with the reason if that fails."""
    places = library_folders(sources) if folders is None else list(folders)
    file_name = f"{name}-{source_digest(sources, flags)}.so"
    for folder in places:
        if os.access(folder / file_name, os.R_OK) and _is_ours(folder):
            return folder / file_name
    return _compile(sources, flags, compiler, _writable(places) / file_name)


def _compile(
    sources: Path, flags: Sequence[str], compiler: Callable[[], str], target: Path
) -> Path:
    """Compile a library. If several processes need the same library, one compiles it and the others
    wait."""
    with _lock(target.with_suffix(".lock")):
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            compiled = Path(folder) / target.name
            _run([compiler(), *flags, str(sources / "library.cpp"), "-o", str(compiled)])
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
