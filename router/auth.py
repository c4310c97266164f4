"""API keys to tenants, tenants to salts, and who may use the admin API."""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping

from baton.core.ids import TenantId
from router.problem import Problem

DEFAULT_TENANT = TenantId("default")
_SCHEME = "bearer "


class Doorkeeper:
    """Without API keys everybody is the tenant ``default``; without an admin key only clients
    on this machine are admins."""

    def __init__(self, api_keys: Mapping[str, str], admin_key: str | None) -> None:
        # By digest: how long a look-up takes says nothing about a key.
        self._tenants = {_digest(key): TenantId(tenant) for key, tenant in api_keys.items()}
        self._admin_key = admin_key

    def tenant_of(self, authorization: str | None) -> TenantId:
        """Raises Problem (401) when keys are needed and this is none of them."""
        if not self._tenants:
            return DEFAULT_TENANT
        tenant = self._tenants.get(_digest(_bearer(authorization)))
        if tenant is None:
            raise _unauthorized("an API key is needed" if not authorization else "wrong API key")
        return tenant

    def check_admin(self, authorization: str | None, client_host: str | None) -> None:
        """Raises Problem (401, 403)."""
        if self._admin_key is not None:
            given = _bearer(authorization).encode()
            if not hmac.compare_digest(given, self._admin_key.encode()):
                raise _unauthorized("the admin key is missing or wrong")
        elif not _is_loopback(client_host):
            raise Problem(403, "without an admin key, the admin API answers this machine only")


def _bearer(authorization: str | None) -> str:
    value = authorization or ""
    return value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


def _is_loopback(host: str | None) -> bool:
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _unauthorized(message: str) -> Problem:
    return Problem(
        401,
        message,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
