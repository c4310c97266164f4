"""Reads the schemas of all fields from Kubernetes' own JSON schemas (the package
kubernetes-validate)."""

import functools
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from tests.kube.kinds import Kind, Object

VERSION = "1.36"
DEFAULT_KEYS = {"protocol": "TCP"}
"""The default values of fields that are keys of associative lists."""


class Schema:
    """The schema of one field. The schema of an unknown field, such as one of a custom resource,
    accepts any value: maps are merged, and lists are replaced."""

    def __init__(self, node: Object) -> None:
        self._node = node
        """The schema of the field itself; ``_type`` is the schema of the type to which it
        refers."""
        self._type = definitions()[node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else node

    @property
    def known(self) -> bool:
        return "properties" in self._type

    @property
    def atomic(self) -> bool:
        """Whether the whole map has a single owner, and is replaced as a whole."""
        kinds = (self._node.get("x-kubernetes-map-type"), self._type.get("x-kubernetes-map-type"))
        return "atomic" in kinds

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the fields that are the keys of an associative list; empty for other
        fields."""
        if self._node.get("x-kubernetes-list-type") != "map":
            return ()
        return tuple(self._node["x-kubernetes-list-map-keys"])

    @property
    def is_set(self) -> bool:
        return self._node.get("x-kubernetes-list-type") == "set"

    @property
    def merge_key(self) -> str:
        """The key by which strategic merge patches merge the list. It is empty if they replace the
        list, or if the list contains plain values."""
        strategy = self._node.get("x-kubernetes-patch-strategy", "")
        return self._node.get("x-kubernetes-patch-merge-key", "") if "merge" in strategy else ""

    @property
    def merges_values(self) -> bool:
        """Whether a strategic merge patch adds values to this list of plain values, instead of
        replacing it."""
        return "merge" in self._node.get("x-kubernetes-patch-strategy", "") and not self.merge_key

    def field(self, name: str) -> "Schema | None":
        """Return the schema of the field ``name`` within this field; None if there is no such
        field."""
        properties = self._type.get("properties")
        if properties is not None:
            return Schema(properties[name]) if name in properties else None
        more = self._type.get("additionalProperties")
        return Schema(more) if isinstance(more, dict) else ANY

    @property
    def item(self) -> "Schema":
        items = self._type.get("items")
        return Schema(items) if isinstance(items, dict) else ANY

    def key_of(self, item: Object) -> tuple[tuple[str, Any], ...]:
        """Return the key of an item of an associative list."""
        pairs = ((key, item.get(key, DEFAULT_KEYS.get(key))) for key in self.keys)
        return tuple((key, value) for key, value in pairs if value is not None)

    def validate(self, value: Any, path: str = "") -> Iterator[str]:
        """Yield a message for each unknown field and each wrong type in ``value``, like ``unknown
        field "spec.x"``. ``path`` is the path of ``value`` itself."""
        if value is None:
            return
        if not self._takes(value):
            yield f'"{path}" is {json.dumps(value)}, which is not {self._names}'
        elif isinstance(value, dict):
            for name, inner in value.items():
                below, where = self.field(name), f"{path}.{name}".lstrip(".")
                if below is None:
                    yield f'unknown field "{where}"'
                else:
                    yield from below.validate(inner, where)
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                yield from self.item.validate(inner, f"{path}[{number}]")

    @property
    def _types(self) -> set[str]:
        named = self._type.get("type", [])
        types = set([named] if isinstance(named, str) else named)
        for each in self._type.get("oneOf", []):
            types |= set(each["type"])
        return types - {"null"}

    @property
    def _names(self) -> str:
        return " or ".join(sorted(self._types))

    def _takes(self, value: Any) -> bool:
        types = self._types
        return not types or any(_is(value, name) for name in types)


ANY = Schema({})


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    types = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "object": dict,
        "array": list,
    }
    return name in types and isinstance(value, types[name])  # type: ignore[arg-type]


def schema_of(kind: Kind) -> Schema:
    return _schemas().get((kind.group, kind.version, kind.kind), ANY)


@functools.cache
def definitions() -> Object:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    text = (folder / f"v{VERSION}.0-local" / "_definitions.json").read_text(encoding="utf-8")
    definitions: Object = json.loads(text)["$defs"]
    return definitions


@functools.cache
def _schemas() -> dict[tuple[str, str, str], Schema]:
    found = {}
    for node in definitions().values():
        for each in node.get("x-kubernetes-group-version-kind", []):
            found[(each["group"], each["version"], each["kind"])] = Schema(node)
    return found
