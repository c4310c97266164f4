"""Handles requests for the subresources ``scale``, ``status`` and ``eviction``."""

from typing import Any

from tests.kube import patches
from tests.kube.api import Api, namespace_and_name
from tests.kube.failures import Refused, invalid, modified, too_many
from tests.kube.kinds import BUDGET, POD, Object
from tests.kube.request import Request
from tests.kube.selectors import selector_text, selects


def scale_of(found: Object) -> Object:
    metadata, spec = found["metadata"], found["spec"]
    names = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in names},
        "spec": {"replicas": spec["replicas"]},
        "status": {
            "replicas": (found.get("status") or {}).get("replicas", 0),
            "selector": selector_text(spec["selector"]),
        },
    }


def change_scale(api: Api, request: Request) -> Object:
    """Handle PUT or PATCH of ``scale``. Raises Refused (409) for an outdated resourceVersion."""
    kind = request.kind
    with api.store.locked():
        found = api.store.get(kind, request.namespace, request.name)
        before = scale_of(found)
        wanted = request.body if request.verb == "update" else _patched(before, request)
        version = wanted.get("metadata", {}).get("resourceVersion")
        if version not in (None, "", before["metadata"]["resourceVersion"]):
            raise modified(kind, request.name)
        replicas: Any = (wanted.get("spec") or {}).get("replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            raise invalid(kind, request.name, f"spec.replicas: Invalid value: {replicas!r}")
        found["spec"]["replicas"] = replicas
        return scale_of(api.update(kind, found, request))


def _patched(before: Object, request: Request) -> Object:
    if request.content_type == "application/json-patch+json":
        return patches.apply_json_patch(before, request.body)
    out: Object = patches.apply_merge_patch(before, request.body)
    return out


def change_status(api: Api, request: Request) -> Object:
    """Handle PUT or PATCH of ``status``. Changes outside of ``status`` are ignored, but the
    resourceVersion is checked."""
    with api.store.locked():
        now = api.store.get(request.kind, request.namespace, request.name)
        wanted = request.body if request.verb == "update" else api.patched(now, request)
        version = (wanted.get("metadata") or {}).get("resourceVersion")
        if version not in (None, "", now["metadata"]["resourceVersion"]):
            raise modified(request.kind, request.name)
        return api.set_status(request.kind, {**now, "status": wanted.get("status")})


def evict(api: Api, request: Request) -> Object:
    """Delete a pod. Raises Refused (429) if a disruption budget forbids it."""
    with api.store.locked():
        pod = api.store.get(POD, request.namespace, request.name)
        if "deletionTimestamp" not in pod["metadata"]:
            for budget in budgets_of(api, pod):
                _spend(api, budget, pod)
        options = (request.body or {}).get("deleteOptions")
        api.delete(POD, *namespace_and_name(pod), options)
    return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}


def budgets_of(api: Api, pod: Object) -> list[Object]:
    labels = pod["metadata"].get("labels") or {}
    budgets = api.store.all(BUDGET, pod["metadata"]["namespace"])
    return [each for each in budgets if selects(each["spec"].get("selector"), labels)]


def _spend(api: Api, budget: Object, pod: Object) -> None:
    """Use up one of the budget's allowed disruptions. Raises Refused (429) if none is left. A pod
    that isn't ready uses up none if the budget's policy is ``AlwaysAllow``, or if enough other pods
    are healthy."""
    status = budget.get("status") or {}
    if not is_ready(pod):
        always = budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
        enough = status.get("currentHealthy", 0) >= status.get("desiredHealthy", 0) > 0
        if always or enough:
            return
    if status.get("disruptionsAllowed", 0) < 1:
        name = budget["metadata"]["name"]
        healthy, desired = status.get("currentHealthy", 0), status.get("desiredHealthy", 0)
        message = "Cannot evict pod as it would violate the pod's disruption budget."
        counts = f"needs {desired} healthy pods and has {healthy} currently"
        raise too_many(message, f"The disruption budget {name} {counts}")
    budget["status"] = status | {"disruptionsAllowed": status["disruptionsAllowed"] - 1}
    api.set_status(BUDGET, budget)


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready") == "True"


def condition(found: Object, name: str) -> str:
    """Return the status of the condition ``name``: "True", "False" or "Unknown"."""
    conditions = (found.get("status") or {}).get("conditions") or []
    return next((str(each["status"]) for each in conditions if each["type"] == name), "Unknown")


def subresource(api: Api, request: Request) -> tuple[int, Object]:
    """Handle a subresource request other than ``log`` and ``exec``."""
    name, verb = request.subresource, request.verb
    if name == "eviction" and verb == "create":
        return 201, evict(api, request)
    if verb == "get":
        found = api.store.get(request.kind, request.namespace, request.name)
        return 200, scale_of(found) if name == "scale" else found
    if verb in ("update", "patch") and name == "scale":
        return 200, change_scale(api, request)
    if verb in ("update", "patch") and name == "status":
        return 200, change_status(api, request)
    raise Refused(405, "MethodNotAllowed", f"{request.resource} does not support {verb}")
