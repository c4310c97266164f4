"""Renders a human-readable explanation of where a request was placed, why, and how it went."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from baton.core.ids import display_name

COLUMNS = ("score", "queue s", "service s", "local blocks", "fetched blocks", "late s")
NOT_FLAT_FIELDS = ("predicted", "actual", "alternatives", "placements", "choices", "bytes_shipped")


def render_explanation(explanation: dict[str, Any]) -> Iterator[RenderableType]:
    """Render a router's ``explanation``: first the facts line by line, then predicted and actual
    latencies, then the workers that were considered, with a star before the chosen worker, and at
    the end the earlier placements of the request."""
    facts = {key: value for key, value in explanation.items() if key not in NOT_FLAT_FIELDS}
    yield "\n".join(flat_lines(facts))
    yield _latency_table(explanation["predicted"], explanation["actual"])
    for role, candidates in explanation["alternatives"].items():
        if candidates:
            chosen = (explanation.get(role, explanation["decode"]) or {}).get("id", "")
            yield _candidate_table(role, candidates, chosen)
    for placement in explanation["placements"][:-1]:
        yield f"before, epoch {placement['epoch']}: {placement['reason']}: {placement['error']}"


def flat_lines(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from flat_lines(inner, f"{prefix}{key}.")
        else:
            shown = display_name(inner) if key == "id" and isinstance(inner, str) else inner
            yield f"{prefix + key:32} {shown}"


def _latency_table(predicted: dict[str, float | None], actual: dict[str, float | None]) -> Table:
    table = Table("", "predicted", "actual", box=None)
    for key, name in (("ttft_seconds", "TTFT"), ("itl_seconds", "inter-token latency")):
        table.add_row(name, _format_seconds(predicted[key]), _format_seconds(actual[key]))
    return table


def _format_seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.4f} s"


def _candidate_table(role: str, candidates: Sequence[dict[str, Any]], chosen: str) -> Table:
    table = Table(role, *COLUMNS, box=None)
    for candidate in candidates:
        table.add_row(
            ("* " if candidate["worker"] == chosen else "  ") + display_name(candidate["worker"]),
            _format_number(candidate["score"]),
            _format_number(candidate["queue_seconds"]),
            _format_number(candidate["service_seconds"]),
            str(candidate["local_blocks"]),
            str(candidate["fetched_blocks"]),
            _format_number(candidate["late_seconds"]),
        )
    return table


def _format_number(value: float | None) -> str:
    """Format a number; None stands for infinity, which JSON lacks."""
    return "inf" if value is None else f"{value:.4f}"
