"""``baton usage``: what tenants used, and what it costs."""

import json
import re
from datetime import UTC, date, datetime, timedelta
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.clock import SystemClock
from baton.config import baton_home
from baton.errors import Invalid, Unavailable
from orchestrator.cluster_state import ClusterFolder

ROUTER_SECONDS = 30.0
PIPE_COLUMNS = 160
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
    """Raises Unavailable while the router does not answer."""
    told = _ask(name, since)
    if as_json:
        print(json.dumps(told))
        return
    table = Table("tenant", box=None)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("cost", justify="right", no_wrap=True)
    for tenant, line in [*told["tenants"].items(), ("all", told["total"])]:
        table.add_row(tenant, *[f"{line[field]:,}" for field in _FIELDS], f"{line['cost']:,.4f}")
    console = Console()
    (console if console.is_terminal else Console(width=PIPE_COLUMNS)).print(table)
    print(f"{told['since']} to {told['until']} (UTC); tokens of prompts are computed or cached")
    if not told["complete"]:
        print("Redis can't be asked: this is only what one router has not brought there yet")


def first_day(since: str, today: date) -> date:
    """Of ``2030-12-31``, ``today``, or ``7d``: today and the six days before it. Raises Invalid."""
    age = re.fullmatch(r"(\d{1,4})d", since)
    if since == "today" or (age and int(age[1]) > 0):
        return today - timedelta(days=int(age[1]) - 1 if age else 0)
    try:
        return date.fromisoformat(since)
    except ValueError as error:
        raise Invalid(f"--since is a day like 2030-12-31, today, or 7d, not {since!r}") from error


def _ask(name: str, since: str | None) -> dict[str, Any]:
    import httpx

    state = ClusterFolder(baton_home(), name).running()
    headers = {"authorization": f"Bearer {state.admin_key}"} if state.admin_key else {}
    today = datetime.fromtimestamp(SystemClock().wall_nanoseconds() / 1e9, UTC).date()
    params = {"since": first_day(since, today).isoformat()} if since else {}
    try:
        answer = httpx.get(
            f"{state.url}/admin/usage",
            params=params,
            headers=headers,
            timeout=ROUTER_SECONDS,
            trust_env=False,
        )
    except httpx.HTTPError as error:
        raise Unavailable(f"the router does not answer: {error}") from error
    if answer.status_code == 400:
        raise Invalid(answer.json()["error"]["message"])
    if answer.status_code != 200:
        raise Unavailable(f"the router says {answer.status_code}: {answer.text}")
    told: dict[str, Any] = answer.json()
    return told
