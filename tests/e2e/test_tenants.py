"""Tests pinning a prefix by a cache breakpoint, and a tenant's usage, in a real cluster."""

import json
from typing import Any

import pytest

from testkit.local_cluster import LocalCluster
from testkit.machine import pause

pytestmark = pytest.mark.timeout(120)
SYSTEM = "You read Python, and answer in one line. " * 20


def chat(cluster: LocalCluster, question: str) -> tuple[dict[str, Any], str]:
    part = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "system", "content": [part]}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answer, headers = cluster.post_with_headers("/v1/chat/completions", body)
    return answer["usage"], headers["x-baton-request-id"]


def pin_of(cluster: LocalCluster, request_id: str) -> dict[str, Any]:
    """Wait until the whole prefix is pinned, which happens after the response; return the pin."""
    while True:
        [pin] = cluster.get(f"/admin/requests/{request_id}")["pins"]
        if not pin["error"]:
            return dict(pin)
        pause(0.05)


def test_a_cache_breakpoint_pins_its_prefix_and_usage_adds_up(cluster: LocalCluster) -> None:
    before = cluster.get("/admin/usage")["total"]
    first, request_id = chat(cluster, "What is a list?")
    pin = pin_of(cluster, request_id)
    assert pin["seconds"] == 300
    assert 0 < pin["pinned_blocks"] * 16 <= pin["num_tokens"] < first["prompt_tokens"]
    second, again = chat(cluster, "And what is a tuple?")
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached >= pin["pinned_blocks"] * 16
    assert pin_of(cluster, again)["pinned_blocks"] == pin["pinned_blocks"]
    [stats] = json.loads(cluster.baton("kv", "stats", "--json").stdout).values()
    assert stats["pinned_bytes"] > 0
    assert stats["violation"] == ""
    after = json.loads(cluster.baton("usage", "--json").stdout)["total"]
    spent = {name: after[name] - before[name] for name in after}
    assert spent["requests"] == 2
    assert spent["prompt_tokens"] == first["prompt_tokens"] + second["prompt_tokens"]
    assert spent["prompt_tokens"] == spent["computed_tokens"] + spent["cached_tokens"]
    assert spent["cached_tokens"] >= cached
    assert spent["completion_tokens"] == first["completion_tokens"] + second["completion_tokens"]
