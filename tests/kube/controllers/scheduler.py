"""The scheduler places pods on nodes. If it can't place a pod, it records why."""

from collections import Counter

from tests.kube.api import Api
from tests.kube.kinds import CLAIM, NODE, POD, Object
from tests.kube.pods import FINISHED, is_being_deleted, phase, set_condition
from tests.kube.quantities import quantity
from tests.kube.store import deep_copy


def reconcile(api: Api) -> None:
    pods = api.store.all(POD)
    for pod in pods:
        if not pod["spec"].get("nodeName") and not is_being_deleted(pod):
            _place(api, pod, pods)


def _place(api: Api, pod: Object, pods: list[Object]) -> None:
    nodes = api.store.all(NODE)
    reasons = {node["metadata"]["name"]: _obstacle(api, node, pod, pods) for node in nodes}
    free = [name for name, why in reasons.items() if not why]
    if not free:
        _refuse(api, pod, [why for why in reasons.values() if why])
        return
    crowds = Counter(each["spec"].get("nodeName") for each in pods)
    node = min(free, key=lambda name: (crowds[name], name))
    pod["spec"]["nodeName"] = node
    saved = api.update(POD, pod)
    pod["metadata"] = saved["metadata"]
    saved["status"] = deep_copy(pod.get("status") or {}) | {"phase": "Pending"}
    set_condition(saved, "PodScheduled", True, api.timestamp())
    api.set_status(POD, saved)


def _refuse(api: Api, pod: Object, reasons: list[str]) -> None:
    counts = Counter(reasons)
    summary = ", ".join(f"{count} {why}" for why, count in sorted(counts.items()))
    message = f"0/{len(reasons)} nodes are available: {summary}."
    pod["status"] = (pod.get("status") or {}) | {"phase": "Pending"}
    set_condition(pod, "PodScheduled", False, api.timestamp(), "Unschedulable", message)
    api.set_status(POD, pod)


def _obstacle(api: Api, node: Object, pod: Object, pods: list[Object]) -> str:
    """Return why the pod can't run on the node, or "" if it can."""
    spec, labels = pod["spec"], node["metadata"].get("labels") or {}
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    wanted = spec.get("nodeSelector") or {}
    if any(labels.get(name) != value for name, value in wanted.items()):
        return "node(s) didn't match Pod's node affinity/selector"
    for taint in node["spec"].get("taints") or []:
        if taint["effect"] != "PreferNoSchedule" and not _tolerates(spec, taint):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    missing = _missing_claim(api, pod)
    return missing or _short(node, pod, pods)


def _tolerates(spec: Object, taint: Object) -> bool:
    for each in spec.get("tolerations") or []:
        key = each.get("key") in (None, "", taint["key"])
        effect = each.get("effect") in (None, "", taint["effect"])
        exists = each.get("operator") == "Exists"
        if key and effect and (exists or each.get("value") == taint.get("value")):
            return True
    return False


def _missing_claim(api: Api, pod: Object) -> str:
    for volume in pod["spec"].get("volumes") or []:
        name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if name and api.store.find(CLAIM, pod["metadata"]["namespace"], name) is None:
            return f'persistentvolumeclaim "{name}" not found'
    return ""


def _short(node: Object, pod: Object, pods: list[Object]) -> str:
    """Return "Insufficient" and the name of a resource of which the node has too little left for
    the pod, or "" if it has enough of every resource."""
    name = node["metadata"]["name"]
    used: Counter[str] = Counter()
    for each in pods:
        if each["spec"].get("nodeName") == name and phase(each) not in FINISHED:
            used.update(requests(each))
    capacity = node["status"]["allocatable"]
    for resource, amount in requests(pod).items():
        if used[resource] + amount > quantity(capacity.get(resource, 0)):
            return f"Insufficient {resource}"
    return ""


def requests(pod: Object) -> Counter[str]:
    """Return the total resource requests of the containers. A limit without a request counts as a
    request."""
    total: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        requested = (resources.get("limits") or {}) | (resources.get("requests") or {})
        for name, amount in requested.items():
            total[name] += quantity(amount)  # type: ignore[assignment]
    return total
