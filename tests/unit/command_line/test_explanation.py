"""Tests the human-readable output of ``baton explain``."""

from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.core.ids import display_name
from command_line.explain import render_explanation
from command_line.main import app


def explanation(**fields: Any) -> dict[str, Any]:
    """Return an explanation as a router sends it, with ``fields`` changed."""
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
        "predicted": {"ttft_seconds": 0.75, "itl_seconds": None},
        "actual": {"ttft_seconds": 0.8, "itl_seconds": 0.01},
        "alternatives": {"prefill": [reader, other], "decode": []},
        "placements": [placement, placement],
        **fields,
    }


def rendered_words(value: dict[str, Any]) -> list[list[str]]:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(*render_explanation(value), sep="\n", highlight=False, markup=False)
    return [line.split() for line in capture.get().splitlines() if line.strip()]


def test_explanation_shows_facts_then_times_then_candidates() -> None:
    lines = rendered_words(explanation())
    assert lines[0] == ["request_id", "cmpl-7"]
    assert ["prefill.id", "p0"] in lines and ["decode.id", "d0"] in lines
    assert ["policy", "baton"] in lines
    assert ["reason", "3", "of", "8", "blocks", "at", "hand"] in lines
    assert ["TTFT", "0.7500", "s", "0.8000", "s"] in lines
    assert ["inter-token", "latency", "unknown", "0.0100", "s"] in lines
    assert ["*", "p0", "1.5000", "0.5000", "0.2500", "3", "2", "0.0000"] in lines
    assert ["p1", "1000.2500", "0.5000", "0.2500", "3", "2", "inf"] in lines
    assert lines[-1] == ["before,", "epoch", "1:", "ring:", "lost", "worker", "d1"]


def test_mixed_worker_that_serves_the_whole_request_is_marked() -> None:
    mixed = {
        "worker": "m0", "score": 0.5, "queue_seconds": 0.0, "service_seconds": 0.125,
        "local_blocks": 4, "fetched_blocks": 0, "late_seconds": 0.0,
    }  # fmt: skip
    lines = rendered_words(
        explanation(
            prefill=None, decode={"id": "m0", "address": "m0:1", "generation": 1},
            alternatives={"prefill": [], "decode": [], "mixed": [mixed]},
        )
    )  # fmt: skip
    assert ["*", "m0", "0.5000", "0.0000", "0.1250", "4", "0", "0.0000"] in lines


def test_explanation_of_a_request_that_was_never_placed() -> None:
    nothing = {"ttft_seconds": None, "itl_seconds": None}
    lines = rendered_words(
        explanation(
            prefill=None, decode=None, predicted=nothing, actual=nothing,
            alternatives={"prefill": [], "decode": []}, placements=[],
        )
    )  # fmt: skip
    assert lines[-1] == ["inter-token", "latency", "unknown", "unknown"]


def test_pod_uids_are_left_out() -> None:
    pod = "baton-decode-7d9f-x2x4z.0f3c1f6e-8a51-4a4c-9a52-5d1f7e7ac001"
    scored = {
        "worker": pod, "score": 1.5, "queue_seconds": 0.5, "service_seconds": 0.25,
        "local_blocks": 3, "fetched_blocks": 2, "late_seconds": 0.0,
    }  # fmt: skip
    alternatives = {"prefill": [], "decode": [scored]}
    lines = rendered_words(explanation(decode={"id": pod}, alternatives=alternatives))
    assert ["decode.id", "baton-decode-7d9f-x2x4z"] in lines
    assert next(line[:2] for line in lines if line[0] == "*") == ["*", "baton-decode-7d9f-x2x4z"]
    assert display_name("node.example.com") == "node.example.com"


def test_remote_router_is_queried_with_the_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def get(url: str, headers: dict[str, str], **_: object) -> httpx.Response:
        requests.append((url, headers))
        return httpx.Response(200, json={"request_id": "cmpl-7"})

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setenv("BATON_ADMIN_KEY", "root")
    result = CliRunner().invoke(app, ["explain", "cmpl-7", "--url", "https://here/", "--json"])
    assert result.output == '{"request_id": "cmpl-7"}\n'
    assert requests == [("https://here/admin/requests/cmpl-7", {"authorization": "Bearer root"})]
