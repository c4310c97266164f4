"""``baton usage`` shows what tenants used, and what it costs."""

import json
import re
from datetime import UTC, date, datetime, timedelta
from typing import Any

from rich.table import Table

from baton.clock import SystemClock
from baton.config import baton_home
from baton.errors import Invalid, Unavailable
from baton.network.pinned_tls import pinned_tls_context
from baton.reports.console import open_console
from orchestrator.cluster_state import ClusterFolder

ROUTER_TIMEOUT_SECONDS = 30.0
_COLUMNS = ("requests", "refused", "prompt", "computed", "cached", "completion")
_FIELDS = (
    "requests",
    "refused_requests",
    "prompt_tokens",
    "computed_tokens",
    "cached_tokens",
    "completion_tokens",
)


def run_usage(name: str, since: str | None, as_json: bool) -> None:
    """Print each tenant's usage. Raises Unavailable if the router does not respond."""
    report = _fetch_usage(name, since)
    if as_json:
        print(json.dumps(report))
        return
    table = Table("tenant", box=None)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("cost", justify="right", no_wrap=True)
    for tenant, row in [*report["tenants"].items(), ("all", report["total"])]:
        table.add_row(tenant, *[f"{row[field]:,}" for field in _FIELDS], f"{row['cost']:,.4f}")
    open_console().print(table)
    print(f"{report['since']} to {report['until']} (UTC); prompt tokens = computed + cached tokens")
    if not report["complete"]:
        print("Redis can't be reached: this is only the usage that one router has not yet saved")


def parse_since(since: str, today: date) -> date:
    """Parse ``--since`` and return the first day of the period. ``since`` is a date like
    ``2030-12-31``, ``today``, or ``7d`` (today and the six days before it). Raises Invalid for any
    other text."""
    age = re.fullmatch(r"(\d{1,4})d", since)
    if since == "today" or (age and int(age[1]) > 0):
        return today - timedelta(days=int(age[1]) - 1 if age else 0)
    try:
        return date.fromisoformat(since)
    except ValueError as error:
        raise Invalid(f"--since is {since!r}; it must be like 2030-12-31, today, or 7d") from error


def _fetch_usage(name: str, since: str | None) -> dict[str, Any]:
    import httpx

    state = ClusterFolder(baton_home(), name).read_running()
    headers = {"authorization": f"Bearer {state.admin_key}"} if state.admin_key else {}
    today = datetime.fromtimestamp(SystemClock().wall_nanoseconds() / 1e9, UTC).date()
    params = {"since": parse_since(since, today).isoformat()} if since else {}
    try:
        response = httpx.get(
            f"{state.url}/admin/usage",
            params=params,
            headers=headers,
            timeout=ROUTER_TIMEOUT_SECONDS,
            trust_env=False,
            verify=pinned_tls_context(state.tls_certificate) or True,
        )
    except httpx.HTTPError as error:
        raise Unavailable(f"the router does not answer: {error}") from error
    if response.status_code == 400:
        raise Invalid(response.json()["error"]["message"])
    if response.status_code != 200:
        raise Unavailable(f"the router returned {response.status_code}: {response.text}")
    report: dict[str, Any] = response.json()
    return report
