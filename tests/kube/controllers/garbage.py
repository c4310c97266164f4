"""The garbage collector deletes objects whose owners are gone, and the namespace controller deletes
the objects in a namespace that is being deleted."""

from tests.kube.api import FOREGROUND, Api
from tests.kube.kinds import NAMESPACE, POD, Kind, Object
from tests.kube.pods import FINISHED, delete_pod, is_being_deleted, phase


def reconcile(api: Api) -> None:
    everything = [
        (kind, found) for kind in api.kinds.all if kind != NAMESPACE
        for found in api.store.all_metadata(kind)
    ]  # fmt: skip
    alive = {found["metadata"]["uid"] for _, found in everything}
    for kind, found in everything:
        references = found["metadata"].get("ownerReferences") or []
        if references and not any(each["uid"] in alive for each in references):
            _delete(api, kind, found)
    for kind, found in everything:
        if FOREGROUND in (found["metadata"].get("finalizers") or []):
            _in_foreground(api, kind, found, everything)
    _namespaces(api, everything)
    _unplaced(api)


def _delete(api: Api, kind: Kind, found: Object) -> None:
    metadata = found["metadata"]
    current = api.store.find(kind, metadata.get("namespace", ""), metadata["name"])
    same = current is not None and current["metadata"]["uid"] == metadata["uid"]
    if current is not None and same and not is_being_deleted(current):
        api.delete(kind, metadata.get("namespace", ""), metadata["name"])


def _in_foreground(
    api: Api, kind: Kind, owner: Object, everything: list[tuple[Kind, Object]]
) -> None:
    uid, left = owner["metadata"]["uid"], 0
    for each_kind, each in everything:
        references = each["metadata"].get("ownerReferences") or []
        if any(reference["uid"] == uid for reference in references):
            left += 1
            _delete(api, each_kind, each)
    if not left:
        metadata = owner["metadata"]
        api.remove_finalizer(kind, metadata.get("namespace", ""), metadata["name"], FOREGROUND)


def _namespaces(api: Api, everything: list[tuple[Kind, Object]]) -> None:
    for namespace in api.store.all(NAMESPACE):
        if not is_being_deleted(namespace):
            continue
        name = namespace["metadata"]["name"]
        inside = [pair for pair in everything if pair[1]["metadata"].get("namespace") == name]
        for kind, found in inside:
            _delete(api, kind, found)
        if not inside:
            api.remove_finalizer(NAMESPACE, "", name, "kubernetes")


def _unplaced(api: Api) -> None:
    """Remove deleted pods that no kubelet would remove, because they have finished or were never
    placed on a node."""

    def is_left(pod: Object) -> bool:
        is_done = phase(pod) in FINISHED or not pod["spec"].get("nodeName")
        return is_being_deleted(pod) and is_done

    for pod in api.store.all(POD, where=is_left):
        delete_pod(api, pod)
