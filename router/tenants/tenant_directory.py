"""Everybody who may come in: which key is whose, and what each tenant gets."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baton.core.api_key import KeyDigest, api_key_digest
from baton.core.ids import TenantId
from baton.errors import Invalid
from router.tenants.tenant import Tenant


@dataclass(frozen=True, slots=True)
class TenantDirectory:
    """As of one reading of the file. Where ``needs_keys`` is False nobody was given any: whoever
    comes is the tenant ``default``. ``is_shared``: there is more than one tenant."""

    tenants: Mapping[TenantId, Tenant] = field(default_factory=dict)
    keys: Mapping[KeyDigest, TenantId] = field(default_factory=dict, repr=False)
    needs_keys: bool = False
    is_shared: bool = False

    def tenant(self, tenant_id: TenantId) -> Tenant:
        """One that nobody described has no limits."""
        return self.tenants.get(tenant_id) or Tenant(tenant_id)

    def with_keys(self, api_keys: Mapping[str, str]) -> "TenantDirectory":
        """And those of the setting, in plain text. Raises Invalid."""
        pairs = [(api_key_digest(key), TenantId(name)) for key, name in api_keys.items()]
        needs_keys = self.needs_keys or bool(api_keys)
        return build_tenant_directory(
            self.tenants, [*self.keys.items(), *pairs], needs_keys=needs_keys
        )


def build_tenant_directory(
    tenants: Mapping[TenantId, Tenant],
    pairs: Iterable[tuple[KeyDigest, TenantId]],
    *,
    needs_keys: bool,
) -> TenantDirectory:
    """Raises Invalid for a key of two tenants."""
    keys: dict[KeyDigest, TenantId] = {}
    for digest, tenant in pairs:
        other = keys.setdefault(digest, tenant)
        if other != tenant:
            shown = f"sha256:{digest.hex()[:8]}…"
            raise Invalid(f"tenants {other!r} and {tenant!r} have the same key {shown}")
    is_shared = len({*tenants, *keys.values()}) > 1
    return TenantDirectory(dict(tenants), keys, needs_keys, is_shared)
