"""Tests the controllers step by step, with a fake kubelet whose pods change only when a test says
so."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.clock import ManualClock
from tests.kube import instant
from tests.kube.api import Api
from tests.kube.controllers.manager import Controllers
from tests.kube.controllers.replica_set import COST
from tests.kube.failures import Refused
from tests.kube.kinds import (
    BUDGET,
    CLAIM,
    DEPLOYMENT,
    ENDPOINTS,
    JOB,
    NAMESPACE,
    NODE,
    POD,
    REPLICA_SET,
    SERVICE,
    SLICE,
    STATEFUL_SET,
    Kind,
    Object,
)
from tests.kube.pods import is_being_deleted
from tests.kube.quantities import quantity
from tests.kube.request import Request
from tests.kube.selectors import labels_match
from tests.kube.subresources import condition, evict, is_ready


class Rig:
    """An API server with controllers and two nodes. ``settle`` returns once all placed pods run,
    all deleted pods are gone, and no object changes any more."""

    def __init__(self) -> None:
        self.clock = ManualClock(1_000_000.0)
        self.api = Api(self.clock)
        self.controllers = Controllers(self.api)
        for name in ("n1", "n2"):
            instant.add_node(self.api, name)

    def settle(self, ready: bool = True) -> None:
        for _ in range(100):
            before = self.api.store.version
            self.controllers.settle()
            instant.run_placed_pods(self.api, ready)
            instant.remove_deleted_pods(self.api)
            self.clock.advance(1)
            if self.api.store.version == before:
                return
        raise AssertionError("the controllers still change objects after 100 rounds")

    def create(self, kind: Kind, name: str, spec: Object) -> Object:
        return self.api.create(kind, {"metadata": {"name": name, "namespace": "default"},
                                      "spec": spec})  # fmt: skip

    def change(self, kind: Kind, name: str, change: Callable[[Object], None]) -> Object:
        found = self.api.store.get(kind, "default" if kind.namespaced else "", name)
        change(found)
        return self.api.update(kind, found)

    def pods(self, selector: str = "") -> list[Object]:
        found = self.api.store.all(POD)
        return [pod for pod in found if labels_match(selector, pod["metadata"].get("labels", {}))]

    def names(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.pods() if not is_being_deleted(pod)}

    def deploy(self, replicas: int = 3, **more: Any) -> None:
        self.create(DEPLOYMENT, "web", {**workload("web", replicas), **more})
        self.settle()

    def scale(self, replicas: int) -> None:
        self.change(DEPLOYMENT, "web", lambda found: found["spec"].update(replicas=replicas))
        self.controllers.settle()

    def new_image(self, image: str) -> None:
        def change(found: Object) -> None:
            found["spec"]["template"]["spec"]["containers"][0]["image"] = image

        self.change(DEPLOYMENT, "web", change)

    def status(self, kind: Kind, name: str = "web") -> Object:
        status: Object = self.api.store.get(kind, "default", name)["status"]
        return status


def pod_spec() -> Object:
    container: Object = {"name": "c", "image": "x:1"}
    container["ports"] = [{"name": "http", "containerPort": 8000}]
    return {"containers": [container]}


def workload(name: str, replicas: int) -> Object:
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": pod_spec()}
    return {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}


@pytest.fixture
def rig() -> Rig:
    return Rig()


# -- deployments -------------------------------------------------------------------------------


def test_a_deployment_gets_ready_pods_spread_over_the_nodes(rig: Rig) -> None:
    rig.deploy(4)
    nodes = sorted(pod["spec"]["nodeName"] for pod in rig.pods("app=web"))
    assert nodes == ["n1", "n1", "n2", "n2"]
    status = rig.status(DEPLOYMENT)
    assert status["readyReplicas"] == status["updatedReplicas"] == 4
    assert condition({"status": status}, "Available") == "True"
    reasons = {each["type"]: each["reason"] for each in status["conditions"]}
    assert reasons["Progressing"] == "NewReplicaSetAvailable"


def test_a_rolling_update_respects_max_surge_and_max_unavailable(rig: Rig) -> None:
    rig.deploy(4, strategy={"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}})
    rig.new_image("x:2")
    counts = set()
    for _ in range(40):
        rig.controllers.settle()
        alive = [pod for pod in rig.pods("app=web") if not is_being_deleted(pod)]
        counts.add((len(alive), sum(map(is_ready, alive))))
        instant.run_placed_pods(rig.api)
        instant.remove_deleted_pods(rig.api)
    assert min(ready for _, ready in counts) == 3 and max(count for count, _ in counts) == 5
    assert {pod["spec"]["containers"][0]["image"] for pod in rig.pods()} == {"x:2"}


def test_without_surge_an_old_pod_is_deleted_first(rig: Rig) -> None:
    rig.deploy(2, strategy={"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}})
    rig.new_image("x:2")
    rig.controllers.settle()
    assert [is_being_deleted(pod) for pod in rig.pods()].count(True) == 1
    assert len(rig.names()) == 2, "the new pod exists, whether or not a node has space for it"


def test_a_rollout_that_never_gets_ready_fails_after_its_deadline(rig: Rig) -> None:
    rig.deploy(3, strategy={"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}})
    rig.new_image("broken:1")
    rig.settle(ready=False)
    images = [pod["spec"]["containers"][0]["image"] for pod in rig.pods() if is_ready(pod)]
    assert images == ["x:1"] * 3
    rig.clock.advance(601)
    rig.controllers.settle()
    assert condition({"status": rig.status(DEPLOYMENT)}, "Progressing") == "False"


def test_the_progress_deadline_counts_from_the_start_of_the_rollout(rig: Rig) -> None:
    rig.deploy(2, progressDeadlineSeconds=100)
    rig.clock.advance(1000)
    rig.new_image("x:2")
    rig.controllers.settle()
    rig.clock.advance(50)
    rig.controllers.settle()
    assert condition({"status": rig.status(DEPLOYMENT)}, "Progressing") == "True"
    rig.settle()
    for pod in rig.pods():
        instant.set_ready(rig.api, pod, False)
    rig.clock.advance(1000)
    rig.controllers.settle()
    status = rig.status(DEPLOYMENT)
    assert status["availableReplicas"] == 0
    assert condition({"status": status}, "Progressing") == "True", "the rollout had completed"


def test_a_rollback_reuses_the_old_replica_set(rig: Rig) -> None:
    rig.deploy(2)
    first = {pod["metadata"]["labels"]["pod-template-hash"] for pod in rig.pods()}
    rig.new_image("x:2")
    rig.settle()
    rig.new_image("x:1")
    rig.settle()
    assert {pod["metadata"]["labels"]["pod-template-hash"] for pod in rig.pods()} == first
    revisions = [
        each["metadata"]["annotations"]["deployment.kubernetes.io/revision"]
        for each in rig.api.store.all(REPLICA_SET)
    ]
    assert sorted(revisions) == ["2", "3"]


def test_recreate_waits_until_the_old_pods_are_gone(rig: Rig) -> None:
    rig.deploy(2, strategy={"type": "Recreate"})
    rig.new_image("x:2")
    rig.controllers.settle()
    assert [is_being_deleted(pod) for pod in rig.pods()] == [True, True]
    rig.settle()
    assert {pod["spec"]["containers"][0]["image"] for pod in rig.pods()} == {"x:2"}


def test_old_replica_sets_beyond_the_history_limit_are_deleted(rig: Rig) -> None:
    rig.deploy(1, revisionHistoryLimit=1)
    for number in range(2, 5):
        rig.new_image(f"x:{number}")
        rig.settle()
    assert len(rig.api.store.all(REPLICA_SET)) == 2


# -- which pod is deleted ----------------------------------------------------------------------


def test_the_pod_with_the_lowest_deletion_cost_is_deleted(rig: Rig) -> None:
    rig.deploy(3)
    victim = sorted(rig.names())[1]
    metadata = {"annotations": {COST: "-2147483647"}}
    rig.change(POD, victim, lambda found: found["metadata"].update(metadata))
    rig.scale(2)
    assert victim not in rig.names() and len(rig.names()) == 2


def test_unplaced_and_unready_pods_are_deleted_before_the_cheapest(rig: Rig) -> None:
    rig.deploy(3)
    cheap, unready, _ = sorted(rig.names())
    metadata = {"annotations": {COST: "-2147483647"}}
    rig.change(POD, cheap, lambda found: found["metadata"].update(metadata))
    instant.set_ready(rig.api, rig.api.store.get(POD, "default", unready), False)
    for node in ("n1", "n2"):
        rig.change(NODE, node, lambda found: found["spec"].update(unschedulable=True))
    rig.scale(4)
    assert len(rig.names()) == 4
    rig.scale(3)
    assert {cheap, unready} < rig.names(), "the pod that was never placed was deleted"
    rig.scale(2)
    assert cheap in rig.names() and unready not in rig.names()
    rig.scale(1)
    assert cheap not in rig.names()


def test_among_equal_pods_the_newest_is_deleted(rig: Rig) -> None:
    rig.deploy(2)
    old = rig.names()
    rig.clock.advance(100)
    rig.scale(3)
    rig.settle()
    rig.scale(2)
    assert rig.names() == old


# -- other workloads ---------------------------------------------------------------------------


def test_stateful_pods_have_numbers_claims_and_start_in_order(rig: Rig) -> None:
    template = {"metadata": {"name": "data"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}},
    }}  # fmt: skip
    spec = {**workload("db", 2), "serviceName": "db", "volumeClaimTemplates": [template]}
    rig.create(STATEFUL_SET, "db", spec)
    rig.controllers.settle()
    assert rig.names() == {"db-0"}, "the second pod waits for the first one"
    rig.settle()
    assert rig.names() == {"db-0", "db-1"}
    claims = [claim["metadata"]["name"] for claim in rig.api.store.all(CLAIM)]
    assert claims == ["data-db-0", "data-db-1"]
    rig.change(STATEFUL_SET, "db", lambda found: found["spec"].update(replicas=1))
    rig.settle()
    assert rig.names() == {"db-0"} and len(rig.api.store.all(CLAIM)) == 2
    status = rig.status(STATEFUL_SET, "db")
    assert status["currentRevision"] == status["updateRevision"]


def test_stateful_pods_are_updated_from_the_last_to_the_first(rig: Rig) -> None:
    rig.create(STATEFUL_SET, "db", {**workload("db", 2), "serviceName": "db"})
    rig.settle()

    def change(found: Object) -> None:
        found["spec"]["template"]["spec"]["containers"][0]["image"] = "x:2"

    rig.change(STATEFUL_SET, "db", change)
    rig.controllers.settle()
    leaving = [pod["metadata"]["name"] for pod in rig.pods() if is_being_deleted(pod)]
    assert leaving == ["db-1"]
    rig.settle()
    assert {pod["spec"]["containers"][0]["image"] for pod in rig.pods()} == {"x:2"}


def test_a_job_retries_until_its_backoff_limit(rig: Rig) -> None:
    template = {"spec": {**pod_spec(), "restartPolicy": "Never"}}
    rig.create(JOB, "once", {"template": template, "backoffLimit": 1})
    rig.settle()

    def end(phase: str) -> None:
        for pod in rig.pods():
            if pod["status"]["phase"] == "Running":
                rig.api.set_status(POD, {**pod, "status": {**pod["status"], "phase": phase}})
        rig.settle()

    end("Failed")
    assert len(rig.pods()) == 2 and condition({"status": rig.status(JOB, "once")}, "Failed") == (
        "Unknown"
    )
    end("Failed")
    assert condition({"status": rig.status(JOB, "once")}, "Failed") == "True"


# -- services, budgets, nodes ------------------------------------------------------------------


def addresses(rig: Rig) -> list[str]:
    subsets = rig.api.store.get(ENDPOINTS, "default", "web")["subsets"]
    return sorted(a["ip"] for subset in subsets for a in subset.get("addresses", []))


@pytest.mark.parametrize("always", [False, True])
def test_a_terminating_pod_is_an_endpoint_only_with_publish_not_ready_addresses(
    rig: Rig, always: bool
) -> None:
    spec = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]}
    rig.create(SERVICE, "web", {**spec, "publishNotReadyAddresses": always})
    rig.deploy(2)
    assert len(addresses(rig)) == 2
    rig.api.delete(POD, "default", min(rig.names()))
    rig.controllers.settle()
    running = [pod for pod in rig.pods() if pod["status"].get("podIP")]
    assert len(running) == 2 and len(addresses(rig)) == (2 if always else 1)
    entries = rig.api.store.get(SLICE, "default", "web-1")["endpoints"]
    leaving = [each["conditions"] for each in entries if each["conditions"]["terminating"]]
    assert leaving == [{"ready": always, "serving": True, "terminating": True}]
    port = rig.api.store.get(ENDPOINTS, "default", "web")["subsets"][0]["ports"][0]
    assert port["port"] == 8000


def evicted(rig: Rig, name: str) -> None:
    body = {"deleteOptions": {}}
    evict(rig.api, Request("create", POD, "default", name, "eviction", body=body))


def test_a_disruption_budget_limits_evictions(rig: Rig) -> None:
    rig.create(BUDGET, "web", {"selector": {"matchLabels": {"app": "web"}}, "maxUnavailable": 1})
    rig.deploy(3)
    one, two, _ = sorted(rig.names())
    evicted(rig, one)
    with pytest.raises(Refused, match="would violate the pod's disruption budget") as refused:
        evicted(rig, two)
    assert refused.value.code == 429
    rig.settle()
    evicted(rig, two)


@pytest.mark.parametrize(("policy", "goes"), [("AlwaysAllow", True), ("IfHealthyBudget", False)])
def test_eviction_of_an_unready_pod_follows_the_budgets_policy(
    rig: Rig, policy: str, goes: bool
) -> None:
    spec = {"selector": {"matchLabels": {"app": "web"}}, "maxUnavailable": 0}
    rig.create(BUDGET, "web", {**spec, "unhealthyPodEvictionPolicy": policy})
    rig.create(DEPLOYMENT, "web", workload("web", 1))
    rig.settle(ready=False)
    (name,) = rig.names()
    try:
        evicted(rig, name)
        assert goes
    except Refused as refused:
        assert refused.code == 429 and not goes


def test_an_unschedulable_pod_says_why(rig: Rig) -> None:
    spec = workload("web", 1)
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    spec["template"]["spec"]["containers"][0]["resources"] = limits
    rig.create(DEPLOYMENT, "web", spec)
    rig.settle()
    (pod,) = rig.pods()
    (entry,) = [c for c in pod["status"]["conditions"] if c["type"] == "PodScheduled"]
    assert (entry["reason"], entry["message"]) == (
        "Unschedulable", "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
    )  # fmt: skip
    instant.add_node(rig.api, "n3", {"nvidia.com/gpu": "1"})
    rig.settle()
    assert rig.pods()[0]["spec"]["nodeName"] == "n3"


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("1Gi", 2**30), ("2", 2), ("1.5k", 1500), (3, 3)]
)
def test_quantities_are_parsed(text: str | int, value: float) -> None:
    assert quantity(text) == value


# -- garbage collection ------------------------------------------------------------------------


def test_owned_objects_are_deleted_with_their_owner(rig: Rig) -> None:
    rig.deploy(2)
    rig.api.delete(DEPLOYMENT, "default", "web")
    rig.settle()
    assert rig.pods() == [] and rig.api.store.all(REPLICA_SET) == []


def test_with_foreground_deletion_the_owner_is_deleted_last(rig: Rig) -> None:
    rig.deploy(1)
    rig.api.delete(DEPLOYMENT, "default", "web", {"propagationPolicy": "Foreground"})
    assert is_being_deleted(rig.api.store.get(DEPLOYMENT, "default", "web"))
    rig.settle()
    assert rig.pods() == [] and rig.api.store.all(DEPLOYMENT) == []


def test_deleting_a_namespace_deletes_its_objects(rig: Rig) -> None:
    rig.deploy(2)
    rig.api.delete(NAMESPACE, "", "default")
    rig.settle()
    assert rig.pods() == []
    assert [each["metadata"]["name"] for each in rig.api.store.all(NAMESPACE)] == ["kube-system"]
