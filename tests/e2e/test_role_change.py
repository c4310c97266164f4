"""Tests that workers change pools during a stream without restarting or reloading weights."""

import json
from collections.abc import Iterator

import httpx
import pytest

from testkit.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(300)
PROMPT = list(range(10, 90))
TOKENS = 600
SCALE_AFTER = 20
FIELDS = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(prefill=2, decode=1) as running:
        yield running


def stream_and_scale(cluster: LocalCluster, *sizes: str) -> tuple[list[int], str]:
    """Stream a request and run ``baton scale`` after SCALE_AFTER tokens; return the tokens, and the
    output of ``baton scale``."""
    body = {
        "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "return_token_ids": True, **FIELDS,
    }  # fmt: skip
    tokens: list[int] = []
    printed = ""
    url = cluster.url + "/v1/completions"
    with httpx.Client(timeout=120) as client, client.stream("POST", url, json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            if len(tokens) >= SCALE_AFTER and not printed:
                printed = cluster.baton("scale", *sizes).stdout
    return tokens, printed


def pids(cluster: LocalCluster) -> dict[str, int]:
    return {entry["id"]: entry["pid"] for entry in cluster.status()["processes"]}


def pool(cluster: LocalCluster, role: str) -> list[str]:
    return [entry["id"] for entry in cluster.processes(role) if entry["state"] == "serving"]


def test_workers_change_roles_and_back_during_a_stream(cluster: LocalCluster) -> None:
    before = pids(cluster)
    expected = cluster.complete(PROMPT, TOKENS, **FIELDS)

    tokens, printed = stream_and_scale(cluster, "prefill=1", "decode=2")
    assert tokens == expected
    assert printed.splitlines()[-1] == "prefill 2 → 1, decode 1 → 2: done"
    assert pool(cluster, "prefill") == ["prefill-0"]
    assert pool(cluster, "decode") == ["prefill-1", "decode-0"]

    # The newest decode worker leaves its pool, and its running request migrates.
    tokens, printed = stream_and_scale(cluster, "prefill=2", "decode=1")
    assert tokens == expected
    assert printed.splitlines()[-1] == "prefill 1 → 2, decode 2 → 1: done"
    assert pool(cluster, "prefill") == ["prefill-0", "decode-0"]
    assert pool(cluster, "decode") == ["prefill-1"]

    assert cluster.complete(PROMPT, TOKENS, **FIELDS) == expected
    assert pids(cluster) == before
    assert cluster.baton("check").returncode == 0
