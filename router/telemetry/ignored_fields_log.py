"""Logs which request fields are ignored."""

from collections.abc import Sequence

import structlog

from baton.core.ids import TenantId
from router.limits import MAX_LOGGED_FIELDS, MAX_LOGGED_TENANTS

log = structlog.get_logger(__name__)


class IgnoredFieldsLog:
    """Writes the event ``fields_ignored`` once per tenant and field."""

    def __init__(self) -> None:
        self._logged: dict[TenantId, set[str]] = {}

    def write(self, tenant: TenantId, names: Sequence[str]) -> None:
        if not names or (tenant not in self._logged and len(self._logged) >= MAX_LOGGED_TENANTS):
            return
        logged = self._logged.setdefault(tenant, set())
        new = [name for name in names if name not in logged][: MAX_LOGGED_FIELDS - len(logged)]
        if new:
            logged.update(new)
            log.info("fields_ignored", tenant=tenant, fields=new)
