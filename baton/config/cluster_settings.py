"""Settings of every program: the cluster, listening addresses, metrics and logs, and the pools of
``baton up``.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from baton.config.values import CollectorUrl, Port, RayAddress, Seconds
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS, can_serve


class ClusterSettings(BaseModel):
    """Settings that every program reads, and the settings of ``baton up``."""

    # The cluster, and this process in it
    cluster: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    id: str = Field("", max_length=128)
    redis_url: str | None = None
    """A server, redis://HOST:PORT/DB, or Sentinels, redis+sentinel://HOST:26379,HOST:26379/SERVICE.
    See :mod:`baton.registry.redis_pools`."""
    redis_password: str | None = None
    """The password of Redis, if ``redis_url`` has none: :func:`baton.config.load_settings` moves it
    there."""
    redis_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long a starting program waits for Redis, which may be starting at the same time. 0: fail
    at once if Redis can't be reached."""
    worker_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long a starting router waits for the first worker before it accepts requests. A registry
    that lost its entries (a Redis restart) has them again after the next heartbeats."""
    cluster_secret: str | None = None
    heartbeat_interval_seconds: Seconds = 1.0
    drain_timeout_seconds: Seconds = 30.0

    # Listening addresses. Port 0 means any free port
    host: str = "127.0.0.1"
    port: Port = 8000
    reuse_port: bool = False
    """Whether several routers on one machine listen on the same port. Each of them also listens on
    a port of its own."""
    tls_certificate: str | None = None
    """A PEM file with the router's certificate and the chain to its CA. It is read again when it
    changes."""
    tls_key: str | None = None
    grpc_host: str = "127.0.0.1"
    grpc_port: Port = 0
    framed_port: Port = 0
    """Port, at ``grpc_host``, of the framed connections by which routers reach workers and
    conductors without gRPC."""
    rpc_tls_certificate: str | None = None
    """PEM files; set all three ``rpc_tls_`` settings or none. With them, members of the cluster use
    mutual TLS: each presents a certificate issued by ``rpc_tls_ca`` for the DNS name ``baton``. The
    files are read again when they change."""
    rpc_tls_key: str | None = None
    rpc_tls_ca: str | None = None
    advertise_address: str | None = None

    # Pools of `baton up`
    on: Literal["local", "ray"] = "local"
    """Where workers run: as processes on this machine, or as actors in a Ray cluster."""
    prefill: Annotated[int, Field(ge=0)] = 1
    """Number of prefill workers; this and the next ones are the sizes of the pools, one for each
    kind of worker. If ``mixed`` is set, and neither ``prefill`` nor ``decode`` is, there are none
    of either."""
    decode: Annotated[int, Field(ge=0)] = 1
    mixed: Annotated[int, Field(ge=0)] = 0
    """Number of mixed workers, each of which serves whole requests: instead of prefill and decode
    workers, or beside them."""
    routers: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of router processes. They share one port."""
    hang_timeout_seconds: Annotated[float, Field(ge=0)] = 20.0
    """A process that has served and then sends no heartbeat (one per second) for this long is
    killed and restarted. 0: never."""
    ray_address: RayAddress | None = None
    """``auto`` or HOST:PORT of a running Ray cluster. None: start a private one on this machine."""
    ray_worker_cpus: Annotated[float, Field(gt=0)] = 0.25
    """Ray CPUs that a worker reserves on its node. This bounds how many workers a node gets, not
    how many cores they use."""
    ray_worker_gpus: Annotated[float, Field(ge=0)] | None = None
    """Ray GPUs that a worker reserves. None: one if workers compute on CUDA, otherwise zero."""

    # Metrics and logs
    ops_host: str = "127.0.0.1"
    ops_port: Port | None = None
    """HTTP port of each program's ops server, for probes, metrics, and drain requests from the same
    host. None: no ops server; 0: any free port. Processes started by `baton up` use any free
    port."""
    metric_aliases: Literal["none", "vllm"] = "none"
    """Also export metrics under the names that vLLM has for them, for tools and dashboards that
    read those (docs/metrics.md)."""
    trace_endpoint: CollectorUrl | None = None
    """URL of an OpenTelemetry collector: http is plain text, https is TLS. None: no traces. The
    protocol is OTLP/gRPC, or what OTEL_EXPORTER_OTLP_PROTOCOL says."""
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of requests that are traced, among those whose client sent no sampling decision."""
    portable: bool = False
    """Whether to use, on Linux too, the portable twins of facilities that only Linux has, and torch
    instead of the CPU kernels (docs/platforms.md). It is for tests of what runs on other systems.
    Unlike other settings, it must be the same in all processes of one machine."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @model_validator(mode="before")
    @classmethod
    def _without_unwanted_pools(cls, values: Any) -> Any:
        """If only sizes of pools are given whose workers serve alone, leave the others empty.
        Without sizes, each attached server gets a worker, unless these could not serve requests:
        the one server of a prefill worker is one of a cluster's."""
        if isinstance(values, dict) and values.get("attach"):
            servers = values["attach"]
            names = servers.split(",") if isinstance(servers, str) else servers
            pools = [each.partition("=")[0].strip() for each in names]
            sizes = {role: pools.count(role.value) for role in WORKER_KINDS}
            if can_serve(sizes):
                values = {**{role.value: size for role, size in sizes.items()}, **values}
        kinds = WORKER_KINDS.values()
        given = isinstance(values, dict) and {kind.role for kind in kinds if kind.role in values}
        alone = {kind.role for kind in kinds if kind.serves_alone}
        if given and given <= alone and any(values[role] not in (None, 0, "0") for role in given):
            return {**values, **{role.value: 0 for role in WORKER_KINDS if role not in alone}}
        return values

    @property
    def pool_sizes(self) -> dict[Role, int]:
        """The sizes of each model's pools at the start of ``baton up``."""
        return {role: getattr(self, role.value) for role in WORKER_KINDS}
