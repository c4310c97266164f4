"""The ReplicaSet controller keeps the wanted number of pods, and decides which pods to delete."""

import math
from collections import Counter
from datetime import datetime
from typing import Any

from tests.kube.api import Api
from tests.kube.events import record_event
from tests.kube.failures import Refused
from tests.kube.kinds import POD, REPLICA_SET, Object
from tests.kube.pods import (
    delete_pod,
    is_active,
    is_being_deleted,
    owned_by,
    phase,
    pod_from,
    set_condition,
)
from tests.kube.subresources import is_ready

COST = "controller.kubernetes.io/pod-deletion-cost"
PHASES = ("Pending", "Unknown", "Running")


def reconcile(api: Api) -> None:
    for found in api.store.all(REPLICA_SET):
        if not is_being_deleted(found):
            _reconcile(api, found)


def _reconcile(api: Api, found: Object) -> None:
    pods = [pod for pod in owned_by(api, POD, found) if is_active(pod)]
    surplus = len(pods) - found["spec"]["replicas"]
    refused = None
    if surplus > 0:
        for pod in deletion_order(api, pods)[:surplus]:
            delete_pod(api, pod)
            pods.remove(pod)
    for _ in range(-surplus):
        refused = _grow(api, found, pods)
        if refused:
            break
    _set_status(api, found, pods, refused)


def _grow(api: Api, found: Object, pods: list[Object]) -> Refused | None:
    pod = pod_from(found["spec"]["template"], found)
    pod["metadata"]["generateName"] = f"{found['metadata']['name']}-"
    try:
        pods.append(api.create(POD, pod))
    except Refused as refused:
        record_event(api, found, "FailedCreate", f"Error creating: {refused}", "Warning")
        return refused
    return None


def deletion_order(api: Api, pods: list[Object]) -> list[Object]:
    """Sort pods by the order in which Kubernetes deletes them. A pod comes before another one if it
    is not on a node, is not running, is not ready, has a lower deletion cost, shares its node with
    more of these pods, has been ready for a shorter time (by powers of two), has restarted more
    often, or is newer. Earlier criteria in this list take precedence."""
    now = datetime.fromisoformat(api.timestamp())
    crowds = Counter(pod["spec"].get("nodeName") for pod in pods)
    return sorted(pods, key=lambda pod: _rank(pod, crowds[pod["spec"].get("nodeName")], now))


def _rank(pod: Object, crowd: int, now: datetime) -> tuple[Any, ...]:
    metadata, annotations = pod["metadata"], pod["metadata"].get("annotations") or {}
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return (
        bool(pod["spec"].get("nodeName")),
        PHASES.index(phase(pod)),
        is_ready(pod),
        cost_of(annotations),
        -crowd,
        _ready_rank(pod, now),
        -max((each["restartCount"] for each in statuses), default=0),
        [-ord(letter) for letter in metadata["creationTimestamp"]],
        -int(metadata["resourceVersion"]),
    )


def cost_of(annotations: Object) -> int:
    """Return the pod deletion cost, which is 0 if the annotation is not a number, as in
    Kubernetes."""
    try:
        return int(annotations.get(COST, "0"))
    except ValueError:
        return 0


def _ready_rank(pod: Object, now: datetime) -> int:
    for each in (pod.get("status") or {}).get("conditions") or []:
        if each["type"] == "Ready" and each["status"] == "True":
            since = (now - datetime.fromisoformat(each["lastTransitionTime"])).total_seconds()
            return int(math.log2(since)) if since >= 1 else -1
    return -1


def _set_status(api: Api, found: Object, pods: list[Object], refused: Refused | None) -> None:
    ready = sum(is_ready(pod) for pod in pods)
    found["status"] = (found.get("status") or {}) | {
        "replicas": len(pods),
        "fullyLabeledReplicas": len(pods),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "observedGeneration": found["metadata"]["generation"],
    }
    found["status"].pop("conditions", None)
    if refused:
        condition = ("ReplicaFailure", True, api.timestamp(), "FailedCreate", str(refused))
        set_condition(found, *condition)
    api.set_status(REPLICA_SET, found)
