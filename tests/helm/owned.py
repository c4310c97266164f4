"""Which of Baton's settings a user of the chart may give by name, as the chart's schema knows them,
and which the chart says itself."""

from typing import Any, get_args

from pydantic import BeforeValidator

from baton.config import Settings

OWNED = frozenset({
    # Who and where a process is, and what is secret.
    "id", "cluster", "redis_url", "cluster_secret", "host", "port", "reuse_port", "grpc_host",
    "grpc_port", "line_port", "ops_host", "ops_port", "advertise_address", "tls_certificate",
    "tls_key", "rpc_tls_certificate", "rpc_tls_key", "rpc_tls_ca", "api_keys", "tenants_file",
    "admin_key", "tenant_secret", "allow_open_http", "control_socket",
    # What has a place of its own in the values.
    "model", "served_model_name", "drain_seconds", "endpoint_grace_seconds", "store_bytes",
    "store_disk_bytes", "store_folder", "batch_folder", "log_level", "log_format",
    "trace_endpoint", "trace_sample", "autoscale", "autoscale_pools", "autoscale_prefill_pool",
    "autoscale_decode_pool", "kubernetes_namespace", "kubernetes_pools", "kubernetes_lease",
    "kubernetes_watch", "min_prefill", "max_prefill", "min_decode", "max_decode", "max_workers",
    # What only `baton up` and mock workers read.
    "on", "prefill", "decode", "routers", "ray_address", "ray_worker_gpus", "mock",
})  # fmt: skip

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "enum", "const")


def settings_schema() -> dict[str, Any]:
    """JSON schema of `settings` in the chart: an object of those that are not the chart's own."""
    names = sorted(set(Settings.model_fields) - OWNED)
    free = [name for name in names if not name.startswith("mock_")]
    told = Settings.model_json_schema()["properties"]
    properties = {name: _value_schema(name, told[name]) for name in free}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value_schema(name: str, told: dict[str, Any]) -> dict[str, Any]:
    """What may be null is left out instead. What is read from a text (512MiB, a,b) may be one."""
    kinds = [kind for kind in told.get("anyOf", [told]) if kind.get("type") != "null"]
    schemas = [{"type": kind["type"]} | _bounds(kind) for kind in kinds]
    if _is_read(name) and not any(schema["type"] == "string" for schema in schemas):
        schemas.append({"type": "string"})
    for schema in schemas:
        if schema["type"] == "array":
            schema["items"] = {"type": "string"}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _bounds(kind: dict[str, Any]) -> dict[str, Any]:
    return {bound: kind[bound] for bound in BOUNDS if bound in kind}


def _is_read(name: str) -> bool:
    field = Settings.model_fields[name]
    inner = [part for kind in get_args(field.annotation) for part in get_args(kind)]
    return any(isinstance(part, BeforeValidator) for part in (*field.metadata, *inner))
