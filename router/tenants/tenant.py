"""A tenant, as the tenants file describes it."""

from dataclasses import dataclass
from functools import lru_cache

from baton.core.ids import TenantId
from baton.core.priority import Priority, lower_priority
from baton.core.tenant import client_salt, shared_salt, tenant_salt, tenant_tag

DEFAULT_TENANT = TenantId("default")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of a tenant across all routers. None means no limit, except for files and uploads,
    where None means the limit in the settings."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    files: int | None = None
    file_bytes: int | None = None
    uploads_per_minute: int | None = None
    concurrent_uploads: int | None = None


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Prices per million tokens, in a currency of your choice. If ``cached`` is None, cached tokens
    cost as much as other input tokens."""

    input: float = 0.0
    cached: float | None = None
    output: float = 0.0

    def cost(self, computed_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
        cached = self.input if self.cached is None else self.cached
        total = self.input * computed_tokens + cached * cached_tokens
        return (total + self.output * completion_tokens) / 1e6


UNLIMITED, FREE = TenantLimits(), TokenPrices()


@dataclass(frozen=True, slots=True)
class TenantAttributes:
    """A tenant's attributes that its requests carry to workers: the salt of its block keys, the tag
    that identifies it, its priority, its weight, and whether no lossy codec may be applied to their
    KV."""

    salt: bytes
    tag: bytes
    priority: Priority
    weight: float
    exact_kv: bool = False

    @property
    def has_slo(self) -> bool:
        """Whether the SLO applies. It does not apply to batches and to requests of low priority,
        which have no deadline. In the load that workers report, prompts without a deadline come
        after all other prompts, so that the conductor does not refuse other requests because of
        them."""
        return self.priority <= Priority.NORMAL


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. Tenants with the same ``salt`` share cached prefixes; without a salt, a tenant
    shares them with nobody. ``weight`` determines the tenant's share of service among tenants of
    the same priority."""

    id: TenantId
    salt: str | None = None
    priority: Priority = Priority.NORMAL
    weight: float = 1.0
    limits: TenantLimits = UNLIMITED
    prices: TokenPrices = FREE
    strict_fields: bool | None = None
    """Whether unknown fields of requests are refused. If None, the settings decide."""
    models: frozenset[str] | None = None
    """The names of the models that the tenant may use. If None, it may use all."""
    exact_kv: bool = False
    """True if no lossy codec may be applied to the KV of any of the tenant's requests."""

    @property
    def is_limited(self) -> bool:
        return self.limits is not UNLIMITED and self.limits != UNLIMITED

    def block_salt(self, secret: str | None, cache_salt: str | None = None) -> bytes:
        """Return the salt of the tenant's block keys. Since it is derived from ``secret``, a client
        can change the salt with ``cache_salt``, but can't choose its value."""
        salt = _salt_and_tag(secret, self.id)[0]
        if self.salt is not None:
            salt = shared_salt(secret, self.salt)
        return client_salt(salt, cache_salt) if cache_salt else salt

    def attributes(
        self,
        secret: str | None,
        cache_salt: str | None,
        priority_steps: int,
        *,
        exact_kv: bool = False,
    ) -> TenantAttributes:
        """Return the attributes of one of the tenant's requests, whose priority is
        ``priority_steps`` (0 or more) below the tenant's. ``cache_salt`` changes the salt, but not
        the tag. ``exact_kv`` says whether the request wants exact KV; if the tenant does, all of
        its requests get it."""
        return TenantAttributes(
            self.block_salt(secret, cache_salt),
            _salt_and_tag(secret, self.id)[1],
            lower_priority(self.priority, priority_steps),
            self.weight,
            self.exact_kv or exact_kv,
        )


@lru_cache(maxsize=4096)
def _salt_and_tag(secret: str | None, tenant_id: TenantId) -> tuple[bytes, bytes]:
    """Return a tenant's salt and tag. Cached, since every request needs them and computing them
    takes 12 microseconds."""
    salt = tenant_salt(secret, tenant_id)
    return salt, tenant_tag(salt)
