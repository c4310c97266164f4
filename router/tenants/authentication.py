"""API keys to tenants, and who may use the admin API."""

import hmac
import ipaddress
from collections.abc import Mapping

from baton.core.api_key import api_key_digest
from baton.core.ids import TenantId
from router.errors import ApiError
from router.tenants.tenant import DEFAULT_TENANT
from router.tenants.tenant_directory import TenantDirectory

_SCHEME = "bearer "

ADMIN_PATH_PREFIX = "/admin/"
PUBLIC_PATHS = frozenset({"/health", "/ready"})
"""They tell probes and load balancers what everybody may know, whatever they call us."""


class Authenticator:
    """Without API keys everybody is the tenant ``default``; without an admin key only clients
    on this machine are admins. :meth:`admit` whenever the tenants file has changed."""

    def __init__(
        self,
        api_keys: Mapping[str, str],
        admin_key: str | None,
        roll: TenantDirectory | None = None,
    ) -> None:
        """Raises Invalid for a key of two tenants."""
        self._api_keys = api_keys
        self._admin_key = admin_key
        self.admit(roll or TenantDirectory())

    def admit(self, roll: TenantDirectory) -> None:
        """From now on these come in, beside those of the setting. Raises Invalid."""
        self.roll = roll.with_keys(self._api_keys)

    def tenant_of(self, authorization: str | None) -> TenantId:
        """Raises Problem (401) when keys are needed and this is none of them."""
        if not self.roll.needs_keys:
            return DEFAULT_TENANT
        # By digest: how long a look-up takes says nothing about a key.
        tenant = self.roll.keys.get(api_key_digest(_bearer(authorization)))
        if tenant is None:
            raise unauthorized_error(
                "an API key is needed" if not authorization else "wrong API key"
            )
        return tenant

    @property
    def has_admin_key(self) -> bool:
        return self._admin_key is not None

    def trusts_without_key(self, path: str) -> bool:
        """Whether a request to ``path`` may be answered although it shows no key: whoever reaches
        us is trusted then, and so is a browser on this machine."""
        if path in PUBLIC_PATHS:
            return False
        is_operators = path.startswith(ADMIN_PATH_PREFIX)
        return not (self.has_admin_key if is_operators else self.roll.needs_keys)

    def check_metrics(self, authorization: str | None) -> None:
        """Raises Problem (401, 403) where there are keys, and this is not the admin's."""
        if not self.roll.needs_keys:
            return
        if not self.has_admin_key:
            raise ApiError(
                403, "where there are keys, /metrics needs one: set admin_key, or ask the ops port"
            )
        self.check_admin(authorization, None)

    def check_admin(self, authorization: str | None, client_host: str | None) -> None:
        """Raises Problem (401, 403)."""
        if self._admin_key is not None:
            given = _bearer(authorization).encode()
            if not hmac.compare_digest(given, self._admin_key.encode()):
                raise unauthorized_error("the admin key is missing or wrong")
        elif not _is_loopback(client_host):
            raise ApiError(403, "without an admin key, the admin API answers this machine only")


def _bearer(authorization: str | None) -> str:
    value = authorization or ""
    return value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""


def _is_loopback(host: str | None) -> bool:
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def unauthorized_error(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
