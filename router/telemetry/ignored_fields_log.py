"""Logs which request fields are ignored."""

from collections.abc import Sequence

import structlog

from baton.core.ids import TenantId

MAX_NAMES_PER_TENANT = 64
"""After this many fields of one tenant, no more are logged: a client that makes up names must not
fill the log."""

MAX_TENANTS = 4096
"""The maximum number of tenants whose fields are remembered. The fields of further tenants are not
logged."""

log = structlog.get_logger(__name__)


class IgnoredFieldsLog:
    """Writes the event ``fields_ignored`` once per tenant and field."""

    def __init__(self) -> None:
        self._logged: dict[TenantId, set[str]] = {}

    def write(self, tenant: TenantId, names: Sequence[str]) -> None:
        if not names or (tenant not in self._logged and len(self._logged) >= MAX_TENANTS):
            return
        logged = self._logged.setdefault(tenant, set())
        new = [name for name in names if name not in logged][: MAX_NAMES_PER_TENANT - len(logged)]
        if new:
            logged.update(new)
            log.info("fields_ignored", tenant=tenant, fields=new)
