"""Decides which of Baton's settings a user of the chart may set under ``settings``, and which the
chart sets itself; the chart's schema must agree."""

from typing import Any, get_args

from pydantic import BeforeValidator

from baton.config import Settings
from baton.core.worker_kinds import WORKER_KINDS

CHART_SETTINGS = frozenset({
    # Identity, addresses and secrets of a process.
    "id", "cluster", "redis_url", "redis_password", "cluster_secret", "host", "port", "reuse_port",
    "grpc_host", "grpc_port", "framed_port", "ops_host", "ops_port", "advertise_address",
    "tls_certificate", "tls_key", "rpc_tls_certificate", "rpc_tls_key", "rpc_tls_ca", "api_keys",
    "tenants_file", "admin_key", "tenant_secret", "allow_open_http", "control_socket",
    # Settings with their own place in the values.
    "model", "models", "served_model_name", "drain_timeout_seconds", "endpoint_grace_seconds",
    "store_bytes", "store_disk_bytes", "store_folder", "batch_folder", "log_level", "log_format",
    "trace_endpoint", "trace_sample", "autoscale", "autoscale_pools", "autoscale_prefill_pool",
    "autoscale_decode_pool", "kubernetes_namespace", "kubernetes_pools", "kubernetes_lease",
    "kubernetes_initial_replicas", "kubernetes_watch", "min_prefill", "max_prefill", "min_decode",
    "max_decode", "max_workers",
    # Settings that only `baton up` and mock workers read.
    *WORKER_KINDS, "on", "routers", "ray_address", "ray_worker_gpus", "mock",
    "engine_python",
})  # fmt: skip

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "enum", "const")


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of ``settings`` in the chart, without the settings that the chart sets
    itself."""
    names = sorted(set(Settings.model_fields) - CHART_SETTINGS)
    free = [name for name in names if not name.startswith("mock_")]
    schemas = Settings.model_json_schema()["properties"]
    properties = {name: _value_schema(name, schemas[name]) for name in free}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one setting. Null is not allowed, since a setting can be left out
    instead. A setting that can be parsed from text, like ``512MiB`` or ``a,b``, may also be a
    string."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    schemas = [{"type": kind["type"]} | _bounds(kind) for kind in kinds]
    if _is_parsed(name) and not any(each["type"] == "string" for each in schemas):
        schemas.append({"type": "string"})
    for each in schemas:
        if each["type"] == "array":
            each["items"] = {"type": "string"}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _bounds(kind: dict[str, Any]) -> dict[str, Any]:
    return {bound: kind[bound] for bound in BOUNDS if bound in kind}


def _is_parsed(name: str) -> bool:
    field = Settings.model_fields[name]
    inner = [part for kind in get_args(field.annotation) for part in get_args(kind)]
    return any(isinstance(part, BeforeValidator) for part in (*field.metadata, *inner))
