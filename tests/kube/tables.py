"""Renders the tables that ``kubectl get`` prints."""

from collections.abc import Callable
from datetime import datetime

from tests.kube.kinds import Kind, Object
from tests.kube.pods import is_being_deleted, phase
from tests.kube.subresources import is_ready

ACCEPT = "as=Table"
Cells = Callable[[Object], list[object]]


def wants_table(accept: str) -> bool:
    return ACCEPT in accept


def table(kind: Kind, found: list[Object], version: str, now: str) -> Object:
    """Return a Table object with the names of the objects, the kind's own columns, and the ages."""
    names, cells = COLUMNS.get(kind.kind, ([], lambda each: []))
    rows = [
        {
            "cells": [each["metadata"]["name"], *cells(each), age(each, now)],
            "object": {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": each["metadata"],
            },
        }
        for each in found
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": [_column(name) for name in ("Name", *names, "Age")],
        "rows": rows,
    }


def _column(name: str) -> Object:
    """Return a column definition. A column whose name begins with an asterisk is shown only by
    ``kubectl get -o wide``."""
    format_of = "name" if name == "Name" else ""
    return {
        "name": name.lstrip("*"),
        "type": "string",
        "format": format_of,
        "description": "",
        "priority": int(name.startswith("*")),
    }


def age(found: Object, now: str) -> str:
    since = datetime.fromisoformat(found["metadata"]["creationTimestamp"])
    seconds = int((datetime.fromisoformat(now) - since).total_seconds())
    if seconds < 120:
        return f"{seconds}s"
    return f"{seconds // 60}m" if seconds < 7200 else f"{seconds // 3600}h"


def _pod(found: Object) -> list[object]:
    status = found.get("status") or {}
    statuses = status.get("containerStatuses") or []
    ready = f"{sum(each['ready'] for each in statuses)}/{len(found['spec']['containers'])}"
    restarts = sum(each["restartCount"] for each in statuses)
    where = [status.get("podIP", "<none>"), found["spec"].get("nodeName", "<none>")]
    return [ready, _pod_state(found, statuses), restarts, *where]


def _pod_state(found: Object, statuses: list[Object]) -> str:
    if is_being_deleted(found):
        return "Terminating"
    for each in statuses:
        for state in ("waiting", "terminated"):
            if each["state"].get(state):
                return str(each["state"][state]["reason"])
    return str(found["status"].get("reason") or phase(found))


def _deployment(found: Object) -> list[object]:
    status = found.get("status") or {}
    ready = f"{status.get('readyReplicas', 0)}/{found['spec']['replicas']}"
    return [ready, status.get("updatedReplicas", 0), status.get("availableReplicas", 0)]


def _replica_set(found: Object) -> list[object]:
    status = found.get("status") or {}
    return [found["spec"]["replicas"], status.get("replicas", 0), status.get("readyReplicas", 0)]


def _stateful_set(found: Object) -> list[object]:
    return _deployment(found)[:1]


def _service(found: Object) -> list[object]:
    spec = found["spec"]
    ports = ",".join(f"{port['port']}/{port['protocol']}" for port in spec.get("ports") or [])
    return [spec["type"], spec.get("clusterIP", "None"), "<none>", ports]


def _node(found: Object) -> list[object]:
    off = ",SchedulingDisabled" if found["spec"].get("unschedulable") else ""
    return [("Ready" if is_ready(found) else "NotReady") + off, "<none>"]


def _budget(found: Object) -> list[object]:
    spec, status = found["spec"], found.get("status") or {}
    bounds = [spec.get(name, "N/A") for name in ("minAvailable", "maxUnavailable")]
    return [*bounds, status.get("disruptionsAllowed", 0)]


def _event(found: Object) -> list[object]:
    involved = found["involvedObject"]
    about = f"{involved['kind'].lower()}/{involved['name']}"
    return [found["type"], found["reason"], found["count"], about, found["message"]]


COLUMNS: dict[str, tuple[list[str], Cells]] = {
    "Pod": (["Ready", "Status", "Restarts", "*IP", "*Node"], _pod),
    "Deployment": (["Ready", "Up-to-date", "Available"], _deployment),
    "ReplicaSet": (["Desired", "Current", "Ready"], _replica_set),
    "StatefulSet": (["Ready"], _stateful_set),
    "Service": (["Type", "Cluster-IP", "External-IP", "Port(s)"], _service),
    "Node": (["Status", "Roles"], _node),
    "PodDisruptionBudget": (
        ["Min available", "Max unavailable", "Allowed disruptions"],
        _budget,
    ),
    "PersistentVolumeClaim": (["Status"], lambda found: [phase(found)]),
    "Lease": (["Holder"], lambda found: [(found.get("spec") or {}).get("holderIdentity", "")]),
    "Event": (["Type", "Reason", "Count", "Object", "Message"], _event),
}
