"""Lock the versions and SHA-256 hashes of the images' Python packages.

    python -m tools.lock

Writes the files in ``deploy/docker/locks/`` from pyproject.toml, the versions in constraints.txt
and the hashes that the package index publishes. Needs ``uv`` (``pip install uv``) and access to the
index. Run it after every change of pyproject.toml or constraints.txt; otherwise
``tests/helm/test_locks.py`` fails.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from baton.errors import BatonError, Unavailable

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "deploy/docker/locks"
MIN_PYTHON = "3.11"
EXTRAS = ("kubernetes", "ray")
"""The extras of pyproject.toml that an image may have."""

SIDECAR = (
    "grpcio", "httptools", "huggingface-hub", "msgpack", "numpy",
    "opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-sdk", "orjson", "prometheus-client", "protobuf", "psutil", "pydantic",
    "pydantic-settings", "pyyaml", "pyzmq", "redis", "rich", "structlog", "typer", "uvloop",
    "xxhash",
)  # fmt: skip
"""Those dependencies of pyproject.toml that a worker with an attached server needs."""

TORCH_FAMILY = re.compile(r"(torch|triton|nvidia-.+|cuda-.+)==")
"""Matches torch and the packages that only its CUDA build needs. Images for CPUs install torch from
another index."""

HEADER = "# Made by `python -m tools.lock`; do not edit.\n"

Lock = Mapping[str, str]
"""Maps a requirement with its version and marker to its text with the hashes."""


def main() -> None:
    """Write all locks. Exits with 1 if uv is missing or can't resolve the requirements."""
    try:
        for name, lock in all_locks().items():
            write(LOCKS / f"{name}.txt", lock.values())
            print(f"{name}.txt: {len(lock)} packages")
    except BatonError as error:
        sys.exit(str(error))


def all_locks() -> dict[str, Lock]:
    """Return the lock of each file, by name. ``build`` has the packages that building our wheel
    needs, ``torch`` has torch and its CUDA packages, and ``base`` has the other packages that Baton
    requires. The lock of an extra has only the packages that the extra adds. The lock ``sidecar``
    has only those packages of ``base`` that :data:`SIDECAR` names or that these require.

    Raises Unavailable if uv is missing or can't resolve the requirements.
    """
    plain = compile_lock([])
    locks = {
        "build": compile_lock([], build=True),
        "torch": {name: text for name, text in plain.items() if TORCH_FAMILY.match(name)},
        "base": {name: text for name, text in plain.items() if not TORCH_FAMILY.match(name)},
    }
    for extra in EXTRAS:
        together = compile_lock([extra])
        locks[extra] = {name: together[name] for name in together.keys() - plain.keys()}
    sidecar = {name_of(each) for each in compile_sidecar()}
    locks["sidecar"] = {
        name: text for name, text in locks["base"].items() if name_of(name) in sidecar
    }
    return locks


def compile_sidecar() -> Lock:
    """Return the lock of :data:`SIDECAR` and everything that it requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [each for each in project["dependencies"] if name_of(each) in SIDECAR]
    options = ["-", "-c", "constraints.txt", "--python-version", MIN_PYTHON]
    return parse_lock(_compile(options, wanted))


def name_of(requirement: str) -> str:
    """Return the canonical name in a requirement like ``name==1.0 ; marker``."""
    return canonicalize_name(Requirement(requirement).name)


def compile_lock(extras: Sequence[str], build: bool = False) -> Lock:
    """Lock the dependencies in pyproject.toml, with ``extras``. If ``build`` is true, lock the
    packages that building our wheel needs instead."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    source = "-" if build else "pyproject.toml"
    options = [source, "-c", "constraints.txt", "--python-version", MIN_PYTHON]
    options += ["--generate-hashes", *(f"--extra={extra}" for extra in extras)]
    return parse_lock(_compile(options, requires))


def _compile(options: Sequence[str], requirements: Iterable[str]) -> str:
    """Return the output of ``uv pip compile`` with ``requirements`` as its standard input."""
    uv = shutil.which("uv")
    if uv is None:
        raise Unavailable("uv is not installed; run pip install uv")
    command = [uv, "pip", "compile", *options, "--universal", "--quiet"]
    command += ["--no-annotate", "--no-header"]
    answer = subprocess.run(
        command,
        cwd=ROOT,
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise Unavailable(f"uv can't resolve the requirements: {answer.stderr.strip()}")
    return answer.stdout


def parse_lock(text: str) -> dict[str, str]:
    """Return each requirement with its continuation lines (the hashes). The key is the
    requirement's first line, without the backslash."""
    entries = re.findall(r"^[^\s#].*(?:\n[ ]+.*)*", text, flags=re.MULTILINE)
    return {entry.splitlines()[0].rstrip(" \\"): entry for entry in entries}


def write(path: Path, entries: Iterable[str]) -> None:
    path.write_text(HEADER + "\n".join(sorted(entries)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
