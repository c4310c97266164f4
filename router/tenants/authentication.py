"""Authentication: which tenant an API key belongs to, and who may use the admin API."""

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
CONSOLE_FILES_PREFIX = "/ui/"
PUBLIC_PATHS = frozenset(
    {"/", "/docs", "/health", "/healthz", "/ping", "/ready", "/ui", "/version"}
)
"""Paths for probes, load balancers, and pages about the server: served without a key and under any
host name, since their responses contain no secrets."""


class Authenticator:
    """Authenticates requests. If there are neither API keys in the settings nor a tenants file,
    every client is the tenant ``default``. Without an admin key, only local clients are admins.
    Call :meth:`set_directory` whenever the tenants file has changed."""

    def __init__(
        self,
        api_keys: Mapping[str, str],
        admin_key: str | None,
        directory: TenantDirectory | None = None,
    ) -> None:
        """Raise Invalid if two tenants have the same key."""
        self._api_keys = api_keys
        self._admin_key = admin_key
        self.set_directory(directory or TenantDirectory())

    def set_directory(self, directory: TenantDirectory) -> None:
        """From now on, accept the keys in ``directory`` and the keys in the settings. Raises
        Invalid if two tenants have the same key."""
        self.directory = directory.with_keys(self._api_keys)

    def tenant_of(self, authorization: str | None) -> TenantId:
        """Return the tenant of the key in an ``Authorization`` header. If keys are required, raises
        ApiError (401) for a missing or unknown key."""
        if not self.directory.needs_keys:
            return DEFAULT_TENANT
        # Looked up by digest, so that the time of the look-up reveals nothing about valid keys.
        tenant = self.directory.keys.get(api_key_digest(bearer_key(authorization)))
        if tenant is None:
            raise unauthorized_error(
                "an API key is needed" if not authorization else "the API key is unknown"
            )
        return tenant

    @property
    def has_admin_key(self) -> bool:
        return self._admin_key is not None

    def allows_without_key(self, path: str) -> bool:
        """Whether anyone may use ``path``, which would need a key, because no key is configured.
        False for ``PUBLIC_PATHS`` and the console's files, which never need one. If True, a client
        is trusted because it can reach this address. A web page in a browser on a trusted machine
        could exploit that, so :mod:`router.http.browser_check` lets only pages of allowed origins
        use such paths."""
        if path in PUBLIC_PATHS or path.startswith(CONSOLE_FILES_PREFIX):
            return False
        is_admin_path = path.startswith(ADMIN_PATH_PREFIX)
        return not (self.has_admin_key if is_admin_path else self.directory.needs_keys)

    def check_metrics(self, authorization: str | None) -> None:
        """Check a request for ``/metrics``, which needs the admin key if API keys are required.
        Raises ApiError: 401 if ``authorization`` does not contain the admin key, 403 if no admin
        key is configured."""
        if not self.directory.needs_keys:
            return
        if not self.has_admin_key:
            raise ApiError(
                403,
                "API keys are required, so /metrics needs the admin key, but no admin_key is set; "
                "set it, or use the ops port",
            )
        self.check_admin(authorization, None)

    def check_admin(self, authorization: str | None, client_host: str | None) -> None:
        """Check that the client is an admin. Raises ApiError: 401 if an admin key is configured and
        the client does not send it, 403 if no admin key is configured and the client is not
        local."""
        if self._admin_key is not None:
            given_key = bearer_key(authorization).encode()
            if not hmac.compare_digest(given_key, self._admin_key.encode()):
                raise unauthorized_error("the admin key is missing or wrong")
        elif not _is_loopback(client_host):
            raise ApiError(403, "without an admin key, the admin API serves local clients only")


def bearer_key(authorization: str | None) -> str:
    """Return the key in an ``Authorization`` header of the form ``Bearer KEY``; otherwise an empty
    text."""
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
        error_type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
