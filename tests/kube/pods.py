"""Helpers for pods, owner references and conditions."""

import json
from hashlib import sha256
from typing import Any

from tests.kube.api import Api
from tests.kube.kinds import POD, Kind, Object

FINISHED = ("Succeeded", "Failed")


def is_being_deleted(found: Object) -> bool:
    return "deletionTimestamp" in found["metadata"]


def phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def is_active(pod: Object) -> bool:
    return not is_being_deleted(pod) and phase(pod) not in FINISHED


def set_condition(
    found: Object, kind: str, holds: bool, stamp: str, reason: str = "", message: str = ""
) -> None:
    """Set a condition in an object's status. Its ``lastTransitionTime`` changes only if the
    condition's status changes."""
    conditions = found.setdefault("status", {}).setdefault("conditions", [])
    entry = next((each for each in conditions if each["type"] == kind), None)
    if entry is None:
        entry = {"type": kind}
        conditions.append(entry)
    status = "True" if holds else "False"
    if entry.get("status") != status:
        entry["lastTransitionTime"] = stamp
    entry["status"] = status
    for name, value in (("reason", reason), ("message", message)):
        entry.pop(name, None)
        if value:
            entry[name] = value


def owner_of(found: Object) -> Object | None:
    """Return the reference to the object's controller; None if the object has no controller."""
    references = found["metadata"].get("ownerReferences") or []
    return next((each for each in references if each.get("controller")), None)


def owned_by(api: Api, kind: Kind, owner: Object) -> list[Object]:
    namespace, uid = owner["metadata"]["namespace"], owner["metadata"]["uid"]
    return api.store.all(kind, namespace, lambda each: (owner_of(each) or {}).get("uid") == uid)


def reference_to(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pod_from(template: Object, owner: Object) -> Object:
    """Return a new pod, without a name, from a template. Its controller is ``owner``."""
    metadata = template.get("metadata") or {}
    return {
        "metadata": {
            "namespace": owner["metadata"]["namespace"],
            "labels": dict(metadata.get("labels") or {}),
            "annotations": dict(metadata.get("annotations") or {}),
            "ownerReferences": [reference_to(owner)],
        },
        "spec": template["spec"],
    }


def fingerprint(template: Any) -> str:
    """Return ten hexadecimal digits that are the same for equal templates."""
    text = json.dumps(template, sort_keys=True).encode()
    return sha256(text).hexdigest()[:10]


def delete_pod(api: Api, pod: Object) -> None:
    api.delete(POD, pod["metadata"]["namespace"], pod["metadata"]["name"])
