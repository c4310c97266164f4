"""The Deployment controller keeps one ReplicaSet per pod template. In a rollout, it shrinks the old
ReplicaSets and grows the new one."""

import math
from datetime import datetime

from tests.kube.api import Api
from tests.kube.kinds import DEPLOYMENT, POD, REPLICA_SET, Object
from tests.kube.pods import fingerprint, is_being_deleted, owned_by, reference_to, set_condition
from tests.kube.store import deep_copy

HASH = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"


def reconcile(api: Api) -> None:
    for found in api.store.all(DEPLOYMENT):
        if not is_being_deleted(found):
            _reconcile(api, found)


def _reconcile(api: Api, found: Object) -> None:
    sets = owned_by(api, REPLICA_SET, found)
    new = next((each for each in sets if _fits(found, each)), None)
    old = [each for each in sets if each is not new]
    if not found["spec"].get("paused"):
        new = _numbered(api, found, new, old)
        if found["spec"]["strategy"]["type"] == "Recreate":
            _recreate(api, found, new, old)
        else:
            _roll_out(api, found, new, old)
        _forget(api, found, old)
    _set_status(api, found, new, old)


def _fits(found: Object, replica_set: Object) -> bool:
    wanted = fingerprint(found["spec"]["template"])
    return bool(replica_set["metadata"]["labels"][HASH] == wanted)


def revision_of(found: Object) -> int:
    return int((found["metadata"].get("annotations") or {}).get(REVISION, 0))


def _numbered(api: Api, found: Object, new: Object | None, old: list[Object]) -> Object:
    """Return the ReplicaSet of the current template; create it if ``new`` is None. Give the
    ReplicaSet and the Deployment the highest revision number."""
    latest = max((revision_of(each) for each in old), default=0)
    if new is None:
        new = api.create(REPLICA_SET, _replica_set(found, latest + 1))
    elif revision_of(new) <= latest:
        new["metadata"]["annotations"][REVISION] = str(latest + 1)
        new = api.update(REPLICA_SET, new)
    annotations = found["metadata"].setdefault("annotations", {})
    if annotations.get(REVISION) != new["metadata"]["annotations"][REVISION]:
        annotations[REVISION] = new["metadata"]["annotations"][REVISION]
        found["metadata"] = api.update(DEPLOYMENT, found)["metadata"]
    return new


def _replica_set(found: Object, revision: int) -> Object:
    spec, digest = found["spec"], fingerprint(found["spec"]["template"])
    template, selector = deep_copy(spec["template"]), deep_copy(spec["selector"])
    template["metadata"]["labels"][HASH] = digest
    selector["matchLabels"] = (selector.get("matchLabels") or {}) | {HASH: digest}
    return {
        "metadata": {
            "name": f"{found['metadata']['name']}-{digest}",
            "namespace": found["metadata"]["namespace"],
            "labels": template["metadata"]["labels"],
            "annotations": {REVISION: str(revision)},
            "ownerReferences": [reference_to(found)],
        },
        "spec": {"replicas": 0, "selector": selector, "template": template},
    }


# -- strategies ------------------------------------------------------------------------------


def _roll_out(api: Api, found: Object, new: Object, old: list[Object]) -> None:
    wanted = found["spec"]["replicas"]
    surge, unavailable = limits(found)
    total = sum(each["spec"]["replicas"] for each in [new, *old])
    if new["spec"]["replicas"] > wanted:
        _resize(api, new, wanted)
    elif new["spec"]["replicas"] < wanted:
        room = max(wanted + surge - total, 0)
        _resize(api, new, min(new["spec"]["replicas"] + room, wanted))
    total = sum(each["spec"]["replicas"] for each in [new, *old])
    missing = new["spec"]["replicas"] - _available(new)
    spare = max(total - (wanted - unavailable) - missing, 0)
    spare -= _drop_unhealthy(api, old, spare)
    available = sum(_available(each) for each in [new, *old])
    _drop(api, old, min(spare, available - (wanted - unavailable)))


def _drop_unhealthy(api: Api, old: list[Object], most: int) -> int:
    dropped = 0
    for each in sorted(old, key=revision_of):
        unavailable = each["spec"]["replicas"] - _available(each)
        count = min(unavailable, most - dropped)
        if count > 0:
            _resize(api, each, each["spec"]["replicas"] - count)
            dropped += count
    return dropped


def _drop(api: Api, old: list[Object], most: int) -> None:
    for each in sorted(old, key=revision_of):
        count = min(each["spec"]["replicas"], most)
        if count > 0:
            _resize(api, each, each["spec"]["replicas"] - count)
            most -= count


