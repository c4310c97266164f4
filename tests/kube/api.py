"""The operations on objects: create, read, update, patch, apply and delete."""

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from baton.clock import Clock
from tests.kube import managers, patches
from tests.kube.defaults import set_defaults
from tests.kube.failures import (
    Refused,
    already_exists,
    bad_request,
    conflict,
    invalid,
    modified,
    not_found,
)
from tests.kube.kinds import (
    CONFIG_MAP,
    DEFINITION,
    NAMESPACE,
    POD,
    PRIORITY_CLASS,
    RUNTIME_CLASS,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Kinds,
    Object,
)
from tests.kube.quotas import quota_errors, set_limit_range_defaults
from tests.kube.request import Request
from tests.kube.roles import add_cluster_roles
from tests.kube.schemas import schema_of
from tests.kube.selectors import fields_match, labels_match
from tests.kube.store import Store, deep_copy, without_nulls
from tests.kube.validation import check_change, check_fields, check_object

LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""The characters of which Kubernetes makes random name suffixes."""

FOREGROUND = "foregroundDeletion"
APPLY_TYPES = ("application/apply-patch+yaml", "application/apply-patch+cbor")


class Api:
    """The API of one cluster. It is thread-safe, and raises Refused where a real API server
    responds with an error."""

    def __init__(self, clock: Clock, service_subnet: str = "10.96.0") -> None:
        self.store = Store()
        self.kinds = Kinds()
        self.clock = clock
        self._subnet = service_subnet
        self._numbers = 0
        self.warnings: list[str] = []
        """Warnings about the last write, for its client."""
        for name in ("default", "kube-system"):
            self.create(NAMESPACE, {"metadata": {"name": name}})
        add_cluster_roles(self)

    # -- reading ---------------------------------------------------------------------------

    def list_objects(self, request: Request) -> Object:
        with self.store.locked():
            items = self.select_objects(request)
            version = self.store.version
        kind = request.kind
        return {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.api_version,
            "metadata": {"resourceVersion": str(version)},
            "items": items,
        }

    def select_objects(self, request: Request) -> list[Object]:
        found = self.store.all(request.kind, request.namespace)
        return [each for each in found if is_selected(request, each)]

    # -- writing ---------------------------------------------------------------------------

    def create(self, kind: Kind, body: Object, request: Request | None = None) -> Object:
        """Create an object on behalf of the request's client or, if ``request`` is None, of a
        controller."""
        with self.store.locked():
            found = self._prepare_new(kind, without_nulls(body), request)
            if self.store.find(kind, *namespace_and_name(found)) is not None:
                raise already_exists(kind, found["metadata"]["name"])
            if "status" in kind.subresources:
                found["status"] = _first_status(kind)
            self._admit(kind, None, found, request)
            if request is not None:
                managers.record_update(None, found, schema_of(kind), self._writer(request))
            return self._saved(kind, None, found, request)

    def update(self, kind: Kind, body: Object, request: Request | None = None) -> Object:
        """Replace an object except for its status. If ``body`` has a resourceVersion, that must be
        the current one."""
        with self.store.locked():
            if request is not None:
                body = {**body, "metadata": _placed(body, request)}
            before = self.store.get(kind, *namespace_and_name(body))
            return self._changed(kind, before, without_nulls(body), request)

    def set_status(self, kind: Kind, body: Object) -> Object:
        """Replace only the status, even if the rest of the object has changed meanwhile. Raises
        Refused (404) if the object with the uid in ``body`` is gone."""
        with self.store.locked():
            now = self.store.get(kind, *namespace_and_name(body))
            if now["metadata"]["uid"] != body["metadata"]["uid"]:
                raise not_found(kind, now["metadata"]["name"])
            return self.store.put(kind, {**now, "status": deep_copy(body.get("status") or {})})

    def patch(self, request: Request) -> tuple[int, Object]:
        kind = request.kind
        with self.store.locked():
            if request.content_type in APPLY_TYPES:
                return self._apply(request)
            before = self.store.get(kind, request.namespace, request.name)
            return 200, self._changed(
                kind, before, without_nulls(self.patched(before, request)), request
            )

    def patched(self, before: Object, request: Request) -> Object:
        if request.content_type == "application/json-patch+json":
            return patches.apply_json_patch(before, request.body)
        if request.content_type == "application/merge-patch+json":
            out: Object = patches.apply_merge_patch(before, request.body)
            return out
        if request.content_type == "application/strategic-merge-patch+json":
            changed: Object = patches.apply_strategic_merge_patch(
                before, request.body, schema_of(request.kind)
            )
            return changed
        raise Refused(
            415,
            "UnsupportedMediaType",
            f"{request.content_type!r} is not the content type of a patch",
        )

    def _apply(self, request: Request) -> tuple[int, Object]:
        kind, body = request.kind, without_nulls(request.body)
        metadata = body.setdefault("metadata", {})
        if "fieldManager" not in request.query:
            raise bad_request("PatchOptions.fieldManager: Required value: for apply patch")
        if metadata.get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        if metadata.get("name", request.name) != request.name:
            raise bad_request("the name of the object does not match the name on the URL")
        metadata["name"] = request.name
        if kind.namespaced:
            metadata["namespace"] = request.namespace
        before = self.store.find(kind, request.namespace, request.name)
        if before is None:
            self._check_place(kind, body, request)
        else:
            _check_versions(kind, before, body)
        self._check_fields(kind, body, request)
        if kind == SECRET:
            _encode_secret(body)
        now = managers.apply(before, body, schema_of(kind), self._writer(request))
        if before is None:
            self._set_identity(kind, now)
        if request.subresource != "status" and "status" in kind.subresources:
            _keep(now, before or {"status": _first_status(kind)}, "status")
        self._admit(kind, before, now, request, checked=True)
        return (200 if before else 201), self._saved(kind, before, now, request)

    def _changed(self, kind: Kind, before: Object, now: Object, request: Request | None) -> Object:
        _check_versions(kind, before, now)
        for name in (
            "uid",
            "creationTimestamp",
            "generation",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
        ):
            _keep(now["metadata"], before["metadata"], name)
        if kind.namespaced:
            now["metadata"]["namespace"] = before["metadata"]["namespace"]
        if "status" in kind.subresources:
            _keep(now, before, "status")
        self._admit(kind, before, now, request)
        if request is not None:
            _keep(now["metadata"], before["metadata"], "managedFields")
            if not _equal(before, now):
                managers.record_update(before, now, schema_of(kind), self._writer(request))
        return self._saved(kind, before, now, request)

    # -- deleting --------------------------------------------------------------------------

    def delete(
        self, kind: Kind, namespace: str, name: str, options: Object | None = None
    ) -> Object:
        """Delete an object; ``options`` are DeleteOptions. A pod on a node gets its grace period,
        and is then removed by its kubelet. Returns the removed object or, if it is only marked as
        deleted, its new version."""
        options = options or {}
        with self.store.locked():
            found = self.store.get(kind, namespace, name)
            metadata = found["metadata"]
            for key, value in (options.get("preconditions") or {}).items():
                if value is not None and metadata[key] != value:
                    why = f"Precondition failed: {key}: {value}, in object meta: {metadata[key]}"
                    raise conflict(kind, name, why)
            if options.get("propagationPolicy") == "Foreground":
                metadata["finalizers"] = sorted({*metadata.get("finalizers", []), FOREGROUND})
            grace = _grace(kind, found, options)
            if kind == NAMESPACE:
                metadata["finalizers"] = ["kubernetes"]
            if not grace and not metadata.get("finalizers"):
                return self.store.remove(kind, namespace, name)
            return self.store.put(kind, self._mark_deleted(found, grace))

    def _mark_deleted(self, found: Object, grace: int) -> Object:
        """Set the deletion timestamp. A second deletion can only move it to an earlier time."""
        metadata = found["metadata"]
        ends = self.timestamp(grace)
        if metadata.get("deletionTimestamp", "9") > ends:
            metadata["deletionTimestamp"] = ends
            metadata["deletionGracePeriodSeconds"] = grace
        return found

    def remove_finalizer(self, kind: Kind, namespace: str, name: str, finalizer: str) -> None:
        """Remove a finalizer. If it was the last one and the object is being deleted, remove the
        object, too."""
        with self.store.locked():
            found = self.store.get(kind, namespace, name)
            left = [f for f in found["metadata"].get("finalizers", []) if f != finalizer]
            found["metadata"]["finalizers"] = left
            if left or "deletionTimestamp" not in found["metadata"]:
                self.store.put(kind, found)
            else:
                self.store.remove(kind, namespace, name)

    # -- parts of all writes ---------------------------------------------------------------

    def _prepare_new(self, kind: Kind, found: Object, request: Request | None) -> Object:
        """Give a new object a name, a namespace, a uid and a creation time."""
        metadata = found.setdefault("metadata", {})
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise invalid(kind, "", "metadata.name: Required value: name or generateName")
            metadata["name"] = metadata["generateName"] + self.suffix()
        if request is not None and kind.namespaced:
            metadata.setdefault("namespace", request.namespace)
        if request is not None and metadata.get("namespace", "") != request.namespace:
            raise bad_request("the namespace of the object does not match the request's")
        self._check_place(kind, found, request)
        self._set_identity(kind, found)
        return found

    def _set_identity(self, kind: Kind, found: Object) -> None:
        self._numbers += 1
        found["apiVersion"], found["kind"] = kind.api_version, kind.kind
        name = f"{kind.plural}/{found['metadata']['name']}/{self._numbers}"
        found["metadata"] |= {
            "uid": str(uuid5(NAMESPACE_OID, name)),
            "creationTimestamp": self.timestamp(),
        }

    def _check_place(self, kind: Kind, found: Object, request: Request | None) -> None:
        given = (found.get("apiVersion", kind.api_version), found.get("kind", kind.kind))
        if given != (kind.api_version, kind.kind):
            raise bad_request(
                f"the object's apiVersion and kind are {given}; the request is for "
                f"{(kind.api_version, kind.kind)}"
            )
        namespace = found["metadata"].get("namespace", "")
        if kind.namespaced and self.store.find(NAMESPACE, "", namespace) is None:
            raise not_found(NAMESPACE, namespace)

    def _check_fields(self, kind: Kind, found: Object, request: Request | None) -> None:
        strict = request is not None and request.query.get("fieldValidation") == "Strict"
        self.warnings = check_fields(kind, found, schema_of(kind), strict)

    def _admit(
        self,
        kind: Kind,
        before: Object | None,
        now: Object,
        request: Request | None,
        checked: bool = False,
    ) -> None:
        if request is not None and not checked:
            self._check_fields(kind, now, request)
        if kind == SECRET:
            _encode_secret(now)
        if kind == SERVICE:
            self._address(before, now)
        set_defaults(kind.kind, now)
        if kind == POD and before is None:
            set_limit_range_defaults(self.store, now)
        check_object(kind, now)
        if before is not None:
            check_change(kind, before, now)
        elif kind == POD:
            for why in (*self._missing_references(now), *quota_errors(self.store, now)):
                text = f'pods "{now["metadata"]["name"]}" is forbidden: {why}'
                raise Refused(403, "Forbidden", text)

    def _missing_references(self, pod: Object) -> Iterator[str]:
        """Yield an error for each object that the pod refers to and that must exist before the pod
        is created, but does not."""
        spec, namespace = pod["spec"], pod["metadata"]["namespace"]
        account, runtime = spec["serviceAccountName"], spec.get("runtimeClassName")
        priority = spec.get("priorityClassName") or "system-"
        if self.store.find(SERVICE_ACCOUNT, namespace, account) is None:
            yield f"error looking up service account {namespace}/{account}: not found"
        if runtime and self.store.find(RUNTIME_CLASS, "", runtime) is None:
            yield f'pod rejected: RuntimeClass "{runtime}" not found'
        known = priority.startswith("system-") or self.store.find(PRIORITY_CLASS, "", priority)
        if not known:
            yield f"no PriorityClass with name {priority} was found"

    def _address(self, before: Object | None, now: Object) -> None:
        """Assign a permanent cluster IP to a service, unless it is headless or an ExternalName."""
        spec = now["spec"]
        if before is not None and before["spec"].get("clusterIP"):
            spec.setdefault("clusterIP", before["spec"]["clusterIP"])
        elif spec.get("type") != "ExternalName" and not spec.get("clusterIP"):
            taken = {each["spec"].get("clusterIP") for each in self.store.all(SERVICE)}
            free = (f"{self._subnet}.{number}" for number in range(1, 255))
            spec["clusterIP"] = next(address for address in free if address not in taken)
        if spec.get("clusterIP"):
            spec["clusterIPs"] = [spec["clusterIP"]]

    def _saved(
        self, kind: Kind, before: Object | None, now: Object, request: Request | None
    ) -> Object:
        metadata = now["metadata"]
        if "spec" in now:
            changed = before is not None and _content(before) != _content(now)
            last = (before or {"metadata": {}})["metadata"].get("generation", 0)
            metadata["generation"] = last + (before is None or changed)
        if request is not None and request.dry:
            return now
        saved = self.store.put(kind, now)
        if kind == NAMESPACE and before is None:
            name = metadata["name"]
            account = {"metadata": {"name": "default", "namespace": name}}
            self.create(SERVICE_ACCOUNT, account)
            root = {"name": "kube-root-ca.crt", "namespace": name}
            self.create(CONFIG_MAP, {"metadata": root, "data": {}})
        if kind == DEFINITION:
            self.kinds.define(saved)
        dying = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        if dying and kind != POD:
            return self.store.remove(kind, *namespace_and_name(saved))
        return saved

    def _writer(self, request: Request) -> managers.Writer:
        return managers.Writer(
            request.manager, request.kind.api_version, self.timestamp(),
            request.subresource, request.query.get("force") == "true",
        )  # fmt: skip

    # -- names and times -------------------------------------------------------------------

    def timestamp(self, later_seconds: float = 0.0) -> str:
        seconds = self.clock.wall_nanoseconds() // 10**9 + later_seconds
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def suffix(self) -> str:
        """Return five characters, which differ from those of every other call."""
        self._numbers += 1
        number, out = self._numbers * 7_368_787 % 27**5, ""  # coprime, so no suffix repeats
        for _ in range(5):
            number, letter = divmod(number, len(LETTERS))
            out += LETTERS[letter]
        return out


def is_selected(request: Request, found: Object) -> bool:
    """Return whether a list or watch request selects this object."""
    metadata = found["metadata"]
    return (
        request.namespace in ("", metadata.get("namespace", ""))
        and request.name in ("", metadata["name"])
        and labels_match(request.query.get("labelSelector", ""), metadata.get("labels") or {})
        and fields_match(request.query.get("fieldSelector", ""), found)
    )


def namespace_and_name(found: Object) -> tuple[str, str]:
    return found["metadata"].get("namespace", "") or "", found["metadata"]["name"]


def _first_status(kind: Kind) -> Object:
    return {"phase": "Pending"} if kind == POD else {}


def _placed(body: Object, request: Request) -> Object:
    """Return the body's metadata with the name and namespace from the URL. Raises Refused (400) if
    the body contains a different name or namespace."""
    metadata: Object = body.get("metadata") or {}
    in_url = {"name": request.name}
    in_url |= {"namespace": request.namespace} if request.namespace else {}
    for key, value in in_url.items():
        if (metadata.get(key) or value) != value:
            raise bad_request(f"the {key} of the object does not match the {key} on the URL")
    return {**metadata, **in_url}


def _content(found: Object) -> Object:
    return {key: value for key, value in found.items() if key not in ("metadata", "status")}


def _equal(before: Object, now: Object) -> bool:
    hidden = ("resourceVersion", "managedFields", "generation")

    def plain(found: Object) -> Any:
        metadata = {k: v for k, v in found["metadata"].items() if k not in hidden}
        return {**found, "metadata": metadata}

    return bool(plain(before) == plain(now))


def _keep(now: Object, before: Object | None, name: str) -> None:
    now.pop(name, None)
    if before is not None and name in before:
        now[name] = deep_copy(before[name])


def _check_versions(kind: Kind, before: Object, now: Object) -> None:
    """Check that the uid and the resourceVersion in a write, if given, are the object's current
    ones."""
    old, new = before["metadata"], now["metadata"]
    if new.get("uid") not in (None, old["uid"]):
        why = f"Precondition failed: UID in precondition: {new['uid']}, UID in object meta"
        raise conflict(kind, old["name"], f"{why}: {old['uid']}")
    if new.get("resourceVersion") not in (None, "", old["resourceVersion"]):
        raise modified(kind, old["name"])


def _grace(kind: Kind, found: Object, options: Object) -> int:
    if kind != POD or not found["spec"].get("nodeName"):
        return 0
    if (found.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    seconds = options.get("gracePeriodSeconds")
    return int(found["spec"]["terminationGracePeriodSeconds"] if seconds is None else seconds)


def _encode_secret(found: Object) -> None:
    plain = found.pop("stringData", None) or {}
    if plain:
        encoded = {name: base64.b64encode(text.encode()).decode() for name, text in plain.items()}
        found["data"] = (found.get("data") or {}) | encoded
    found.setdefault("type", "Opaque")
