"""A kubelet without containers: pods do what the test says, at once."""

from collections.abc import Mapping
from types import MappingProxyType

from tests.kube.api import Api
from tests.kube.events import tell
from tests.kube.kinds import NODE, POD, Object
from tests.kube.pods import is_leaving, phase, set_condition

RUNNING: Object = {"running": {}}


def add_node(
    api: Api,
    name: str,
    resources: Mapping[str, str] = MappingProxyType({}),
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Object:
    """A node with room for a hundred pods; ``resources`` like ``{"nvidia.com/gpu": "8"}``."""
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
    set_condition(node, "Ready", True, api.stamp(), "KubeletReady")
    return api.set_status(NODE, node)


def start(api: Api, ready: bool = True) -> None:
    """Whatever was placed on a node runs, and is ready or not."""
    for number, pod in enumerate(api.store.all(POD)):
        if pod["spec"].get("nodeName") and phase(pod) == "Pending":
            pod["status"] = (pod.get("status") or {}) | {
                "phase": "Running",
                "podIP": f"10.0.{int(pod['metadata']['resourceVersion']) % 250}.{number}",
                "startTime": api.stamp(),
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
        set_condition(pod, name, ready, api.stamp())
    api.set_status(POD, pod)


def end(api: Api) -> list[str]:
    """Whatever was to go has gone. Returns the names."""
    gone = [pod for pod in api.store.all(POD) if is_leaving(pod)]
    for pod in gone:
        tell(api, pod, "Killing", "Stopping containers")
        api.store.remove(POD, pod["metadata"]["namespace"], pod["metadata"]["name"])
    return [pod["metadata"]["name"] for pod in gone]
