"""Tests that the images install only packages whose hashes are locked, and that the locks match
pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import lock, pins

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
LOCKS = sorted(path.stem for path in lock.LOCKS.glob("*.txt"))
TAG, COMMIT, DIGEST = "v4", "0123456789abcdef" * 2 + "01234567", "sha256:" + "ab" * 32


def locked(name: str) -> dict[str, Requirement]:
    """Return a lock's requirements by canonical name."""
    lines = lock.parse_lock((lock.LOCKS / f"{name}.txt").read_text())
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name): each for each in requirements}


def version(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return specifier.version


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    return {canonicalize_name(name): version for name, version in pairs}


def test_there_is_a_lock_for_each_part_of_an_image() -> None:
    assert sorted(("build", "torch", "base", "sidecar", *lock.EXTRAS)) == LOCKS


@pytest.mark.parametrize("name", LOCKS)
def test_each_locked_package_has_one_version_and_hashes(name: str) -> None:
    text = (lock.LOCKS / f"{name}.txt").read_text()
    assert text.startswith(lock.HEADER)
    for entry in lock.parse_lock(text).values():
        assert re.findall(r"--hash=sha256:[0-9a-f]{64}", entry), entry
        assert re.match(r"[\w.-]+==\S+", entry), entry


@pytest.mark.parametrize("name", LOCKS)
def test_locked_versions_are_those_that_tests_run_with(name: str) -> None:
    tested = constraints()
    for package, requirement in locked(name).items():
        if package in tested:
            assert version(requirement) == tested[package], package


def test_locks_have_every_dependency_of_the_project() -> None:
    parts = {"": PROJECT["dependencies"]} | PROJECT["optional-dependencies"]
    everything = locked("base") | locked("torch")
    for name in ("", *lock.EXTRAS):
        together = everything | (locked(name) if name else {})
        for line in parts[name]:
            wanted = Requirement(line)
            found = together[canonicalize_name(wanted.name)]
            assert wanted.specifier.contains(Version(version(found))), line


def test_the_sidecar_gets_a_part_of_the_other_images_packages() -> None:
    sidecar, base = locked("sidecar"), locked("base")
    assert all(base[name] == requirement for name, requirement in sidecar.items())
    assert set(lock.SIDECAR) <= sidecar.keys()
    assert sidecar.keys().isdisjoint({"torch", "nixl-cu13", "tokenizers", "fastapi", "safetensors"})


def test_an_image_installs_nothing_that_is_not_locked() -> None:
    installs = re.findall(r"\bpip (?:--python \S+ )?(?:install|wheel)\b[^\n]*", DOCKERFILE)
    assert len(installs) == 5
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


def test_releases_are_scanned_and_pushed_only_when_pinned() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text())
    steps = workflow["jobs"]["image"]["steps"]
    names = [step.get("name", "") for step in steps]
    scan = steps[names.index("Scan it")]
    assert scan["with"]["fail-build"] is True and "if" not in scan
    last = names.index("Push, with SBOM and provenance")
    assert names.index("Scan it") < names.index("Actions and base images are pinned") < last
    assert steps[names.index("Actions and base images are pinned")]["run"] == (
        "python3 -m tools.pins"
    )


def test_unpinned_references_are_found(tmp_path: Path) -> None:
    path = tmp_path / "workflow.yml"
    path.write_text(
        "# syntax=docker/dockerfile:1\n"
        f"ARG PYTHON_IMAGE=python:3.12.11-slim@{DIGEST}\n"
        "ARG NODE_IMAGE=node:24\n"
        "- uses: actions/checkout@v4\n"
        f"- uses: actions/checkout@{COMMIT} # v4\n"
    )
    found = [(pin.line, pin.is_pinned) for pin in pins.find_references(path)]
    assert found == [(1, False), (2, True), (3, False), (4, False), (5, True)]


def test_tags_are_replaced_by_pinned_digests() -> None:
    lookups: list[tuple[str, str]] = []

    def commit_of(repository: str, tag: str) -> str:
        lookups.append((repository, tag))
        return COMMIT

    def digest_of(name: str, tag: str) -> str:
        lookups.append((name, tag))
        return DIGEST

    text = (
        "# syntax=docker/dockerfile:1\n- uses: actions/checkout@v4\n- uses: a/b/sub@v2.1 # v2.1\n"
    )
    expected = (
        f"# syntax=docker/dockerfile:1@{DIGEST}\n- uses: actions/checkout@{COMMIT} # v4\n"
        f"- uses: a/b/sub@{COMMIT} # v2.1\n"
    )
    assert pins.pin_references(text, commit_of, digest_of) == expected
    assert pins.pin_references(expected, commit_of, digest_of) == expected
    assert lookups[:3] == [("actions/checkout", "v4"), ("a/b", "v2.1"), ("docker/dockerfile", "1")]


def test_every_action_and_base_image_is_known_to_the_check() -> None:
    texts = {path: path.read_text() for path in pins.files_with_references()}
    num_named = sum(text.count("uses:") for text in texts.values()) + 2
    assert sum(len(pins.find_references(path)) for path in texts) == num_named
