"""The names of the Redis keys of stored responses."""

from urllib.parse import quote

from baton.core.ids import TenantId


def responses_prefix(cluster: str) -> str:
    """Return the beginning of all keys."""
    return f"baton:{cluster}:responses:"


def tenant_prefix(cluster: str, tenant: TenantId) -> str:
    """Return the beginning of a tenant's keys. The tenant is percent-encoded, so that no name of a
    tenant gives access to another tenant's keys."""
    return f"{responses_prefix(cluster)}{quote(tenant, safe='')}:"
