"""Validates the names, labels, selectors and pods of objects, and checks that immutable fields
don't change."""

import re
from collections.abc import Iterator, Set

from tests.kube.failures import bad_request, invalid
from tests.kube.kinds import Kind, Object
from tests.kube.schemas import Schema
from tests.kube.selectors import selects

LABEL_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
AS_LABEL = {"Service", "Namespace"}
ANY_NAME = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
SET_MAY_CHANGE = {
    "replicas", "template", "updateStrategy", "minReadySeconds", "ordinals",
    "persistentVolumeClaimRetentionPolicy", "revisionHistoryLimit",
}  # fmt: skip


def check_fields(kind: Kind, found: Object, schema: Schema, strict: bool) -> list[str]:
    """Return warnings about unknown fields. Raises Refused (400) if a value has a wrong type, or if
    ``strict`` is set and a field is unknown."""
    wrong = list(schema.validate(found))
    unknown = [each for each in wrong if each.startswith("unknown field")]
    types = [each for each in wrong if each not in unknown]
    if types:
        name = kind.kind
        raise bad_request(f"{name} in version {kind.version!r} cannot be handled: {types[0]}")
    if unknown and strict:
        raise bad_request("strict decoding error: " + ", ".join(unknown))
    return unknown


def check_object(kind: Kind, found: Object) -> None:
    """Validate an object. Raises Refused (422)."""
    name = found["metadata"]["name"]
    for why in _wrong(kind, found):
        raise invalid(kind, name, why)


def _wrong(kind: Kind, found: Object) -> Iterator[str]:
    metadata = found["metadata"]
    name, pattern = metadata["name"], LABEL_NAME if kind.kind in AS_LABEL else SUBDOMAIN
    longest = 63 if kind.kind in AS_LABEL else 253
    if kind.kind not in ANY_NAME and not (pattern.fullmatch(name) and len(name) <= longest):
        yield f"metadata.name: Invalid value: {name!r}"
    for key, value in (metadata.get("labels") or {}).items():
        if not isinstance(value, str) or len(value) > 63 or not LABEL_VALUE.fullmatch(value):
            yield f"metadata.labels: Invalid value: {key}={value!r}"
    for key, value in (metadata.get("annotations") or {}).items():
        if not isinstance(value, str):
            yield f"metadata.annotations: Invalid value: {key}={value!r}"
    spec = found.get("spec") or {}
    if kind.group == "apps":
        yield from _workload(spec)
    if kind.kind == "Pod":
        yield from _pod(spec)
    if kind.kind == "Service":
        yield from _service(spec)


def _workload(spec: Object) -> Iterator[str]:
    template = spec.get("template") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    if not selects(spec.get("selector"), labels):
        yield "spec.template.metadata.labels: `selector` does not match template `labels`"
    if spec.get("replicas", 1) < 0:
        yield "spec.replicas: must be greater than or equal to 0"
    rolling = (spec.get("strategy") or {}).get("rollingUpdate") or {}
    if rolling and {str(value) for value in rolling.values()} <= {"0", "0%"}:
        yield "spec.strategy.rollingUpdate.maxUnavailable: may not be 0 when `maxSurge` is 0"
    claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates") or []}
    yield from _pod(template.get("spec") or {}, claims)


def _pod(spec: Object, claims: Set[str] = frozenset()) -> Iterator[str]:
    """Yield errors in a pod's spec. ``claims`` are the names of volumes that a StatefulSet adds."""
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    if not spec.get("containers"):
        yield "spec.containers: Required value"
    names = [container["name"] for container in containers]
    if len(set(names)) < len(names):
        yield f"spec.containers: Duplicate value: {names}"
    volumes = claims | {volume["name"] for volume in spec.get("volumes") or []}
    for container in containers:
        paths = [mount["mountPath"] for mount in container.get("volumeMounts") or []]
        for mount in container.get("volumeMounts") or []:
            if mount["name"] not in volumes:
                yield f"spec.containers[].volumeMounts: Not found: {mount['name']!r}"
        if len(set(paths)) < len(paths):
            yield f"spec.containers[].volumeMounts: must be unique: {paths}"
        for variable in container.get("env") or []:
            if variable.get("value") and variable.get("valueFrom"):
                yield (
                    f"spec.containers[].env: {variable['name']} has both value and valueFrom; "
                    "it may have only one"
                )
        if not container.get("image"):
            yield f"spec.containers[{container['name']}].image: Required value"


def _service(spec: Object) -> Iterator[str]:
    ports = spec.get("ports") or []
    if len(ports) > 1 and not all(port.get("name") for port in ports):
        yield "spec.ports: Required value: name, with more than one port"
    if not ports and spec.get("clusterIP") != "None":
        yield "spec.ports: Required value"


def check_change(kind: Kind, before: Object, now: Object) -> None:
    """Check a change of an object. Raises Refused (422) if an immutable field has changed."""
    old, new = before.get("spec") or {}, now.get("spec") or {}
    name = now["metadata"]["name"]
    if kind.group == "apps" and old.get("selector") != new.get("selector"):
        raise invalid(kind, name, "spec.selector: field is immutable")
    if kind.kind == "StatefulSet":
        changed = {key for key in {*old, *new} if old.get(key) != new.get(key)}
        if changed - SET_MAY_CHANGE:
            fields = ", ".join(sorted(changed - SET_MAY_CHANGE))
            why = f"spec: Forbidden: a StatefulSet's fields {fields} may not be changed"
            raise invalid(kind, name, why)
    if kind.kind == "Job" and old.get("template") != new.get("template"):
        raise invalid(kind, name, "spec.template: field is immutable")
    if kind.kind == "Pod" and _frozen(old) != _frozen(new):
        why = "fields other than images, tolerations and nodeName"
        raise invalid(kind, name, f"spec: Forbidden: pod updates may not change {why}")
    if kind.kind == "Service" and old.get("clusterIP") != new.get("clusterIP"):
        raise invalid(kind, name, "spec.clusterIPs[0]: may not change once set")


def _frozen(spec: Object) -> Object:
    """Return the immutable part of a pod's spec: all fields except images, tolerations and the
    node."""
    out = {key: value for key, value in spec.items() if key not in ("tolerations", "nodeName")}
    for name in ("containers", "initContainers"):
        out[name] = [
            {key: value for key, value in container.items() if key != "image"}
            for container in spec.get(name) or []
        ]
    return out
