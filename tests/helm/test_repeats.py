"""Tests that the chart refuses values that give something a name that is taken. Kubernetes would
refuse that object only when it is applied."""

import pytest

from tests.helm.chart import Object, make_values, release_of, render
from tests.helm.test_problems import problems

SIDECAR = {"name": "proxy", "image": "example.com/proxy:1"}
IS_OURS = "which this chart sets itself: leave it out"


def volume(name: str) -> Object:
    return {"name": name, "emptyDir": {}}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            make_values(router__extraEnv=[{"name": "BATON_HOME", "value": "/data"}]),
            ["router.extraEnv repeats BATON_HOME, which the pod has already: leave it out"],
        ),
        (
            make_values(
                poolDefaults__settings__threads=2,
                pools__decode__extraEnv=[{"name": "BATON_THREADS", "value": "3"}],
            ),
            [
                "pools.decode.extraEnv repeats BATON_THREADS, which the pod has already: leave it"
                " out"
            ],
        ),
        (
            make_values(conductor__extraEnv=[{"name": "A", "value": "1"}] * 2),
            ["conductor.extraEnv repeats A, which the pod has already: leave it out"],
        ),
        (
            make_values(
                pools__prefill__extraVolumes=[volume("tmp")],
                pools__prefill__extraVolumeMounts=[{"name": "tmp", "mountPath": "/tmp/"}],
            ),
            [
                "pools.prefill.extraVolumeMounts repeats /tmp, which the pod has already: leave it"
                " out",
                "pools.prefill.extraVolumes repeats tmp, which the pod has already: give it another"
                " name",
            ],
        ),
        (
            make_values(kvstore__enabled=True, kvstore__extraVolumes=[volume("disk")]),
            ["kvstore.extraVolumes repeats disk, which the pod has already: give it another name"],
        ),
        (
            make_values(router__initContainers=[SIDECAR], router__extraContainers=[SIDECAR]),
            [
                "router.extraContainers or initContainers repeats proxy, which the pod has already:"
                " give it another name"
            ],
        ),
        (
            make_values(router__extraContainers=[SIDECAR | {"name": "baton"}]),
            [
                "router.extraContainers or initContainers repeats baton, which the pod has already:"
                " give it another name"
            ],
        ),
        (
            make_values(
                poolDefaults__podLabels={"baton.dev/role": "x"},
                pools__decode__podAnnotations={"checksum/config": "x"},
                pools__prefill__podLabels={"app.kubernetes.io/name": "x"},
            ),
            [
                f"pools.decode.podLabels repeats baton.dev/role, {IS_OURS}",
                f"pools.decode.podAnnotations repeats checksum/config, {IS_OURS}",
            ],
        ),
        (
            make_values(redis__podAnnotations={"checksum/valkey": "x"}),
            [f"redis.podAnnotations repeats checksum/valkey, {IS_OURS}"],
        ),
        (
            make_values(ray__enabled=True, ray__podLabels={"baton.dev/cluster": "x"}),
            [f"ray.podLabels repeats baton.dev/cluster, {IS_OURS}"],
        ),
        (
            make_values(
                commonAnnotations={"baton.dev/replicas-managed-by": "me"},
                commonLabels={"team": "a", "helm.sh/chart": "x"},
                monitoring__labels={"team": "b", "baton.dev/role": "x"},
                monitoring__dashboards__labels={"team": "b"},
            ),
            [
                f"commonLabels repeats helm.sh/chart, {IS_OURS}",
                "monitoring.dashboards.labels repeats team, which is in commonLabels: keep one",
                f"monitoring.labels repeats baton.dev/role, {IS_OURS}",
                "monitoring.labels repeats team, which is in commonLabels: keep one",
                f"commonAnnotations repeats baton.dev/replicas-managed-by, {IS_OURS}",
            ],
        ),
    ],
)  # fmt: skip
def test_repeated_names_are_refused_by_name(values: Object, found: list[str]) -> None:
    assert problems(values) == found


def test_every_label_of_the_chart_is_refused_as_a_common_label() -> None:
    own = {
        key
        for each in release_of("everything").objects
        for key in each["metadata"].get("labels", {})
        if "." in key and "example.com" not in key
    }
    assert len(own) >= 10
    reported = problems(make_values(commonLabels=dict.fromkeys(own, "x")))
    assert reported == [f"commonLabels repeats {key}, {IS_OURS}" for key in sorted(own)]


def test_other_names_are_accepted() -> None:
    pod = {
        "extraEnv": [{"name": "UCX_TLS", "value": "tcp"}],
        "extraVolumes": [volume("more")],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/tmp/more"}],
        "extraContainers": [SIDECAR],
        "podLabels": {"team": "a"},
        "podAnnotations": {"team": "a"},
    }
    values = make_values(poolDefaults=pod, router=pod, conductor=pod, commonLabels={"team": "b"})
    assert len(render(values).serving()) == 4
