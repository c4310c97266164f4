"""A fake kubelet without containers. Pods change their state only when a test calls a function of
this module."""

from collections.abc import Mapping
from types import MappingProxyType

from tests.kube.api import Api
from tests.kube.events import record_event
from tests.kube.kinds import NODE, POD, Object
from tests.kube.pods import is_being_deleted, phase, set_condition

RUNNING: Object = {"running": {}}


def add_node(
    api: Api,
    name: str,
    resources: Mapping[str, str] = MappingProxyType({}),
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Object:
    """Add a node with space for 110 pods. ``resources`` are additional resources, such as
    ``{"nvidia.com/gpu": "8"}``."""
    capacity = {
        "cpu": "64",
        "memory": "512Gi",
        "ephemeral-storage": "1Ti",
        "pods": "110",
        **resources,
    }
    metadata: Object = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}
    node = api.create(NODE, {"metadata": metadata, "spec": {}})
    node["status"] = {"capacity": capacity, "allocatable": capacity}
    set_condition(node, "Ready", True, api.timestamp(), "KubeletReady")
    return api.set_status(NODE, node)


def run_placed_pods(api: Api, ready: bool = True) -> None:
    """Let all pending pods that are placed on a node run, and set whether they are ready."""
    for number, pod in enumerate(api.store.all(POD)):
        if pod["spec"].get("nodeName") and phase(pod) == "Pending":
            pod["status"] = (pod.get("status") or {}) | {
                "phase": "Running",
                "podIP": f"10.0.{int(pod['metadata']['resourceVersion']) % 250}.{number}",
                "startTime": api.timestamp(),
            }
            set_ready(api, pod, ready)


def set_ready(api: Api, pod: Object, ready: bool, restarts: int = 0, waiting: str = "") -> None:
    state = {"waiting": {"reason": waiting}} if waiting else RUNNING
    pod["status"]["containerStatuses"] = [
        {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": ready,
            "restartCount": restarts,
            "state": state,
        }
        for container in pod["spec"]["containers"]
    ]
    for name in ("Ready", "ContainersReady"):
        set_condition(pod, name, ready, api.timestamp())
    api.set_status(POD, pod)


def remove_deleted_pods(api: Api) -> list[str]:
    """Remove all pods that are being deleted; return their names."""
    gone = api.store.all(POD, where=is_being_deleted)
    for pod in gone:
        record_event(api, pod, "Killing", "Stopping containers")
        api.store.remove(POD, pod["metadata"]["namespace"], pod["metadata"]["name"])
    return [pod["metadata"]["name"] for pod in gone]
