"""Runs the programs in ``python`` and ``node``, each in the environment in which its client is
installed."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
PROGRAM_SECONDS = 480.0


class Environment(Enum):
    """The folders in which `make setup-clients` installs clients."""

    PYTHON = REPOSITORY / ".venv-clients"
    EVALUATION = REPOSITORY / ".clients" / "evaluation"
    LITELLM_PROXY = REPOSITORY / ".clients" / "litellm-proxy"
    AIDER = REPOSITORY / ".clients" / "aider"
    LOAD = REPOSITORY / ".clients" / "load"
    NODE = REPOSITORY / ".clients"


NODE_PROGRAMS = Environment.NODE.value / "programs"
"""Programs for Node.js run from here, since a module is searched for in ``node_modules`` of the
folders above the program."""


@dataclass(frozen=True)
class Program:
    """A program that runs some cases with one client over one API. ``packages`` are the client's
    packages, the main one first."""

    packages: tuple[str, ...]
    api: str
    environment: Environment
    file: str
    arguments: tuple[str, ...] = ()
    needs: str = ""
    """A command that must be installed."""

    @property
    def name(self) -> str:
        return " ".join([Path(self.file).stem, *self.arguments])

    @property
    def missing(self) -> str:
        """Why the program can't run on this machine; empty if it can."""
        if self.environment is Environment.NODE and shutil.which("node") is None:
            return "node is not installed: Node.js 20 or newer is needed"
        if self.needs and shutil.which(self.needs) is None:
            return f"{self.needs} is not installed"
        if not (self.environment.value / ".installed").exists():
            folder = self.environment.value.relative_to(REPOSITORY)
            return f"{folder} is not ready: run `make setup-clients`"
        return ""

    def run(self, variables: dict[str, str]) -> dict[str, Any]:
        """Run all cases of the program; return each case's ``result`` or ``error``."""
        if self.environment is Environment.NODE:
            _copy_node_programs()
        finished = subprocess.run(
            self._command(),
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=PROGRAM_SECONDS,
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        results: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
        return results

    def versions(self) -> dict[str, str]:
        """Return the installed version of each of ``packages``."""
        return {package: _version(self.environment, package) for package in self.packages}

    def _command(self) -> list[str]:
        if self.environment is Environment.NODE:
            return ["node", str(NODE_PROGRAMS / self.file), *self.arguments]
        python = self.environment.value / "bin" / "python"
        return [str(python), str(FOLDER / "python" / self.file), *self.arguments]


@cache
def _copy_node_programs() -> None:
    shutil.copytree(FOLDER / "node", NODE_PROGRAMS, dirs_exist_ok=True)


@cache
def _version(environment: Environment, package: str) -> str:
    if environment is Environment.NODE:
        described = environment.value / "node_modules" / package / "package.json"
        return str(json.loads(described.read_text())["version"])
    [folder] = environment.value.glob(
        f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info"
    )
    return folder.name.removesuffix(".dist-info").rpartition("-")[2]
