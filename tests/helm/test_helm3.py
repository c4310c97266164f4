"""Helm 3 makes the same objects as Helm 4, and its linter has nothing to say. Where it can't be had
(no npm, or no network) that is said, and nothing is shown."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.helm3_parity import (
    ROOT,
    VALUES,
    NoHelm,
    differences,
    fetch_helm3,
    lint_by_3,
    rendered_by_3,
    rendered_by_4,
)


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    try:
        yield fetch_helm3(tmp_path_factory.mktemp("helm3"))
    except NoHelm as error:
        pytest.skip(f"no Helm 3 here: {error}")


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.name)
def test_both_make_the_same_objects(helm: Path, values: Path) -> None:
    assert differences(rendered_by_3(helm, values), rendered_by_4(values)) == []


def test_helm_3_lints(helm: Path) -> None:
    lint_by_3(helm, ROOT / "tests/helm/values/everything.yaml")


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("pools.decode.replica=3", "Additional property replica is not allowed"),
        ("settings.max_runing=3", "Additional property max_runing is not allowed"),
        ("redis.enabled=false", "there is no Redis"),
    ],
)
def test_helm_3_refuses_the_same(helm: Path, tmp_path: Path, flag: str, told: str) -> None:
    path, value = flag.split("=")
    outer, *inner = path.split(".")
    text = f"{outer}: " + "".join("{" + part + ": " for part in inner) + value + "}" * len(inner)
    values = tmp_path / "values.yaml"
    values.write_text(text)
    with pytest.raises(NoHelm, match=told):
        rendered_by_3(helm, values)


def test_what_differs_is_named() -> None:
    first = {("Service", "a"): {"port": 1}, ("Service", "b"): {}}
    second = {("Service", "a"): {"port": 2}, ("Service", "c"): {}}
    assert differences(first, second) == ["Service a", "Service b", "Service c"]
    assert differences(first, first) == []
