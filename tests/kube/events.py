"""Events that controllers and kubelets record about objects."""

from tests.kube.api import Api
from tests.kube.kinds import EVENT, Object

MOST = 500
"""The maximum number of events to keep in a namespace. A new one then replaces the oldest."""


def record_event(api: Api, about: Object, reason: str, message: str, kind: str = "Normal") -> None:
    """Record an event about the object ``about``. If it repeats an earlier event, only increment
    that event's count."""
    metadata = about["metadata"]
    namespace = metadata.get("namespace") or "default"
    events = api.store.all(EVENT, namespace)
    for event in events:
        same = event["involvedObject"]["uid"] == metadata["uid"]
        if same and (event["reason"], event["message"]) == (reason, message):
            event["count"] += 1
            event["lastTimestamp"] = api.timestamp()
            api.store.put(EVENT, event)
            return
    if len(events) >= MOST:
        oldest = min(events, key=lambda event: int(event["metadata"]["resourceVersion"]))
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
            "firstTimestamp": api.timestamp(),
            "lastTimestamp": api.timestamp(),
            "source": {"component": "tests.kube"},
        },
    )