def limits(found: Object) -> tuple[int, int]:
    """Return the maxSurge and the maxUnavailable of a rollout, as numbers of pods."""
    rolling, wanted = found["spec"]["strategy"]["rollingUpdate"], found["spec"]["replicas"]
    surge = resolve_count(rolling["maxSurge"], wanted, up=True)
    unavailable = resolve_count(rolling["maxUnavailable"], wanted, up=False)
    return surge, unavailable or (1 if surge == 0 else 0)


def resolve_count(value: int | str, of: int, up: bool) -> int:
    """Return ``value`` as a number of pods. A percentage is taken of ``of``, the total number of
    pods; the result is rounded up if ``up`` is set, otherwise down."""
    if isinstance(value, int):
        return value
    exact = int(value.removesuffix("%")) * of / 100
    return math.ceil(exact) if up else math.floor(exact)


def _recreate(api: Api, found: Object, new: Object, old: list[Object]) -> None:
    for each in old:
        _resize(api, each, 0)
    if not any(owned_by(api, POD, each) for each in old):
        _resize(api, new, found["spec"]["replicas"])


def _resize(api: Api, replica_set: Object, count: int) -> None:
    if replica_set["spec"]["replicas"] != count:
        replica_set["spec"]["replicas"] = count
        replica_set["metadata"] = api.update(REPLICA_SET, replica_set)["metadata"]


def _available(replica_set: Object) -> int:
    return int((replica_set.get("status") or {}).get("availableReplicas", 0))


def _forget(api: Api, found: Object, old: list[Object]) -> None:
    """Delete the oldest ReplicaSets without pods, so that at most revisionHistoryLimit of them are
    left."""
    empty = [each for each in sorted(old, key=revision_of) if not owned_by(api, POD, each)]
    empty = [each for each in empty if each["spec"]["replicas"] == 0]
    for each in empty[: max(len(empty) - found["spec"]["revisionHistoryLimit"], 0)]:
        api.delete(REPLICA_SET, each["metadata"]["namespace"], each["metadata"]["name"])


# -- status ----------------------------------------------------------------------------------


def _set_status(api: Api, found: Object, new: Object | None, old: list[Object]) -> None:
    sets = [*old, *([new] if new else [])]
    wanted, status = found["spec"]["replicas"], found.get("status") or {}

    def count(name: str, those: list[Object]) -> int:
        return sum((each.get("status") or {}).get(name, 0) for each in those)

    available, updated = count("availableReplicas", sets), count("replicas", [new] if new else [])
    found["status"] = status | {
        "observedGeneration": found["metadata"]["generation"],
        "replicas": count("replicas", sets),
        "updatedReplicas": updated,
        "readyReplicas": count("readyReplicas", sets),
        "availableReplicas": available,
        "unavailableReplicas": max(wanted - available, 0),
    }
    least = wanted - limits(found)[1] if "rollingUpdate" in found["spec"]["strategy"] else wanted
    reason = "MinimumReplicasAvailable" if available >= least else "MinimumReplicasUnavailable"
    set_condition(found, "Available", available >= least, api.timestamp(), reason)
    done = updated == available == wanted == found["status"]["replicas"]
    _set_progress(api, found, new, done)
    api.set_status(DEPLOYMENT, found)


def _set_progress(api: Api, found: Object, new: Object | None, done: bool) -> None:
    """Set the Progressing condition. Once a rollout has completed or timed out, the condition stays
    as it is, whatever happens to the pods."""
    name = new["metadata"]["name"] if new else ""
    conditions = found["status"].get("conditions") or []
    before: Object = next((dict(c) for c in conditions if c["type"] == "Progressing"), {})
    over = ("NewReplicaSetAvailable", "ProgressDeadlineExceeded")
    if before.get("reason") in over and f'"{name}"' in before["message"] and not done:
        return
    counts = [found["status"][key] for key in ("updatedReplicas", "availableReplicas")]
    mark = f'ReplicaSet "{name}" is progressing: {counts[0]} updated, {counts[1]} available.'
    same = before.get("message") == mark
    if done:
        holds, reason, mark = True, over[0], f'ReplicaSet "{name}" has successfully progressed.'
    elif same and _waited(api, before) > _deadline(found):
        holds, reason, mark = False, over[1], f'ReplicaSet "{name}" has timed out progressing.'
    else:
        holds, reason = True, "ReplicaSetUpdated"
    set_condition(found, "Progressing", holds, api.timestamp(), reason, mark)
    now = next(c for c in found["status"]["conditions"] if c["type"] == "Progressing")
    same = before.get("message") == mark
    now["lastUpdateTime"] = before["lastUpdateTime"] if same else api.timestamp()


def _waited(api: Api, before: Object) -> float:
    since = datetime.fromisoformat(before["lastUpdateTime"])
    return (datetime.fromisoformat(api.timestamp()) - since).total_seconds()


def _deadline(found: Object) -> float:
    return float(found["spec"]["progressDeadlineSeconds"])
