"""Check that Baton's dependencies have wheels for each platform.

    python -m tools.platform_wheels [--extra dev] [--python 3.12] [PLATFORM ...]

pip can be told for which platform to choose wheels, but it evaluates the markers of requirements
(``; sys_platform == "linux"``) for the machine that it runs on. So this tool walks the requirements
itself: it evaluates each marker for the platform, and asks pip only which wheel of each package it
would install there (``--dry-run --no-deps``), and with it what that wheel requires. Versions are
those of constraints.txt. Nothing is installed. Exit code 1: a wheel is missing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PIP_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Platform:
    """``tags`` are the platform tags of the wheels that run there."""

    name: str
    tags: tuple[str, ...]
    sys_platform: str
    machine: str

    def environment(self, python: str) -> dict[str, str]:
        """Return the values of a marker's variables."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": {"darwin": "Darwin", "linux": "Linux"}[self.sys_platform],
            "platform_version": "",
            "python_full_version": f"{python}.0",
            "python_version": python,
            "sys_platform": self.sys_platform,
        }


def _linux(machine: str) -> Platform:
    """A Linux with glibc 2.34 or newer (Debian 12, Ubuntu 22.04, RHEL 9)."""
    new = [f"manylinux_2_{minor}_{machine}" for minor in range(34, 16, -1)]
    return Platform(f"linux-{machine}", (*new, f"manylinux2014_{machine}"), "linux", machine)


PLATFORMS = (
    Platform("macos-arm64", ("macosx_14_0_arm64",), "darwin", "arm64"),
    _linux("aarch64"),
    _linux("x86_64"),
)


@dataclass
class Resolution:
    """What a platform would get: ``wheels`` are the files by package; ``excluded`` are the packages
    whose markers exclude this platform; ``missing`` are requirements without a wheel."""

    wheels: dict[str, str] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)


def project_requirements(extra: str) -> list[str]:
    """Return the requirements in pyproject.toml, with those of ``extra`` if it is not empty."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *_with_own_extras(project, [extra] if extra else [])]


def _with_own_extras(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Return the requirements of ``extras``; an extra may name others (``baton[load]``)."""
    found: list[str] = []
    for extra in extras:
        for text in project["optional-dependencies"][extra]:
            requirement = Requirement(text)
            if requirement.name == project["name"]:
                found += _with_own_extras(project, sorted(requirement.extras))
            else:
                found.append(text)
    return found


def read_pins() -> dict[str, str]:
    """Return the version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def resolve(requirements: list[str], platform: Platform, python: str) -> Resolution:
    """Walk the requirements, one level of packages per call of pip."""
    environment, pins, result = platform.environment(python), read_pins(), Resolution()
    level = [(Requirement(text), frozenset({""})) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while level:
        extras = _active_extras(level, environment, result)
        new = {
            name: wanted
            for name, wanted in extras.items()
            if not {(name, each) for each in wanted} <= seen
        }
        seen |= {(name, each) for name, wanted in new.items() for each in wanted}
        specifiers = {str(canonicalize_name(one.name)): str(one.specifier) for one, _ in level}
        texts = [
            f"{name}=={pins[name]}" if name in pins else f"{name}{specifiers[name]}" for name in new
        ]
        found = choose_wheels(texts, platform, python, result)
        level = [
            (Requirement(text), frozenset(new[name]))
            for name, requires in found.items()
            for text in requires
        ]
    result.excluded -= result.wheels.keys()
    return result


def _active_extras(
    level: list[tuple[Requirement, frozenset[str]]],
    environment: dict[str, str],
    result: Resolution,
) -> dict[str, set[str]]:
    """Return the packages whose markers hold, with the extras that are wanted of each ("" is the
    package itself). Each requirement comes with the extras of the package that requires it."""
    active: dict[str, set[str]] = {}
    for requirement, extras in level:
        name, marker = str(canonicalize_name(requirement.name)), requirement.marker
        if marker is None or any(marker.evaluate({**environment, "extra": e}) for e in extras):
            active.setdefault(name, set()).update({"", *requirement.extras})
        elif "extra" not in str(marker):
            result.excluded.add(name)
    return active


def choose_wheels(
    requirements: list[str], platform: Platform, python: str, result: Resolution
) -> dict[str, list[str]]:
    """Add the wheels that pip would install to ``result``, and the requirements that have none.
    Return what each wheel requires, by package."""
    report = _ask_pip(requirements, platform, python)
    if report is None and len(requirements) > 1:  # find out which of them has none
        parts = [choose_wheels([each], platform, python, result) for each in requirements]
        return {name: requires for part in parts for name, requires in part.items()}
    if report is None:
        result.missing += requirements
        return {}
    found: dict[str, list[str]] = {}
    for item in report:
        name = canonicalize_name(item["metadata"]["name"])
        result.wheels[name] = item["download_info"]["url"].rpartition("/")[2]
        found[name] = item["metadata"].get("requires_dist", [])
    return found


def _ask_pip(requirements: list[str], platform: Platform, python: str) -> list[Any] | None:
    """Return the packages of pip's report, or None if a requirement has no wheel."""
    if not requirements:
        return []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps",
            "--ignore-installed", "--only-binary=:all:", "--python-version", python,
            *(word for tag in platform.tags for word in ("--platform", tag)),
            "--target", folder, "--report", str(report), *requirements,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PIP_SECONDS
        )
        if done.returncode == 0:
            packages: list[Any] = json.loads(report.read_text(encoding="utf-8"))["install"]
            return packages
    if "No matching distribution" in done.stderr:
        return None
    raise RuntimeError(f"pip failed: {done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [platform.name for platform in PLATFORMS]
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=", ".join(names))
    parser.add_argument("--extra", default="", help="also an extra of pyproject.toml, e.g. dev")
    parser.add_argument("--python", default="3.12", help="Python's version (3.12)")
    parser.add_argument("--verbose", action="store_true", help="list the wheels")
    arguments = parser.parse_args()
    if unknown := set(arguments.platforms) - set(names):
        parser.error(f"unknown platforms {sorted(unknown)}; known are {', '.join(names)}")
    num_missing = 0
    for platform in PLATFORMS:
        if arguments.platforms and platform.name not in arguments.platforms:
            continue
        result = resolve(project_requirements(arguments.extra), platform, arguments.python)
        num_missing += len(result.missing)
        state = f"MISSING: {', '.join(result.missing)}" if result.missing else "complete"
        excluded = ", ".join(sorted(result.excluded)) or "none"
        print(f"{platform.name}: {len(result.wheels)} wheels, {state}; excluded: {excluded}")
        if arguments.verbose:
            print("".join(f"  {wheel}\n" for wheel in sorted(result.wheels.values())), end="")
    return 1 if num_missing else 0


if __name__ == "__main__":
    sys.exit(main())
