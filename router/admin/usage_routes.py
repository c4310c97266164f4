"""``GET /admin/usage``: the tenants' usage, summed over all routers."""

from datetime import date, timedelta
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from baton.errors import Unavailable
from router.admin.routes import check_admin
from router.errors import ApiError
from router.limits import MAX_USAGE_DAYS
from router.serving.context import RouterContext
from router.tenants.usage_store import day_of, days_since, usage_report

DEFAULT_DAYS = 30


def add_usage_routes(app: FastAPI, context: RouterContext) -> None:
    @app.get("/admin/usage")
    async def usage(request: Request, since: str | None = None) -> Response:
        check_admin(context, request)
        report = await _usage(context, since)
        return Response(orjson.dumps(report), media_type="application/json")


async def _usage(context: RouterContext, since: str | None) -> dict[str, Any]:
    """Report the usage of all routers. This router first sends its unsent usage to Redis. If Redis
    can't be reached, ``complete`` is False, and the report contains only this router's unsent
    usage."""
    now = context.clock.wall_nanoseconds()
    days = days_since(_date(since, day_of(now)), now)
    complete = True
    try:
        if context.tenants.usage_flusher is not None:
            await context.tenants.usage_flusher.flush()
        counts = await context.tenants.usage_store.read(days)
    except Unavailable:
        complete = False
        wanted = set(days)
        counts = context.tenants.usage_recorder.unsent()
        for key in [key for key in counts if key[0] not in wanted]:
            del counts[key]
    report = usage_report(counts, context.tenants.authenticator.directory)
    return {"since": days[0], "until": days[-1], "complete": complete, **report}


def _date(since: str | None, today: str) -> date:
    """Return the report's first day: ``since``, or the default if it is None. Raises ApiError (400)
    for an invalid day."""
    last = date.fromisoformat(today)
    if since is None:
        return last - timedelta(days=DEFAULT_DAYS - 1)
    try:
        day = date.fromisoformat(since)
    except ValueError as error:
        raise _invalid_since(since) from error
    if not last - timedelta(days=MAX_USAGE_DAYS - 1) <= day <= last:
        raise _invalid_since(since)
    return day


def _invalid_since(since: str) -> ApiError:
    message = (
        f"since is {since[:40]!r}; it must be a day (UTC) within the last {MAX_USAGE_DAYS} days, "
        "like 2030-12-31"
    )
    return ApiError(400, message, param="since", code="invalid_value")
