"""Tests that values.schema.json rejects invalid values with an error that names them, and accepts
every values file."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python import HelmValuesError, lint

from tests.helm.chart import CHART, SCENARIOS, render, values_of, with_value

UNKNOWN = "additional properties '{}' not allowed"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        # Misspelled names
        ("pool", {}, UNKNOWN.format("pool")),
        ("pools.decode.replica", 3, "'/pools/decode': " + UNKNOWN.format("replica")),
        ("pools.Decode", {}, "'/pools': " + UNKNOWN.format("Decode")),
        ("pools.a-name-longer-than-twenty", {}, UNKNOWN.format("a-name-longer-than-twenty")),
        ("pools.decode.gpu.number", 1, "'/pools/decode/gpu': " + UNKNOWN.format("number")),
        ("settings.max_runing", 1, "'/settings': " + UNKNOWN.format("max_runing")),
        ("pools.decode.settings.maxRunning", 1, UNKNOWN.format("maxRunning")),
        ("router.ingres", {}, "'/router': " + UNKNOWN.format("ingres")),
        ("images.worker", {}, "'/images': " + UNKNOWN.format("worker")),
        ("pools.decode.tolerations", [{"keys": "gpu"}], "decode/tolerations/0"),
        # Settings that the chart sets itself
        ("settings.redis_url", "redis://x", UNKNOWN.format("redis_url")),
        ("settings.autoscale", "on", UNKNOWN.format("autoscale")),
        ("router.settings.api_keys", "key=tenant", UNKNOWN.format("api_keys")),
        # Types
        ("pools.decode.replicas", "3", "'/pools/decode/replicas': got string, want integer"),
        ("pools.decode.replicas", 1.5, "'/pools/decode/replicas'"),
        ("pools.decode.enabled", "yes", "'/pools/decode/enabled': got string, want boolean"),
        ("router.service.port", 0, "'/router/service/port'"),
        ("router.nodeSelector", ["gpu"], "'/router/nodeSelector': got array, want object"),
        ("router.nodeSelector.gpu", True, "'/router/nodeSelector/gpu': got boolean, want string"),
        ("settings.max_sequences", "many", "'/settings/max_sequences': got string, want integer"),
        ("settings.tenant_fairness", 1, "'/settings/tenant_fairness'"),
        ("traces.sample", 1.5, "'/traces/sample'"),
        ("security.user", 0, "'/security/user'"),
        # Enumerations
        ("replicasManagedBy", "nobody", "'/replicasManagedBy'"),
        ("pools.decode.role", "router", "'/pools/decode/role'"),
        ("model.source", "s3", "'/model/source'"),
        ("conductor.autoscale.mode", "maybe", "'/conductor/autoscale/mode'"),
        ("monitoring.podMonitor", "maybe", "'/monitoring/podMonitor'"),
        ("settings.store_eviction", "random", "'/settings/store_eviction'"),
        ("images.pullPolicy", "Sometimes", "'/images/pullPolicy'"),
        # Patterns
        ("cluster", "My_Cluster", "'/cluster'"),
        ("images.cpu.tag", "latest", "'/images/cpu/tag'"),
        ("images.cpu.digest", "sha256:12", "'/images/cpu/digest'"),
        ("model.image.reference", "registry.example.com/m:latest", "'/model/image/reference'"),
        ("model.hub.id", "Qwen3-8B", "'/model/hub/id'"),
        ("model.hub.revision", "main", "'/model/hub/revision'"),
        ("model.path", "../etc", "'/model/path'"),
        ("model.hostPath.path", "models", "'/model/hostPath/path'"),
        ("pools.decode.gpu.resourceName", "gpu", "'/pools/decode/gpu/resourceName'"),
        ("pools.decode.sharedMemory", True, "'/pools/decode/sharedMemory'"),
        ("secrets.existingSecret", "My Secret", "'/secrets/existingSecret'"),
        ("traces.endpoint", "collector:4317", "'/traces/endpoint'"),
        ("redis.external.url", "cache:6379", "'/redis/external/url'"),
        ("redis.external.url", "sentinel://cache:6379", "'/redis/external/url'"),
        ("monitoring.interval", "15", "'/monitoring/interval'"),
    ],
)
def test_wrong_values_are_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(HelmValuesError) as refused:
        render(with_value({}, path, value))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("global.storageClass", "fast"),
        ("pools.decode.replicas", 0),
        ("pools.decode", None),
        ("pools.decode.pdb.minAvailable", "50%"),
        ("pools.decode.tolerations", [{"operator": "Exists"}]),
        ("kvstore.memory", 1073741824),
        ("monitoring.podMonitor", "true"),
        ("conductor.autoscale.mode", False),
        ("images.cpu.registry", "registry.example.com:5000"),
    ],
)
def test_valid_values_are_accepted(path: str, value: Any) -> None:
    values = with_value({"pools": {"other": {"role": "decode"}}}, path, value)
    assert render(values).objects


OPEN = {
    "global", "settings", "resources", "supervisorResources", "strategy", "issuerRef", "behavior",
    "resourceClaims", "poolDefaults.model", "pools", "labels", "annotations",
}  # fmt: skip
"""Values whose contents have no defaults, or are described elsewhere."""


def named_paths(schema: Any, definitions: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all values that the schema names."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}"
        if not {name, f"{path}{name}"} & OPEN:
            yield from named_paths(inner, definitions, f"{path}{name}.")


def leaves(values: Any, path: str = "") -> Iterator[str]:
    for name, inner in values.items():
        yield f"{path}{name}"
        if isinstance(inner, dict) and not {name, f"{path}{name}"} & OPEN:
            yield from leaves(inner, f"{path}{name}.")


def test_every_value_in_the_schema_has_a_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    known = set(named_paths(schema, schema["definitions"])) - {"global"}
    assert known - set(leaves(values)) == set()


def test_every_default_is_used_in_a_template() -> None:
    texts = [path.read_text() for path in (CHART / "templates").rglob("*.*")]
    used = set(re.findall(r'[."](\w+)', " ".join(texts)))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    names = {path.rpartition(".")[2] for path in leaves(values) if not path.startswith("pools.")}
    assert names - used == set()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_helm_lint_passes(scenario: str) -> None:
    report = lint(CHART, values_of(scenario), strict=True, kube_version="v1.36.0")
    message = [each["error"] for each in report["messages"]]
    assert (report["errors"], message) == ([], ["icon is recommended"])
