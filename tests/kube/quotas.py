"""Decides whether pods are admitted. LimitRanges set default requests and limits. ResourceQuotas
require requests and limits, and bound their sums over all pods of a namespace."""

from collections.abc import Iterator, Mapping

from tests.kube.kinds import LIMIT_RANGE, POD, QUOTA, Object
from tests.kube.quantities import quantity, quantity_text
from tests.kube.store import Store

REQUIRED = {
    "cpu": "requests.cpu",
    "memory": "requests.memory",
    "requests.cpu": "requests.cpu",
    "requests.memory": "requests.memory",
    "limits.cpu": "limits.cpu",
    "limits.memory": "limits.memory",
}
"""Maps each key of a quota that requires every container to set a request or limit to that request
or limit."""

APPLIES_TO_RUNNING = {"NotTerminating", "NotBestEffort"}
FINISHED = ("Succeeded", "Failed")


def set_limit_range_defaults(store: Store, pod: Object) -> None:
    """Fill in the requests and limits of a pod's containers from LimitRanges, in place."""
    for limits in store.all(LIMIT_RANGE, pod["metadata"]["namespace"]):
        for each in limits["spec"]["limits"]:
            if each["type"] == "Container":
                for container in _containers(pod):
                    _fill(container, "limits", each.get("default") or {})
                    _fill(container, "requests", each.get("defaultRequest") or {})


def _fill(container: Object, kind: str, defaults: Object) -> None:
    if defaults:
        own = container.setdefault("resources", {}).get(kind) or {}
        container["resources"][kind] = {**defaults, **own}


def quota_errors(store: Store, pod: Object) -> Iterator[str]:
    """Yield an error for each requirement of a quota that the pod's containers don't meet, and for
    each quota that the pod would exceed."""
    for quota in store.all(QUOTA, pod["metadata"]["namespace"]):
        spec, name = quota["spec"], quota["metadata"]["name"]
        if set(spec.get("scopes") or []) <= APPLIES_TO_RUNNING and not spec.get("scopeSelector"):
            for key in sorted(spec.get("hard") or {}):
                names = [each["name"] for each in _containers(pod) if _lacks(each, key)]
                if names:
                    yield f"failed quota: {name}: must specify {key} for: {','.join(names)}"
            yield from _excess(store, quota, pod)


def _excess(store: Store, quota: Object, pod: Object) -> Iterator[str]:
    """Yield an error if the pod would exceed the quota. As in Kubernetes, the error names only the
    sums that would be exceeded."""
    hard = quota["spec"].get("hard") or {}
    requested, used = pod_usage(pod, hard), quota_usage(store, quota)
    over = sorted(
        key for key in requested if requested[key] + used[key] > quantity(hard[key])
        and requested[key]
    )  # fmt: skip
    if over:
        limited = ",".join(f"{key}={hard[key]}" for key in over)
        yield (
            f"exceeded quota: {quota['metadata']['name']}, requested: {_listed(requested, over)}, "
            f"used: {_listed(used, over)}, limited: {limited}"
        )


def _listed(amounts: Mapping[str, float], keys: list[str]) -> str:
    return ",".join(f"{key}={quantity_text(amounts[key])}" for key in keys)


def quota_usage(store: Store, quota: Object) -> dict[str, float]:
    """Return the sum of :func:`pod_usage` over all unfinished pods in the quota's namespace, for
    each key of the quota's ``hard`` that counts pods or their resources."""
    hard = quota["spec"].get("hard") or {}
    pods = [
        pod_usage(pod, hard)
        for pod in store.all(POD, quota["metadata"]["namespace"])
        if (pod.get("status") or {}).get("phase") not in FINISHED
    ]
    return {key: sum(each[key] for each in pods) for key in hard if _is_counted(key)}


def pod_usage(pod: Object, hard: Mapping[str, object]) -> dict[str, float]:
    """Return how much the pod uses of each key in ``hard`` that counts pods or their resources."""
    return {
        key: 1.0 if key in ("pods", "count/pods") else _pod_resource(pod, key)
        for key in hard
        if _is_counted(key)
    }


def _is_counted(key: str) -> bool:
    """Return whether a key of a quota's ``hard`` limits pods or their resources. In spite of its
    prefix, ``requests.storage`` doesn't: it limits the storage of persistent volume claims."""
    if key in ("pods", "count/pods", *REQUIRED):
        return True
    return key.startswith(("requests.", "limits.")) and key != "requests.storage"


def _pod_resource(pod: Object, key: str) -> float:
    """Return a pod's request or limit of a resource: the sum over its containers and sidecars or,
    if that is greater, the largest value among its other init containers."""
    kind, _, resource = REQUIRED.get(key, key).partition(".")
    started = pod["spec"].get("initContainers") or []
    sidecars = [each for each in started if each.get("restartPolicy") == "Always"]
    first = [_amount(each, kind, resource) for each in started]
    beside = [*pod["spec"]["containers"], *sidecars]
    return max([sum(_amount(each, kind, resource) for each in beside), *first])


def _amount(container: Object, kind: str, resource: str) -> float:
    return quantity(_given(container, kind).get(resource, 0))


def _lacks(container: Object, key: str) -> bool:
    if key not in REQUIRED:
        return False
    kind, name = REQUIRED[key].split(".")
    return name not in _given(container, kind)


def _given(container: Object, kind: str) -> Object:
    """Return a container's requests or limits; ``kind`` says which. A limit without a request
    counts as a request, too."""
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    return {**limits, **(resources.get("requests") or {})} if kind == "requests" else limits


def _containers(pod: Object) -> list[Object]:
    return [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])]
