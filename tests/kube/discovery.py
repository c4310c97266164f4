"""Answers discovery requests: the API's groups, versions and resources, and their OpenAPI
schemas."""

from tests.kube.kinds import Kind, Kinds, Object
from tests.kube.schemas import VERSION, definitions

ALL_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
SUB_VERBS = {
    "scale": ["get", "patch", "update"],
    "status": ["get", "patch", "update"],
    "eviction": ["create"],
    "log": ["get"],
    "exec": ["create", "get"],
}
IN_ALL = {
    "Pod", "Service", "Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "Job", "CronJob",
    "HorizontalPodAutoscaler",
}  # fmt: skip
"""The kinds that ``kubectl get all`` shows."""

SUB_KINDS = {"scale": ("autoscaling", "v1", "Scale"), "eviction": ("policy", "v1", "Eviction")}


def answer(path: str, kinds: Kinds) -> Object | None:
    """Return the response to a discovery request, or None if ``path`` is not for discovery."""
    if path in ("/version", "/version/"):
        return version()
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        groups = [_group(name, kinds) for name in _groups(kinds)]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        return {"paths": {p: _where(p) for p in _prefixes(kinds)}}
    if path.startswith("/openapi/v3/"):
        return _document(path.removeprefix("/openapi/v3/"), kinds)
    if path == "/openapi/v2":
        return _swagger()
    if path.startswith("/apis/") and path.count("/") == 2 and path[6:] in _groups(kinds):
        return _group(path[6:], kinds)
    mine = [kind for kind in kinds.all if kind.prefix == path.rstrip("/")]
    return _resources(mine) if mine else None


def version() -> Object:
    major, _, minor = VERSION.partition(".")
    return {
        "major": major,
        "minor": minor,
        "gitVersion": f"v{VERSION}.0",
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z",
        "goVersion": "go1.26",
        "compiler": "gc",
        "platform": "linux/amd64",
    }


def _groups(kinds: Kinds) -> list[str]:
    return sorted({kind.group for kind in kinds.all if kind.group})


def _prefixes(kinds: Kinds) -> list[str]:
    return sorted({kind.prefix.lstrip("/") for kind in kinds.all})


def _group(name: str, kinds: Kinds) -> Object:
    names = sorted({kind.version for kind in kinds.all if kind.group == name})
    versions = [{"groupVersion": f"{name}/{each}", "version": each} for each in names]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": name,
        "versions": versions,
        "preferredVersion": versions[-1],
    }


def _resources(kinds: list[Kind]) -> Object:
    resources = []
    for kind in kinds:
        resources.append(_resource(kind))
        for sub in kind.subresources:
            resources.append(_subresource(kind, sub))
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": kinds[0].api_version,
        "resources": resources,
    }


def _resource(kind: Kind) -> Object:
    return {
        "name": kind.plural,
        "singularName": kind.kind.lower(),
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": ALL_VERBS,
        "shortNames": list(kind.short),
        "categories": ["all"] if kind.kind in IN_ALL else [],
    }


def _subresource(kind: Kind, sub: str) -> Object:
    entry = {
        "name": f"{kind.plural}/{sub}",
        "singularName": "",
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": SUB_VERBS[sub],
    }
    if sub in SUB_KINDS:
        group, version, name = SUB_KINDS[sub]
        entry |= {"group": group, "version": version, "kind": name}
    return entry


# -- schemas ---------------------------------------------------------------------------------


def _where(prefix: str) -> Object:
    return {"serverRelativeURL": f"/openapi/v3/{prefix}?hash={VERSION}"}


def _swagger() -> Object:
    return {"swagger": "2.0", "info": {"title": "Kubernetes", "version": VERSION}, "paths": {}}


def _document(prefix: str, kinds: Kinds) -> Object | None:
    """Return the OpenAPI document of one group and version, or None if there is no such group and
    version. The document contains all schemas, so that every reference resolves."""
    mine = [kind for kind in kinds.all if kind.prefix == f"/{prefix}"]
    if not mine:
        return None
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": f"v{VERSION}.0"},
        "paths": {path: about for kind in mine for path, about in _paths(kind)},
        "components": {"schemas": definitions()},
    }


def _paths(kind: Kind) -> list[tuple[str, Object]]:
    """Return the paths for creating, replacing and patching objects, from which clients learn that
    writes support ``fieldValidation``. Other paths are left out."""
    gvk = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    names = ("fieldValidation", "fieldManager", "dryRun", "force")
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
        for name in names
    ]
    operation = {
        "x-kubernetes-group-version-kind": gvk,
        "parameters": parameters,
        "responses": {"200": {"description": "OK"}},
    }
    base = kind.prefix + ("/namespaces/{namespace}" if kind.namespaced else "")
    return [
        (f"{base}/{kind.plural}", {"post": operation}),
        (f"{base}/{kind.plural}/{{name}}", {"patch": operation, "put": operation}),
    ]
