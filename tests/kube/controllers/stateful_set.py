"""The StatefulSet controller runs numbered pods, each with a stable name and its own volume
claims."""

from tests.kube.api import Api
from tests.kube.events import record_event
from tests.kube.failures import Refused
from tests.kube.kinds import CLAIM, POD, STATEFUL_SET, Object
from tests.kube.pods import delete_pod, fingerprint, is_being_deleted, owned_by, phase, pod_from
from tests.kube.store import deep_copy
from tests.kube.subresources import is_ready

HASH = "controller-revision-hash"
POD_NAME, POD_INDEX = "statefulset.kubernetes.io/pod-name", "apps.kubernetes.io/pod-index"


def reconcile(api: Api) -> None:
    for found in api.store.all(STATEFUL_SET):
        if not is_being_deleted(found):
            _reconcile(api, found)


def _reconcile(api: Api, found: Object) -> None:
    pods = {_number(pod): pod for pod in owned_by(api, POD, found)}
    parallel = found["spec"]["podManagementPolicy"] == "Parallel"
    try:
        _grow(api, found, pods, parallel)
    except Refused as refused:
        record_event(api, found, "FailedCreate", str(refused), "Warning")
    _shrink(api, found, pods, parallel)
    _update(api, found, pods)
    _set_status(api, found, owned_by(api, POD, found))


def _number(pod: Object) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def _healthy(pod: Object | None) -> bool:
    return pod is not None and is_ready(pod) and not is_being_deleted(pod)


def _numbers(found: Object) -> range:
    start = (found["spec"].get("ordinals") or {}).get("start", 0)
    return range(start, start + found["spec"]["replicas"])


def _grow(api: Api, found: Object, pods: dict[int, Object], parallel: bool) -> None:
    """Create the missing pods in the order of their numbers: each one once the previous pod is
    ready, or all at once if ``parallel`` is set."""
    for number in _numbers(found):
        pod = pods.get(number)
        if pod is None:
            pods[number] = api.create(POD, _pod(api, found, number))
        elif phase(pod) == "Failed" and not is_being_deleted(pod):
            delete_pod(api, pod)
        if not parallel and not _healthy(pods[number]):
            return


def _shrink(api: Api, found: Object, pods: dict[int, Object], parallel: bool) -> None:
    """Delete surplus pods from the highest number down: each one once the previous pod is gone, or
    all at once if ``parallel`` is set."""
    surplus = sorted(set(pods) - set(_numbers(found)), reverse=True)
    for number in surplus:
        if not is_being_deleted(pods[number]):
            delete_pod(api, pods[number])
        if not parallel:
            return


def _update(api: Api, found: Object, pods: dict[int, Object]) -> None:
    """Replace outdated pods from the highest number down to ``partition``: each one once all pods
    with higher numbers are up to date and ready."""
    strategy = found["spec"]["updateStrategy"]
    if strategy["type"] != "RollingUpdate":
        return
    first = (strategy.get("rollingUpdate") or {}).get("partition", 0)
    revision = _revision(found)
    for number in sorted(set(_numbers(found)) & set(pods), reverse=True):
        if number < first:
            return
        if pods[number]["metadata"]["labels"][HASH] != revision:
            if not is_being_deleted(pods[number]):
                delete_pod(api, pods[number])
            return
        if not _healthy(pods[number]):
            return


def _revision(found: Object) -> str:
    return f"{found['metadata']['name']}-{fingerprint(found['spec']['template'])}"


def _pod(api: Api, found: Object, number: int) -> Object:
    name = f"{found['metadata']['name']}-{number}"
    pod = pod_from(deep_copy(found["spec"]["template"]), found)
    pod["metadata"]["name"] = name
    pod["metadata"]["labels"] |= {
        HASH: _revision(found),
        POD_NAME: name,
        POD_INDEX: str(number),
    }
    spec = pod["spec"]
    spec["hostname"], spec["subdomain"] = name, found["spec"].get("serviceName", "")
    templates = found["spec"].get("volumeClaimTemplates") or []
    claimed = {each["metadata"]["name"]: _claim(api, found, each, name) for each in templates}
    volumes = [each for each in spec.get("volumes") or [] if each["name"] not in claimed]
    spec["volumes"] = volumes + [
        {"name": volume, "persistentVolumeClaim": {"claimName": claim}}
        for volume, claim in claimed.items()
    ]
    return pod


def _claim(api: Api, found: Object, template: Object, pod: str) -> str:
    """Create the pod's volume claim unless it exists; return its name. The claim outlives the
    pod."""
    name = f"{template['metadata']['name']}-{pod}"
    namespace = found["metadata"]["namespace"]
    if api.store.find(CLAIM, namespace, name) is None:
        metadata = {**template["metadata"], "name": name, "namespace": namespace}
        api.create(CLAIM, {"metadata": metadata, "spec": deep_copy(template["spec"])})
    return name


def _set_status(api: Api, found: Object, pods: list[Object]) -> None:
    revision = _revision(found)
    updated = sum(pod["metadata"]["labels"][HASH] == revision for pod in pods)
    ready = sum(is_ready(pod) for pod in pods)
    status = found.get("status") or {}
    done = updated == len(pods) == ready == found["spec"]["replicas"]
    current = revision if done else status.get("currentRevision", revision)
    found["status"] = {
        "observedGeneration": found["metadata"]["generation"],
        "replicas": len(pods),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "updatedReplicas": updated,
        "currentReplicas": sum(pod["metadata"]["labels"][HASH] == current for pod in pods),
        "currentRevision": current,
        "updateRevision": revision,
        "collisionCount": 0,
    }
    api.set_status(STATEFUL_SET, found)
