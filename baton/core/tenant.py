"""Salts that keep tenants' blocks apart, and tags that identify a tenant without its name."""

import hashlib

from baton.core.ids import TenantId

SALT_BYTES = 16
TAG_BYTES = 16


def tenant_salt(secret: str | None, tenant: TenantId) -> bytes:
    """Return the salt in the root of a tenant's block keys. It can't be computed without
    ``secret``, so that tenants can't guess each other's keys."""
    key = hashlib.blake2b((secret or "").encode(), digest_size=32).digest()
    return hashlib.blake2b(
        tenant.encode(), digest_size=SALT_BYTES, key=key, person=b"baton.tenant.v1"
    ).digest()


def tenant_tag(salt: bytes) -> bytes:
    """Return a tag that identifies a tenant in the store, for quotas and for administrators, and
    reveals nothing about the salt."""
    return hashlib.blake2b(salt, digest_size=TAG_BYTES, person=b"baton.tag.v1").digest()


def shared_salt(secret: str | None, name: str) -> bytes:
    """Return the salt of tenants that share their prefixes under ``name``. It differs from the salt
    of a tenant that has this name."""
    key = hashlib.blake2b((secret or "").encode(), digest_size=32).digest()
    return hashlib.blake2b(
        name.encode(), digest_size=SALT_BYTES, key=key, person=b"baton.shared.v1"
    ).digest()


def client_salt(salt: bytes, cache_salt: str) -> bytes:
    """Return the salt for a client's ``cache_salt``, which separates prefixes within a tenant. No
    value of ``cache_salt`` gives access to another tenant's prefixes."""
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=SALT_BYTES, key=salt, person=b"baton.client.v1"
    ).digest()
