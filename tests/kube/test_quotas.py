"""Tests that the API server of this package applies ResourceQuotas, which bound sums over the pods
of a namespace."""

import pytest

from baton.clock import ManualClock
from tests.kube.api import Api
from tests.kube.controllers.manager import Controllers
from tests.kube.failures import Refused
from tests.kube.kinds import DEPLOYMENT, EVENT, POD, QUOTA, Object

GPU = "nvidia.com/gpu"


@pytest.fixture
def api() -> Api:
    return Api(ManualClock(1_000_000.0))


def limit(api: Api, hard: Object, **spec: object) -> None:
    metadata = {"name": "team", "namespace": "default"}
    api.create(QUOTA, {"metadata": metadata, "spec": {"hard": hard, **spec}})


def container(name: str = "c", **resources: Object) -> Object:
    return {"name": name, "image": "x:1", "resources": resources}


def add_pod(api: Api, name: str, *containers: Object, **more: object) -> None:
    spec = {"containers": list(containers), **more}
    api.create(POD, {"metadata": {"name": name, "namespace": "default"}, "spec": spec})


def refusal(api: Api, name: str, *containers: Object, **more: object) -> str:
    with pytest.raises(Refused) as refused:
        add_pod(api, name, *containers, **more)
    assert refused.value.code == 403
    return str(refused.value)


def test_a_pod_that_exceeds_a_sum_is_refused_until_another_is_deleted(api: Api) -> None:
    limit(api, {"requests.cpu": "2", "limits.memory": "4Gi", f"requests.{GPU}": "1", "pods": "9"})
    big = container(requests={"cpu": "1500m"}, limits={"memory": "3Gi", GPU: 1})
    add_pod(api, "a", big)
    assert refusal(api, "b", big) == (
        'pods "b" is forbidden: exceeded quota: team, requested: limits.memory=3Gi,requests.cpu='
        f"1500m,requests.{GPU}=1, used: limits.memory=3Gi,requests.cpu=1500m,requests.{GPU}=1, "
        f"limited: limits.memory=4Gi,requests.cpu=2,requests.{GPU}=1"
    )
    add_pod(api, "small", container(requests={"cpu": "500m"}, limits={"memory": "1Gi"}))
    api.delete(POD, "default", "a", {"gracePeriodSeconds": 0})
    add_pod(api, "b", big)


def test_pods_are_counted_unless_they_have_finished(api: Api) -> None:
    limit(api, {"pods": "1"})
    add_pod(api, "a", container())
    message = "exceeded quota: team, requested: pods=1, used: pods=1, limited: pods=1"
    assert refusal(api, "b", container()).endswith(message)
    pod = api.store.get(POD, "default", "a")
    pod["status"] = {"phase": "Succeeded"}
    api.set_status(POD, pod)
    add_pod(api, "b", container())


def test_containers_add_up_and_init_containers_run_before_them(api: Api) -> None:
    limit(api, {"cpu": "3"})
    one, two = (container(name, requests={"cpu": "1"}) for name in ("one", "two"))
    four = container("four", requests={"cpu": "4"})
    assert "requested: cpu=4, used: cpu=0" in refusal(api, "a", one, initContainers=[four])
    assert "requested: cpu=5, used: cpu=0" in refusal(api, "a", one, four)
    add_pod(api, "a", one, two, initContainers=[container(limits={"cpu": "3"})])
    assert "requested: cpu=1, used: cpu=3" in refusal(api, "b", one)


def test_a_quota_for_other_pods_does_not_count_these(api: Api) -> None:
    limit(api, {"pods": "0"}, scopes=["Terminating"])
    add_pod(api, "a", container())


def test_a_deployment_gets_the_pods_that_fit_and_the_others_later(api: Api) -> None:
    limit(api, {"pods": "2", "services": "5"})
    template = {"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [container()]}}
    spec = {"replicas": 3, "selector": {"matchLabels": {"app": "a"}}, "template": template}
    api.create(DEPLOYMENT, {"metadata": {"name": "a", "namespace": "default"}, "spec": spec})
    controllers = Controllers(api)
    for _ in range(5):  # the controllers never settle, since each attempt records an event
        controllers.reconcile_once()
    assert len(api.store.all(POD)) == 2
    assert "exceeded quota: team, requested: pods=1, used: pods=2" in str(api.store.all(EVENT))
    status = {"hard": {"pods": "2", "services": "5"}, "used": {"pods": "2"}}
    assert api.store.get(QUOTA, "default", "team")["status"] == status
    quota = api.store.get(QUOTA, "default", "team")
    quota["spec"]["hard"]["pods"] = "5"
    api.update(QUOTA, quota)
    controllers.settle()
    assert len(api.store.all(POD)) == 3
