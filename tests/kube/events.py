"""Events: what a controller or a kubelet has to say of an object."""

from tests.kube.api import Api
from tests.kube.kinds import EVENT, Object

MOST = 500
"""That are kept; the oldest go."""


def tell(api: Api, about: Object, reason: str, message: str, kind: str = "Normal") -> None:
    """What was told before counts up."""
    metadata = about["metadata"]
    namespace = metadata.get("namespace") or "default"
    told = api.store.all(EVENT, namespace)
    for event in told:
        same = event["involvedObject"]["uid"] == metadata["uid"]
        if same and (event["reason"], event["message"]) == (reason, message):
            event["count"] += 1
            event["lastTimestamp"] = api.stamp()
            api.store.put(EVENT, event)
            return
    if len(told) >= MOST:
        oldest = min(told, key=lambda event: int(event["metadata"]["resourceVersion"]))
        api.delete(EVENT, namespace, oldest["metadata"]["name"])
    involved = {
        "kind": about["kind"],
        "apiVersion": about["apiVersion"],
        "name": metadata["name"],
        "namespace": namespace,
        "uid": metadata["uid"],
    }
    api.create(
        EVENT,
        {
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": namespace},
            "involvedObject": involved,
            "reason": reason,
            "message": message,
            "type": kind,
            "count": 1,
            "firstTimestamp": api.stamp(),
            "lastTimestamp": api.stamp(),
            "source": {"component": "tests.kube"},
        },
    )
