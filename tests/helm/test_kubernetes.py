"""Kubernetes itself would take every object: its own schemas, strictly, of three minor versions."""

import functools
from collections.abc import Iterator

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from tests.helm.chart import CHART, SCENARIOS, Object, released

VERSIONS = ("1.35", "1.36", "1.37")
OLDEST = "1.27"

FOREIGN = {
    "keda.sh/v1alpha1", "ray.io/v1", "cert-manager.io/v1", "monitoring.coreos.com/v1",
    "gateway.networking.k8s.io/v1",
}  # fmt: skip
"""Of CRDs, whose schemas Kubernetes doesn't carry."""


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    """Each is some megabytes, and would be read for every object."""
    read = functools.cache(kubernetes_validate.utils.schema_contents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", read)
        yield


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_objects_are_valid(scenario: str, version: str) -> None:
    for each in released(scenario).objects:
        if each["apiVersion"] not in FOREIGN:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_ray_makes_pods_from_is_valid(version: str) -> None:
    pods = [pod for pod in released("ray").pods() if pod.owner["kind"] == "RayCluster"]
    assert len(pods) == 2
    for pod in pods:
        whole: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
        kubernetes_validate.validate(whole | {"spec": pod.spec}, version, strict=True)


@pytest.mark.parametrize("scenario", ["demo", "gpu", "autoscaled"])
def test_the_oldest_kubernetes_takes_what_it_knows(scenario: str) -> None:
    """All but weights from an OCI image, and what is somebody else's."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    for each in released(scenario).objects:
        kubernetes_validate.validate(each, OLDEST, strict=True)


def test_a_wrong_object_is_not_valid() -> None:
    """The schemas are there, and are strict."""
    wrong: Object = {"apiVersion": "v1", "kind": "Service", "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError, match="prots"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_only_what_was_asked_for_needs_a_crd() -> None:
    for scenario in ("demo", "gpu", "autoscaled"):
        assert not {each["apiVersion"] for each in released(scenario).objects} & FOREIGN
    assert {each["apiVersion"] for each in released("everything").objects} & FOREIGN == (
        FOREIGN - {"ray.io/v1"}
    )
