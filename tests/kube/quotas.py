"""The admission of pods by LimitRanges, which set defaults, and by ResourceQuotas, which require
requests and limits. The sums of quotas are not enforced."""

from collections.abc import Iterator

from tests.kube.kinds import LIMIT_RANGE, QUOTA, Object
from tests.kube.store import Store

REQUIRED = {
    "cpu": "requests.cpu",
    "memory": "requests.memory",
    "requests.cpu": "requests.cpu",
    "requests.memory": "requests.memory",
    "limits.cpu": "limits.cpu",
    "limits.memory": "limits.memory",
}
"""The keys of a quota that require a request or a limit of every container, and which one."""

APPLIES_TO_RUNNING = {"NotTerminating", "NotBestEffort"}


def set_limit_range_defaults(store: Store, pod: Object) -> None:
    """Fill in the requests and limits of containers, in place."""
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
    """Yield an error for each quota that requires more than the pod's containers specify."""
    for quota in store.all(QUOTA, pod["metadata"]["namespace"]):
        spec = quota["spec"]
        if set(spec.get("scopes") or []) <= APPLIES_TO_RUNNING and not spec.get("scopeSelector"):
            for key in sorted(spec.get("hard") or {}):
                names = [each["name"] for each in _containers(pod) if _lacks(each, key)]
                if names:
                    name = quota["metadata"]["name"]
                    yield f"failed quota: {name}: must specify {key} for: {','.join(names)}"


def _lacks(container: Object, key: str) -> bool:
    if key not in REQUIRED:
        return False
    kind, name = REQUIRED[key].split(".")
    resources = container.get("resources") or {}
    given = {**(resources.get("limits") or {}), **(resources.get(kind) or {})}
    return name not in (given if kind == "requests" else resources.get("limits") or {})


def _containers(pod: Object) -> list[Object]:
    return [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])]
