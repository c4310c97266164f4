"""What became of a request, and why it went where it went, for people to read."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from baton.core.ids import display_name

COLUMNS = ("score", "queue s", "service s", "at hand", "to fetch", "late s")
SHOWN_APART = ("predicted", "actual", "alternatives", "placements", "choices")


def render_explanation(told: dict[str, Any]) -> Iterator[RenderableType]:
    """``told`` is what a router answers: facts line by line, then what was predicted and what
    came, then who was thought of; a star is before those that were taken."""
    facts = {key: value for key, value in told.items() if key not in SHOWN_APART}
    yield "\n".join(flat_lines(facts))
    yield _seconds(told["predicted"], told["actual"])
    for role, others in told["alternatives"].items():
        if others:
            chosen = (told[role] or {}).get("id", "")
            yield _others(role, others, chosen)
    for placement in told["placements"][:-1]:
        yield f"before, epoch {placement['epoch']}: {placement['reason']}: {placement['error']}"


def flat_lines(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from flat_lines(inner, f"{prefix}{key}.")
        else:
            told = display_name(inner) if key == "id" and isinstance(inner, str) else inner
            yield f"{prefix + key:32} {told}"


def _seconds(predicted: dict[str, float | None], actual: dict[str, float | None]) -> Table:
    table = Table("", "predicted", "actual", box=None)
    for key, name in (("ttft_seconds", "first token"), ("tbt_seconds", "between tokens")):
        table.add_row(name, _told(predicted[key]), _told(actual[key]))
    return table


def _told(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.4f} s"


def _others(role: str, others: Sequence[dict[str, Any]], chosen: str) -> Table:
    table = Table(role, *COLUMNS, box=None)
    for other in others:
        table.add_row(
            ("* " if other["worker"] == chosen else "  ") + display_name(other["worker"]),
            _number(other["score"]),
            _number(other["queue_seconds"]),
            _number(other["service_seconds"]),
            str(other["local_blocks"]),
            str(other["fetched_blocks"]),
            _number(other["late_seconds"]),
        )
    return table


def _number(value: float | None) -> str:
    """JSON has no infinity: None stands for it."""
    return "inf" if value is None else f"{value:.4f}"
