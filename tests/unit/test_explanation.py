"""What `baton explain` prints for people."""

from typing import Any

from rich.console import Console

from baton.cli.explanation import explanation


def told(**fields: Any) -> dict[str, Any]:
    """As a router answers."""
    placement = {"epoch": 1, "reason": "ring", "error": "lost worker d1"}
    reader = {
        "worker": "p0", "score": 1.5, "queue_seconds": 0.5, "service_seconds": 0.25,
        "local_blocks": 3, "fetched_blocks": 2, "late_seconds": 0.0,
    }  # fmt: skip
    other = reader | {"worker": "p1", "score": 1000.25, "late_seconds": None}
    return {
        "request_id": "cmpl-7",
        "prefill": {"id": "p0", "address": "p0:1", "generation": 1},
        "decode": {"id": "d0", "address": "d0:1", "generation": 1},
        "policy": "baton",
        "reason": "3 of 8 blocks at hand",
        "predicted": {"ttft_seconds": 0.75, "tbt_seconds": None},
        "actual": {"ttft_seconds": 0.8, "tbt_seconds": 0.01},
        "alternatives": {"prefill": [reader, other], "decode": []},
        "placements": [placement, placement],
        **fields,
    }


def shown(value: dict[str, Any]) -> list[list[str]]:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(*explanation(value), sep="\n", highlight=False, markup=False)
    return [line.split() for line in capture.get().splitlines() if line.strip()]


def test_facts_then_seconds_then_who_was_thought_of() -> None:
    lines = shown(told())
    assert lines[0] == ["request_id", "cmpl-7"]
    assert ["prefill.id", "p0"] in lines and ["decode.id", "d0"] in lines
    assert ["policy", "baton"] in lines
    assert ["reason", "3", "of", "8", "blocks", "at", "hand"] in lines
    assert ["first", "token", "0.7500", "s", "0.8000", "s"] in lines
    assert ["between", "tokens", "unknown", "0.0100", "s"] in lines
    assert ["*", "p0", "1.5000", "0.5000", "0.2500", "3", "2", "0.0000"] in lines
    assert ["p1", "1000.2500", "0.5000", "0.2500", "3", "2", "inf"] in lines
    assert lines[-1] == ["before,", "epoch", "1:", "ring:", "lost", "worker", "d1"]


def test_what_never_was_placed() -> None:
    nothing = {"ttft_seconds": None, "tbt_seconds": None}
    lines = shown(
        told(
            prefill=None, decode=None, predicted=nothing, actual=nothing,
            alternatives={"prefill": [], "decode": []}, placements=[],
        )
    )  # fmt: skip
    assert lines[-1] == ["between", "tokens", "unknown", "unknown"]
