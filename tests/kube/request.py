"""Parses API requests into their verb, kind, object and parameters."""

import re
from dataclasses import dataclass, field
from typing import Any

from tests.kube.failures import Refused
from tests.kube.kinds import Kind, Kinds

PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?/?"
)
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
SINGLE_NAME = re.compile(r"metadata\.name==?([^,]+)")
OF_NAMESPACES = ("finalize", "status")


@dataclass(frozen=True, slots=True)
class Request:
    """An API request. ``verb`` is a verb of Roles, such as ``list``; ``namespace`` and ``name`` may
    be empty."""

    verb: str
    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    query: dict[str, str] = field(default_factory=dict)
    body: Any = None
    content_type: str = "application/json"
    manager: str = "unknown"

    @property
    def resource(self) -> str:
        return self.kind.plural + (f"/{self.subresource}" if self.subresource else "")

    @property
    def dry(self) -> bool:
        return self.query.get("dryRun") == "All"

    @property
    def single(self) -> str:
        """The name of the object to which the request is limited, or "". A list or watch request
        may be limited to one object by a field selector."""
        found = SINGLE_NAME.fullmatch(self.query.get("fieldSelector", ""))
        return self.name or (found[1] if found else "")


def parse_request(
    method: str,
    path: str,
    query: dict[str, str],
    kinds: Kinds,
    body: Any = None,
    content_type: str = "",
    agent: str = "",
) -> Request:
    """Parse an HTTP request. Raises Refused (404) for an unknown path."""
    found = PATH.fullmatch(path)
    if found is None:
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    namespace, plural, name, sub = (
        found["namespace"] or "", found["plural"], found["name"] or "", found["sub"] or "",
    )  # fmt: skip
    if namespace and plural in OF_NAMESPACES and not name:  # a subresource of the namespace itself
        namespace, plural, name, sub = "", "namespaces", namespace, plural
    kind = kinds.of_path(found["group"] or "", found["version"] or "v1", plural)
    if kind is None or (sub and sub not in kind.subresources):
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    verb = VERBS[method]
    if verb == "get" and not name:
        verb = "watch" if query.get("watch") in ("true", "1") else "list"
    if verb == "delete" and not name:
        verb = "deletecollection"
    manager = query.get("fieldManager") or agent.partition("/")[0] or "unknown"
    return Request(verb, kind, namespace, name, sub, query, body, content_type, manager)
