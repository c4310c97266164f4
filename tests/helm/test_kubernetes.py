"""Tests that every object is strictly valid by the schemas of three minor versions of
Kubernetes."""

import functools
from collections.abc import Iterator

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from tests.helm.chart import CHART, SCENARIOS, Object, release_of

VERSIONS = ("1.35", "1.36", "1.37")
OLDEST = "1.27"

FOREIGN = {
    "keda.sh/v1alpha1", "ray.io/v1", "cert-manager.io/v1", "monitoring.coreos.com/v1",
    "gateway.networking.k8s.io/v1",
}  # fmt: skip
"""API versions of custom resources, whose schemas are not part of Kubernetes."""


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    """Cache the schemas: they are some megabytes in size, and would be read again for every
    object."""
    read = functools.cache(kubernetes_validate.utils.schema_contents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", read)
        yield


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_objects_are_valid(scenario: str, version: str) -> None:
    for each in release_of(scenario).objects:
        if each["apiVersion"] not in FOREIGN:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_pod_templates_of_ray_clusters_are_valid(version: str) -> None:
    pods = [pod for pod in release_of("ray").pods() if pod.owner["kind"] == "RayCluster"]
    assert len(pods) == 2
    for pod in pods:
        whole: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
        kubernetes_validate.validate(whole | {"spec": pod.spec}, version, strict=True)


@pytest.mark.parametrize("scenario", ["demo", "gpu", "autoscaled"])
def test_objects_are_valid_for_the_oldest_supported_kubernetes(scenario: str) -> None:
    """The tested scenarios leave out custom resources, whose schemas are not part of Kubernetes,
    and weights from an OCI image, which need a newer Kubernetes."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    for each in release_of(scenario).objects:
        kubernetes_validate.validate(each, OLDEST, strict=True)


def test_a_wrong_object_is_not_valid() -> None:
    """A misspelled field is found, which proves that the schemas are loaded and validation is
    strict."""
    wrong: Object = {"apiVersion": "v1", "kind": "Service", "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError, match="prots"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_crds_are_needed_only_for_optional_features() -> None:
    for scenario in ("demo", "gpu", "autoscaled"):
        assert not {each["apiVersion"] for each in release_of(scenario).objects} & FOREIGN
    assert {each["apiVersion"] for each in release_of("everything").objects} & FOREIGN == (
        FOREIGN - {"ray.io/v1"}
    )
