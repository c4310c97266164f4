"""What keeps tenants' blocks apart, and what names a tenant where its name has no business."""

import hashlib

from baton.core.ids import TenantId

SALT_BYTES = 16
TAG_BYTES = 16


def tenant_salt(secret: str | None, tenant: TenantId) -> bytes:
    """Enters the root of a tenant's block keys. Nobody without ``secret`` can compute it, so
    nobody can guess another tenant's keys."""
    key = hashlib.blake2b((secret or "").encode(), digest_size=32).digest()
    return hashlib.blake2b(
        tenant.encode(), digest_size=SALT_BYTES, key=key, person=b"baton.tenant.v1"
    ).digest()


def tenant_tag(salt: bytes) -> bytes:
    """Names a tenant in the store, for quotas and for the operator; tells nothing of the salt."""
    return hashlib.blake2b(salt, digest_size=TAG_BYTES, person=b"baton.tag.v1").digest()


def shared_salt(secret: str | None, name: str) -> bytes:
    """Of tenants who share their prefixes under a name: never that of a tenant so called."""
    key = hashlib.blake2b((secret or "").encode(), digest_size=32).digest()
    return hashlib.blake2b(
        name.encode(), digest_size=SALT_BYTES, key=key, person=b"baton.shared.v1"
    ).digest()


def client_salt(salt: bytes, cache_salt: str) -> bytes:
    """What a client adds by itself keeps its prefixes apart within the tenant's; it can't lead out
    of them, whatever it says."""
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=SALT_BYTES, key=salt, person=b"baton.client.v1"
    ).digest()
