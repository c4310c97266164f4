"""All known tenants, with their API keys and limits."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from baton.core.api_key import KeyDigest, api_key_digest
from baton.core.ids import TenantId
from baton.errors import Invalid
from router.tenants.tenant import DEFAULT_TENANT, Tenant


@dataclass(frozen=True, slots=True)
class TenantDirectory:
    """The tenants as of one reading of the tenants file. :meth:`with_keys` adds the API keys in the
    settings. ``keys`` maps a key's digest to its tenant. If ``needs_keys`` is False, there are no
    API keys and no tenants file, and every client is the tenant ``default``. ``is_shared`` says
    whether there is more than one tenant."""

    tenants: Mapping[TenantId, Tenant] = field(default_factory=dict)
    keys: Mapping[KeyDigest, TenantId] = field(default_factory=dict, repr=False)
    needs_keys: bool = False
    is_shared: bool = False

    @property
    def names(self) -> Collection[TenantId]:
        """The names of all tenants; the tenant ``default`` alone if no keys are needed."""
        return {*self.tenants, *self.keys.values()} if self.needs_keys else {DEFAULT_TENANT}

    def tenant(self, tenant_id: TenantId) -> Tenant:
        """Return a tenant. A tenant that is not in the tenants file has no limits."""
        return self.tenants.get(tenant_id) or Tenant(tenant_id)

    def with_keys(self, api_keys: Mapping[str, str]) -> "TenantDirectory":
        """Return a copy with additional API keys. ``api_keys``, which comes from the settings, maps
        each key in plain text to its tenant's name. Raises Invalid if two tenants have the same
        key."""
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
    """Build the directory of ``tenants``. ``pairs`` contains each API key's digest with the name of
    its tenant. Raises Invalid if two tenants have the same key."""
    keys: dict[KeyDigest, TenantId] = {}
    for digest, tenant in pairs:
        other = keys.setdefault(digest, tenant)
        if other != tenant:
            key_prefix = f"sha256:{digest.hex()[:8]}…"
            raise Invalid(f"tenants {other!r} and {tenant!r} have the same key {key_prefix}")
    is_shared = len({*tenants, *keys.values()}) > 1
    return TenantDirectory(dict(tenants), keys, needs_keys, is_shared)
