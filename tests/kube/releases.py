"""Compares the manifest of a Helm release, which Helm keeps in a Secret, with the objects in the
cluster."""

import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any

import yaml

from tests.kube.api import Api
from tests.kube.kinds import SECRET, Object


def deployed_revision(api: Api, namespace: str, release: str) -> Object:
    """Return the deployed revision of a release, a dict that has ``version`` and ``manifest``."""
    labels = {"owner": "helm", "name": release, "status": "deployed"}
    (secret,) = [
        each
        for each in api.store.all(SECRET, namespace)
        if labels.items() <= (each["metadata"].get("labels") or {}).items()
    ]
    packed = base64.b64decode(base64.b64decode(secret["data"]["release"]))
    revision: Object = json.loads(gzip.decompress(packed))
    return revision


def manifest_objects(revision: Object) -> list[Object]:
    return [each for each in yaml.safe_load_all(revision["manifest"]) if each]


def differences(api: Api, namespace: str, release: str) -> list[str]:
    """Return the paths of all fields in the manifest of the deployed revision that have other
    values in the cluster. An empty list means that the cluster has this revision."""
    found = []
    for wanted in manifest_objects(deployed_revision(api, namespace, release)):
        kind = api.kinds.named(wanted["apiVersion"], wanted["kind"])
        assert kind is not None, wanted["kind"]
        live = api.store.find(
            kind, namespace if kind.namespaced else "", wanted["metadata"]["name"]
        )
        where = f"{wanted['kind']} {wanted['metadata']['name']}"
        found += [where] if live is None else list(_differences(where, _encoded(wanted), live))
    return found


def _encoded(wanted: Object) -> Object:
    """Return an object with its ``stringData`` moved to ``data`` in base64, as the API server
    stores it."""
    if "stringData" not in wanted:
        return wanted
    data = {name: base64.b64encode(text.encode()).decode()
            for name, text in wanted["stringData"].items()}  # fmt: skip
    return {key: each for key, each in wanted.items() if key != "stringData"} | {"data": data}


def _differences(path: str, wanted: Any, live: Any) -> Iterator[str]:
    if isinstance(wanted, dict) and isinstance(live, dict):
        for key, value in wanted.items():
            if value not in (None, {}, []):
                yield from _differences(f"{path}.{key}", value, live.get(key))
    elif isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        for number, (one, other) in enumerate(zip(wanted, live, strict=True)):
            yield from _differences(f"{path}[{number}]", one, other)
    elif wanted != live:
        yield path
