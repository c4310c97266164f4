"""``GET /admin/usage``: what tenants used, over all routers."""

from datetime import date, timedelta
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from baton.errors import Unavailable
from router.admin.routes import check_admin
from router.errors import ApiError
from router.openai.context import RouterContext
from router.tenants.usage_store import MAX_DAYS, day_of, days_since, usage_report

DEFAULT_DAYS = 30


def add_usage_routes(app: FastAPI, service: RouterContext) -> None:
    @app.get("/admin/usage")
    async def usage(request: Request, since: str | None = None) -> Response:
        check_admin(service, request)
        told = await _usage(service, since)
        return Response(orjson.dumps(told), media_type="application/json")


async def _usage(service: RouterContext, since: str | None) -> dict[str, Any]:
    """What this router has not sent yet is counted in. ``complete`` False: the others' are missing,
    and what was before, since Redis can't be asked."""
    now = service.clock.wall_nanoseconds()
    days = days_since(_date(since, day_of(now)), now)
    complete = True
    try:
        if service.tenancy is not None:
            await service.tenancy.send()
        counts = await service.usage.read(days)
    except Unavailable:
        complete = False
        wanted = set(days)
        counts = service.ledger.unsent()
        for key in [key for key in counts if key[0] not in wanted]:
            del counts[key]
    report = usage_report(counts, service.doorkeeper.roll)
    return {"since": days[0], "until": days[-1], "complete": complete, **report}


def _date(since: str | None, today: str) -> date:
    """Raises Problem (400)."""
    last = date.fromisoformat(today)
    if since is None:
        return last - timedelta(days=DEFAULT_DAYS - 1)
    try:
        day = date.fromisoformat(since)
    except ValueError as error:
        raise _invalid_since(since) from error
    if not last - timedelta(days=MAX_DAYS - 1) <= day <= last:
        raise _invalid_since(since)
    return day


def _invalid_since(since: str) -> ApiError:
    message = (
        f"since is {since[:40]!r}, and must be a day (UTC) like 2030-12-31, of the last {MAX_DAYS}"
    )
    return ApiError(400, message, param="since", code="invalid_value")
