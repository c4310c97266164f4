"""Renders the chart with Helm 4, and finds objects in the result."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path(__file__).parents[2] / "deploy/helm/baton"
OWN_VALUES = Path(__file__).with_name("values")
RELEASE, NAMESPACE = "demo", "models"
COMMIT = "89abcdef" * 5
"""A revision of a model on the hub."""

SCENARIOS: dict[str, Path | None] = {
    "demo": None,
    "gpu": CHART / "values-gpu.yaml",
    "ray": CHART / "values-ray.yaml",
    "vllm": CHART / "values-vllm.yaml",
    "vllm-pools": OWN_VALUES / "vllm-pools.yaml",
    "autoscaled": OWN_VALUES / "autoscaled.yaml",
    "everything": OWN_VALUES / "everything.yaml",
}
"""Values files by name; the first one is the chart's own values."""

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod template, and the object that owns it."""

    owner: Object
    labels: Mapping[str, str]
    spec: Object

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def role(self) -> str:
        return self.labels["baton.dev/role"]

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def secret_files(self) -> dict[str, tuple[str, str]]:
        """The secret settings that Baton reads from files: the name and key of each one's
        Secret."""
        sources = [
            source["secret"]
            for volume in self.spec.get("volumes", [])
            for source in volume.get("projected", {}).get("sources", [])
        ]
        return {
            item["path"]: (source["name"], item["key"])
            for source in sources
            for item in source["items"]
        }

    @property
    def main(self) -> Object:
        """The container ``baton``."""
        return next(each for each in self.spec["containers"] if each["name"] == "baton")


@dataclass(frozen=True)
class Release:
    objects: tuple[Object, ...]
    notes: str

    def all(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        found = [each for each in self.all(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, f"{kind} {name}: {len(found)} of {self.names(kind)}"
        return found[0]

    def names(self, kind: str) -> set[str]:
        return {each["metadata"]["name"] for each in self.all(kind)}

    def pods(self) -> list[Pod]:
        return [pod for each in self.objects for pod in _pods_of(each)]

    def serving(self) -> list[Pod]:
        """Return the pods that run ``baton serve``; these drain before they stop."""
        return [
            pod
            for pod in self.pods()
            if any(each.get("command", [])[:2] == ["baton", "serve"] for each in pod.containers)
        ]


def _pods_of(owner: Object) -> Iterator[Pod]:
    kind, spec = owner["kind"], owner.get("spec", {})
    if kind == "Pod":
        yield Pod(owner, owner["metadata"]["labels"], spec)
    elif kind == "RayCluster":
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            yield _from_template(owner, group["template"])
    elif "template" in spec:
        yield _from_template(owner, spec["template"])


def _from_template(owner: Object, template: Object) -> Pod:
    return Pod(owner, template["metadata"]["labels"], template["spec"])


@cache
def _chart() -> Chart:
    return Chart.load(CHART)


def values_of(scenario: str) -> Object:
    path = SCENARIOS[scenario]
    values: Object = yaml.safe_load(path.read_text()) if path else {}
    return values


@cache
def release_of(scenario: str) -> Release:
    """Return a scenario's objects; each scenario is rendered only once."""
    return render(values_of(scenario))


def render(values: Object, *, release: str = RELEASE) -> Release:
    """Render the chart with these values. Raises HelmRenderError, HelmValuesError."""
    return parse_release(
        _chart().render(values, name=release, namespace=NAMESPACE, is_install=True)
    )


def parse_release(files: Mapping[str, str]) -> Release:
    """Parse Helm's output. ``files`` has each template's output by the template's path."""
    notes = "".join(text for path, text in files.items() if path.endswith("NOTES.txt"))
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    objects = [each for text in texts for each in yaml.load_all(text, yaml.CSafeLoader) if each]
    return Release(tuple(sorted(objects, key=_place)), notes)


def _place(each: Object) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]


def with_value(below: Object, path: str, value: Any) -> Object:
    """Return a copy of values in which the value at ``path`` (like ``router.replicas``) is set, as
    by ``--set PATH=VALUE``."""
    copy: Object = json.loads(json.dumps(below))
    at = copy
    *folders, last = path.split(".")
    for folder in folders:
        at = at.setdefault(folder, {})
    at[last] = value
    return copy


def make_values(**values: Any) -> Object:
    """Make values from keyword arguments, whose names are paths with ``__`` for each dot."""
    nested: Object = {}
    for path, value in values.items():
        nested = with_value(nested, path.replace("__", "."), value)
    return nested
