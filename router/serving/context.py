"""The router's settings, and its components wired together."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from baton.rpc.worker_client import ForwardClient
from router.generation.cluster import Cluster
from router.http.ignored_fields import IgnoredFields
from router.http.raw_body import BodyBudget, RawBody
from router.serving.memory_budgets import (
    KeptLogprobs,
    LogprobsBudget,
    StoredBytesBudget,
    StoredBytesShare,
)
from router.serving.offload_executor import OffloadExecutor
from router.serving.resumption import Resumption
from router.serving.served_model import ModelDirectory, ServedModel
from router.telemetry.router_telemetry import RouterTelemetry
from router.tenants.authentication import Authenticator
from router.tenants.quota_store import QuotaStore
from router.tenants.tenant_services import TenantServices
from router.tenants.usage_store import UsageStore


@dataclass(slots=True)
class RequestResources:
    """Memory for bodies, for logprobs and for stored responses, and threads for long
    computations."""

    body_budget: BodyBudget
    logprobs_budget: LogprobsBudget = field(default_factory=LogprobsBudget)
    stored_bytes: StoredBytesBudget = field(default_factory=StoredBytesBudget)
    offload_executor: OffloadExecutor = field(default_factory=OffloadExecutor)


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router's settings. ``control_socket`` is the path of the supervisor's socket, or None if
    there is no supervisor."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_inflight_body_bytes: int = 128 * 1024 * 1024
    max_concurrent_requests: int = 1024
    body_timeout_seconds: float = 60.0
    tenant_secret: str | None = None
    slo_ttft_seconds: float = 0.0
    control_socket: str | None = None
    request_timeout_seconds: float = 3600.0
    cors_origins: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] | None = None
    """The host names that requests without a key may use for this router; None allows any."""
    access_log: bool = False
    refuses_special_tokens: bool = False
    strict_fields: bool = False


def _random_id() -> str:
    return secrets.token_hex(16)


def _random_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class RouterIds:
    """Generates request ids and seeds. ``instance_id`` is unique to this router, and a part of its
    request ids."""

    new_id: Callable[[], str] = _random_id
    new_seed: Callable[[], int] = _random_seed
    instance_id: str = field(default_factory=lambda: _random_id()[:8])


@dataclass(slots=True)
class RouterContext:
    """The router's components, wired together. Randomness and time are passed in."""

    config: RouterConfig
    clock: Clock
    cluster: Cluster
    models: ModelDirectory
    tenants: TenantServices
    resources: RequestResources
    telemetry: RouterTelemetry
    ids: RouterIds
    forward_client: ForwardClient
    resumption: Resumption | None = None
    draining: bool = False
    refuses_when_draining: bool = True
    """False if new connections reach other routers, through a shared port or a load balancer. Then
    clients that are still connected to this router are served while it drains."""

    @classmethod
    def build(
        cls,
        config: RouterConfig,
        clock: Clock,
        cluster: Cluster,
        models: Sequence[ServedModel],
        authenticator: Authenticator,
        *,
        telemetry: RouterTelemetry | None = None,
        ids: RouterIds | None = None,
        usage_store: UsageStore | None = None,
        quota_store: QuotaStore | None = None,
        forward_client: ForwardClient | None = None,
        resumption: Resumption | None = None,
        refuses_when_draining: bool = True,
    ) -> "RouterContext":
        """Wire the components of a router together. Defaults: telemetry and usage are kept in
        memory, and ids are random; without ``quota_store``, quotas are not shared between routers;
        ``forward_client`` does not sign its calls; without ``resumption``, no answer can be
        continued by another router."""
        telemetry, ids = telemetry or RouterTelemetry(), ids or RouterIds()
        telemetry.metrics.add_models(model.name for model in models)
        tenants = TenantServices(
            authenticator,
            config.max_concurrent_requests,
            telemetry.metrics.tenants,
            clock,
            router_id=ids.instance_id,
            num_routers=lambda: cluster.num_routers,
            usage_store=usage_store,
            quota_store=quota_store,
        )
        return cls(
            config,
            clock,
            cluster,
            ModelDirectory(models, config.max_concurrent_requests),
            tenants,
            RequestResources(BodyBudget(config.max_inflight_body_bytes)),
            telemetry,
            ids,
            forward_client or ForwardClient(),
            resumption,
            refuses_when_draining=refuses_when_draining,
        )

    def check_not_draining(self) -> None:
        """Raise Unavailable while this router drains, unless new clients reach other routers
        through a shared port or a load balancer."""
        if self.draining and self.refuses_when_draining:
            raise Unavailable("this router is draining")

    def ignored_fields(self, tenant_id: TenantId) -> IgnoredFields:
        """Return an object that will collect the ignored fields of one of the tenant's requests.
        Its ``is_strict`` is True if unknown fields in the tenant's requests are refused."""
        of_tenant = self.tenants.authenticator.directory.tenant(tenant_id).strict_fields
        return IgnoredFields(
            is_strict=self.config.strict_fields if of_tenant is None else of_tenant
        )

    def raw_body(self, tenant_id: TenantId) -> RawBody:
        """Return an empty body, to be filled with the bytes that this tenant sends."""
        weight = self.tenants.authenticator.directory.tenant(tenant_id).weight
        return self.resources.body_budget.new_body(
            tenant_id, weight, shared=self.tenants.admission.is_shared
        )

    def stored_bytes(self, tenant_id: TenantId) -> StoredBytesShare:
        """Return an object that will count the stored responses that one of the tenant's requests
        has in memory."""
        weight = self.tenants.authenticator.directory.tenant(tenant_id).weight
        return self.resources.stored_bytes.new_share(
            tenant_id, weight, shared=self.tenants.admission.is_shared
        )

    def kept_logprobs(self, tenant_id: TenantId, param: str) -> KeptLogprobs:
        """Return an object that will count the logprobs that are kept for one of the tenant's
        requests. ``param`` is the field with the number of alternatives, for errors."""
        weight = self.tenants.authenticator.directory.tenant(tenant_id).weight
        return self.resources.logprobs_budget.new_request(
            tenant_id, weight, param, shared=self.tenants.admission.is_shared
        )
