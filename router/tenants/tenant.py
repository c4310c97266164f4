"""A tenant, as the operator describes it."""

from dataclasses import dataclass
from functools import lru_cache

from baton.core.ids import TenantId
from baton.core.priority import Priority, lower_priority
from baton.core.tenant import client_salt, shared_salt, tenant_salt, tenant_tag

DEFAULT_TENANT = TenantId("default")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: no limit, and of files the limit of the settings. Of all routers together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    files: int | None = None
    file_bytes: int | None = None
    uploads_per_minute: int | None = None
    concurrent_uploads: int | None = None


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Per million tokens, in whatever currency the operator thinks. ``cached`` None: as input."""

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
    """How a request of a tenant stands beside others: what its blocks' keys are made of, whom it is
    counted to, and who goes before it."""

    salt: bytes
    tag: bytes
    priority: Priority
    weight: float

    @property
    def is_urgent(self) -> bool:
        """Of low priority nobody is promised a time: without a deadline such prompts stand behind
        all others in a worker's report, so that the conductor refuses nobody for them."""
        return self.priority <= Priority.NORMAL


@dataclass(frozen=True, slots=True)
class Tenant:
    """Tenants with the same ``salt`` share their prefixes. ``weight`` is the share beside others of
    the same priority."""

    id: TenantId
    salt: str | None = None
    priority: Priority = Priority.NORMAL
    weight: float = 1.0
    limits: TenantLimits = UNLIMITED
    prices: TokenPrices = FREE

    @property
    def is_limited(self) -> bool:
        return self.limits is not UNLIMITED and self.limits != UNLIMITED

    def block_salt(self, secret: str | None, cache_salt: str | None = None) -> bytes:
        """Enters the keys of the tenant's blocks. Derived here: a client can add, not choose."""
        salt = _salt_and_tag(secret, self.id)[0]
        if self.salt is not None:
            salt = shared_salt(secret, self.salt)
        return client_salt(salt, cache_salt) if cache_salt else salt

    def standing(self, secret: str | None, cache_salt: str | None, behind: int) -> TenantAttributes:
        """``behind``: by how many steps the request itself gives way, from 0. Whatever salts a
        tenant uses, it has one tag."""
        return TenantAttributes(
            self.block_salt(secret, cache_salt),
            _salt_and_tag(secret, self.id)[1],
            lower_priority(self.priority, behind),
            self.weight,
        )


@lru_cache(maxsize=4096)
def _salt_and_tag(secret: str | None, tenant_id: TenantId) -> tuple[bytes, bytes]:
    """The same for every request of a tenant; 12 microseconds to compute."""
    salt = tenant_salt(secret, tenant_id)
    return salt, tenant_tag(salt)
