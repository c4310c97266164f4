"""Computes the environment variables of a container, with references and ``$(NAME)`` expanded."""

import base64
import re
from collections.abc import Mapping

from tests.kube.api import Api
from tests.kube.kinds import CONFIG_MAP, SECRET, Kind, Object

REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


class Missing(Exception):
    """An object or key to which a pod refers does not exist (yet)."""


def environment(api: Api, pod: Object, container: Object) -> dict[str, str]:
    """Return the environment of a container. Raises Missing if an object or key to which it refers
    does not exist."""
    out: dict[str, str] = {}
    namespace = pod["metadata"]["namespace"]
    for source in container.get("envFrom") or []:
        prefix = source.get("prefix", "")
        out |= {prefix + n: v for n, v in _all(api, namespace, source).items()}
    for variable in container.get("env") or []:
        value = _value(api, pod, container, variable)
        if value is not None:
            out[variable["name"]] = expand_references(value, out)
    return out


def expand_references(text: str, known: Mapping[str, str]) -> str:
    """Expand ``$(NAME)`` if the name is known, and ``$$`` to a dollar sign."""

    def expand(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return known.get(found[1], found[0])

    return REFERENCE.sub(expand, text)


def _value(api: Api, pod: Object, container: Object, variable: Object) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return str(variable.get("value", ""))
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource(container, source["resourceFieldRef"]["resource"])
    kind, reference = next(iter(source.items()))
    kind_of = SECRET if kind == "secretKeyRef" else CONFIG_MAP
    data = contents(api, kind_of, pod["metadata"]["namespace"], reference)
    if reference["key"] not in data:
        if reference.get("optional"):
            return None
        problem = f"couldn't find key {reference['key']} in {kind_of.kind}"
        raise Missing(f"{problem} {pod['metadata']['namespace']}/{reference['name']}")
    return data[reference["key"]].decode()


def _all(api: Api, namespace: str, source: Object) -> dict[str, str]:
    kind = SECRET if "secretRef" in source else CONFIG_MAP
    reference = source.get("secretRef") or source["configMapRef"]
    data = contents(api, kind, namespace, reference)
    return {name: value.decode() for name, value in data.items()}


def contents(api: Api, kind: Kind, namespace: str, reference: Object) -> dict[str, bytes]:
    """Return the data of a Secret or ConfigMap. If there is no such object, return an empty dict if
    the reference is optional, and otherwise raise Missing."""
    name = reference.get("name") or reference["secretName"]
    found = api.store.find(kind, namespace, name)
    if found is None:
        if reference.get("optional"):
            return {}
        raise Missing(f'{kind.kind.lower()} "{name}" not found')
    if kind == SECRET:
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
    plain = {key: value.encode() for key, value in (found.get("data") or {}).items()}
    binary = found.get("binaryData") or {}
    return plain | {key: base64.b64decode(value) for key, value in binary.items()}


def field(pod: Object, path: str) -> str:
    """Return the value of a field for the downward API, such as ``metadata.labels['x']`` or
    ``status.podIP``."""
    found = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if found:
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    place = pod
    for name in path.split("."):
        place = (place or {}).get(name)  # type: ignore[assignment]
    return "" if place is None else str(place)


def resource(container: Object, path: str) -> str:
    """Return the amount of a resource for the downward API, rounded up: ``limits.memory`` is in
    bytes, ``requests.cpu`` in whole CPUs."""
    from tests.kube.quantities import quantity

    kind, _, name = path.partition(".")
    amount = ((container.get("resources") or {}).get(kind) or {}).get(name, 0)
    return str(-(-int(quantity(amount) * 1000) // 1000))
