"""Tests that docs/logs.md lists exactly the log events that programs can write."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "baton", "router", "conductor", "kvstore", "prefill_worker", "decode_worker",
    "attached_worker",
    "simulator", "orchestrator", "load_generator", "command_line",
)  # fmt: skip
LEVELS = {"debug", "info", "warning", "error", "exception"}
COMPUTED_EVENTS = {
    "newer_settings_ignored", "writes_lost",
    "disk_failed", "request_failed", "request_refused", "request_migrated", "request_rerouted",
}  # fmt: skip
"""Events whose level or name is computed where they are logged."""


def written() -> Iterator[str]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and _is_log(node.func) and node.args:
                    event = node.args[0]
                    if isinstance(event, ast.Constant):
                        yield str(event.value)


def _is_log(call: ast.expr) -> bool:
    return (
        isinstance(call, ast.Attribute)
        and call.attr in LEVELS
        and isinstance(call.value, ast.Name)
        and call.value.id == "log"
    )


def documented() -> set[str]:
    """Return the first column of every table whose first column is `event`."""
    events: set[str] = set()
    inside = False
    for line in (ROOT / "docs" / "logs.md").read_text().splitlines():
        if line.startswith("| event |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside:
            events |= set(re.findall(r"`([a-z_]+)`", line.split("|")[1]))
    return events


def test_every_event_is_documented_and_every_documented_one_exists() -> None:
    events = set(written()) | COMPUTED_EVENTS
    assert len(events) > 50
    assert sorted(events - documented()) == []
    assert sorted(documented() - events) == []
